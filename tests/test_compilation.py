"""Kept compiled code: right when processes compile at once, renewed when a source changes."""

import os
import subprocess
import sys

import pytest

CHECK = """
import sys
import torch
from ipslimit import Heads, attention_field
from ipslimit.attention import eager, fused
dtype = getattr(torch, sys.argv[1])
torch.manual_seed(0)
heads = Heads(*(torch.randn(2, 5, *s, dtype=dtype) for s in ((2, 3), (2, 3), (2, 3), (3, 2))))
x = torch.randn(2, 3, 4, 3, dtype=dtype)
arguments = (x, heads.packed, heads.weights, heads.layout, False)
gap = (fused.field(*arguments) - eager.field(*arguments)).abs().max()
assert gap < 100 * torch.finfo(dtype).eps, gap
print("right")
"""


@pytest.mark.slow
def test_processes_that_compile_at_once_for_two_dtypes_are_all_right(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for _ in range(2):  # compiled, then kept
        running = [
            subprocess.Popen(
                [sys.executable, "-c", CHECK, dtype], env=environment, stdout=subprocess.PIPE
            )
            for dtype in ("float64", "float32") * 2
        ]
        assert [process.communicate()[0] for process in running] == [b"right\n"] * 4


def test_kept_code_is_not_used_once_a_file_it_calls_into_has_changed(tmp_path):
    """A function kept with one version of a second file must be compiled again with the next."""
    program = tmp_path / "program.py"
    helper = tmp_path / "helper.py"
    program.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import helper\n"
        "from ipslimit.compilation import compiled_entry\n"
        "@compiled_entry(helper.__file__)\n"
        "def entry(x):\n"
        "    return helper.inner(x)\n"
        "print(entry(1.0), sum(entry.stats.cache_hits.values()))\n"
    )

    def run(source):
        helper.write_text(f"from numba import njit\n@njit\ndef inner(x):\n    return {source}\n")
        command = [sys.executable, str(program), str(tmp_path)]
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kept")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert run("x + 1.0") == ["2.0", "0"]
    assert run("x + 1.0") == ["2.0", "1"]  # kept
    assert run("x + 2.0") == ["3.0", "0"]
