"""Interacting-particle transformers, their optimizer rules, and how fast they reach the limit."""

import ast as _ast
import importlib as _importlib
import os as _os
import pkgutil as _pkgutil

# Matrix products must not round differently with the batch or the place in memory, or a seed's
# numbers would depend on its batch mates. MKL reads this before its first product in a process.
# Not AUTO: with AVX-512 its strict mode still sums thin products otherwise in larger batches.
_os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

from ._version import __version__

# Name -> the module that has it ("" for a room of the package itself), as the stub beside this file
# tells type checkers. They are imported on first use: torch takes a second, and `ipslimit --help`
# needs none.
_HOMES = {
    alias.name: line.module or ""
    for line in _ast.parse(_pkgutil.get_data(__name__, "__init__.pyi") or b"").body
    if isinstance(line, _ast.ImportFrom) and line.module != "_version"
    for alias in line.names
}

__all__ = ["__version__", *sorted(name for name, home in _HOMES.items() if home)]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    module = _importlib.import_module(f".{home or name}", __name__)
    return globals().setdefault(name, getattr(module, name) if home else module)


def __dir__():
    return sorted({*globals(), *_HOMES})
