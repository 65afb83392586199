"""A class of the user's own, out of a file of his: `mine.py:Lion` wherever a name is asked for.

The file is run once, as a module of its own whose name is a digest of its text. Worker processes
find that module by its name again (`carried`), so what is defined in such a file can be sent to
them; a text that was edited since is another module, and what was computed with the old one is
not taken for its results.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from ipslimit.checks import shown

PREFIX = "ipslimit_own_"
# File and text of every module made here, by its name.
_sources: dict[str, tuple[str, bytes]] = {}


def is_own(text: str) -> bool:
    """Whether a name is meant as one in a file, FILE.py:NAME."""
    return ".py:" in text


def own_class(option: str, text: str, kind: type, digest: str | None = None) -> type:
    """The class NAME of FILE, where `text` is FILE.py:NAME.

    Parameters
    ----------
    option : str
        What asks for it, for messages.
    text : str
    kind : type
        What it must be a subclass of.
    digest : str, optional
        From `digest_of`: what the file's text must be. It is not read again where a module of that
        text is known.

    Raises
    ------
    ValueError
        If there is no such file, it cannot be run, has another text, or has no such class.
    """
    file, _, name = text.rpartition(":")
    module = module_of(option, file, digest)
    found = getattr(module, name, None)
    if not isinstance(found, type) or not issubclass(found, kind):
        there = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type)
            and issubclass(value, kind)
            and value.__module__ == module.__name__
        ]
        what = f"a class of {_public_name(kind)}"
        raise ValueError(
            f"{option} must name {what} in {file}; got {shown(name)}. "
            + (f"Use {file}:{there[0]}." if there else f"Define {name}({kind.__name__}) there.")
        )
    return found


def _public_name(kind: type) -> str:
    """As a user imports it: out of the outermost package that has it."""
    parts = kind.__module__.split(".")
    packages = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    having = (p for p in packages if getattr(sys.modules.get(p), kind.__name__, None) is kind)
    return f"{next(having, kind.__module__)}.{kind.__name__}"


def module_of(option: str, file: str, digest: str | None = None) -> ModuleType:
    """The module that a file of the user's makes, run once for each text of it."""
    if digest is not None and PREFIX + digest in sys.modules:
        return sys.modules[PREFIX + digest]
    try:
        source = Path(file).read_bytes()
    except OSError as error:
        raise ValueError(
            f"{option} must name a file that can be read; got {file} ({error.strerror or error}). "
            "Write it as path/to/file.py:Name."
        ) from None
    if digest is not None and digest != _digest(source):
        raise ValueError(
            f"{option} must be out of the text of {file} that it was set with; the file was edited "
            "since. Restore that text, or begin anew with this one."
        )
    return _run(option, file, source)


def digest_of(kind: type) -> str | None:
    """Of the text of the file that defines a class, if that is one of the user's own files."""
    name = kind.__module__
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else None


def _digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:16]


def _run(option: str, file: str, source: bytes) -> ModuleType:
    name = PREFIX + _digest(source)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_loader(name, loader=None, origin=os.path.abspath(file))
    module = importlib.util.module_from_spec(spec)
    module.__file__ = spec.origin
    sys.modules[name] = module  # dataclasses look themselves up there
    try:
        exec(compile(source, spec.origin, "exec"), vars(module))
    except Exception as error:
        del sys.modules[name]
        raise ValueError(
            f"{option} must name a Python file that runs; {file} raised {type(error).__name__}: "
            f"{error}. Mend that file."
        ) from error
    _sources[name] = module.__file__, source
    return module


def carried() -> dict[str, tuple[str, bytes]]:
    """What a worker needs to find the modules of this process: file and text by module name."""
    return dict(_sources)


def receive(modules: dict[str, tuple[str, bytes]]) -> None:
    """Make the modules of another process, of which `carried` told, known in this one."""
    for file, source in modules.values():
        _run("the file", file, source)
