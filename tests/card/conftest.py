"""Tests in Triton's interpreter, which tests/test_card.py runs in a process of their own.

Triton is told to interpret when it is imported, so other tests must not share their process.
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    ready = set()

    def called_inside(self, *arguments, **named):
        """A function that a kernel calls, without making the language ready once again.

        The interpreter looks through all of Triton's language at every such call, for milliseconds.
        Its own modules need it once; ours are ready since the kernel was launched.
        """
        module = self.fn.__module__
        if module.startswith("triton.") and module not in ready:
            ready.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **named)

    interpreter.InterpretedFunction.__call__ = called_inside


@pytest.fixture(autouse=True)
def on_the_card(monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", "triton")
