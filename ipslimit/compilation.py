"""Compiled entry points, kept on disk between processes and verified before they are used."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import llvmlite
import numba
import numpy
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.serialize import dumps, loads
from numba.extending import intrinsic

from .compilers import EntryCompiler, InnerCompiler, InnerCompilerOfAnything, InnerLoop

# What compiled code is made of, together with what its function's own file calls elsewhere.
_HERE = Path(__file__).parent
CPU_SOURCES = (Path(__file__), _HERE / "compilers.py", *sorted(_HERE.glob("cpu/*.py")))
# Seconds of compilation after which the user is told what is going on.
ANNOUNCE_AFTER = 2.0
# No kept function comes near: a file of this size is no file of ours.
MOST_BYTES = 2**28
# Seconds after which a file that was being written is what a killed process left.
ABANDONED = 3600.0

_log = logging.getLogger("ipslimit")
_warned = threading.Event()
_announced = set()


def compiled_entry(*sources: str | Path) -> Callable:
    """Decorator: compile without the GIL, keep the result, and never use a wrong one.

    numba recompiles a kept function when its own file has changed, but not when a file it calls
    into has: an edit of a loop would leave every sweep built on it with the old one. So the
    contents of all sources are part of what a kept function is known by. And numba trusts what it
    finds: one flipped bit makes a subtraction of an addition, and a cut file ends every later
    process. So what is kept is read back behind a checksum (see `KeptFiles`). Whatever is wrong
    with it, or with the folder, the function is compiled afresh, and one line a process says so.

    Parameters
    ----------
    sources : paths
        Further files that the function is compiled from, besides its own and those of `cpu`.

    Notes
    -----
    The result is kept beside the source file, or in the user's cache folder where that is
    read-only (NUMBA_CACHE_DIR overrides both); where no folder can be written, it is compiled in
    every process. Under NUMBA_DISABLE_JIT the function is returned as it is.
    """

    def decorate(function):
        if numba.config.DISABLE_JIT:
            return function
        # whose wrapper for C callbacks nobody calls
        compiled = njit(nogil=True, no_cfunc_wrapper=True, pipeline_class=EntryCompiler)(function)
        _keep(compiled, function, (*CPU_SOURCES, *sources))
        return compiled

    return decorate


def inner_loop(
    function: Callable | None = None, *, allocates=False, ours=True, **options
) -> Callable:
    """Decorator: compile for compiled code alone, that is for entries, callbacks and other loops.

    numba would optimise such a function by itself, make machine code of it with two wrappers, and
    then do it all once more in whatever calls it; and it would do so again for every literal that
    it is called with, and count references to each array that is passed on. Here it is optimised
    with the entries that it has become part of, once for all values of a type, and owns nothing.

    Parameters
    ----------
    function : callable
    allocates : bool
        Whether arrays are made in it, or returned by it or by what it calls. Without, numba refuses
        to make one, but would lose count of one that is returned.
    ours : bool
        False for code of the user's, which may hold whatever numba knows.
    options : of `numba.njit`

    Raises
    ------
    TypeError
        When it is called from Python.
    """
    if function is None:
        return functools.partial(inner_loop, allocates=allocates, ours=ours, **options)
    if numba.config.DISABLE_JIT:
        return function
    options |= {"nopython": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    options["_nrt"] = allocates
    compiler = InnerCompiler if ours else InnerCompilerOfAnything
    return InnerLoop(function, targetoptions=options, pipeline_class=compiler)


def compiled_callback(signature, function: Callable, *sources: str | Path, keep: bool) -> CFunc:
    """Compile a function whose `address` compiled code can call; kept as `compiled_entry` keeps.

    Parameters
    ----------
    signature : numba signature
    function : callable
        Its `__qualname__` must be another for every function that is kept, also for closures:
        what processes have kept is linked by name.
    sources : paths
        All files that it is compiled from.
    keep : bool
        False for code of the user's, whose sources nobody knows.
    """
    kinds = signature.args, signature.return_type
    options = {"_nrt": False}
    callback = CFunc(function, kinds, locals={}, options=options, pipeline_class=EntryCompiler)
    if keep:
        _keep(callback, function, sources)
    callback.compile()
    return callback


def caller(signature_of: Callable) -> Callable:
    """A function call(address, arguments) for compiled code that calls what is at an address.

    Parameters
    ----------
    signature_of : callable
        The signature of the callback, from the numba types of the arguments. They are cast to it;
        what cannot be is refused when the call is compiled.
    """

    @intrinsic
    def call(typing_context, address, arguments):
        wanted = signature_of(arguments).args
        given = types.Tuple(wanted)

        def generate(context, builder, signature, values):
            kinds = [context.get_value_type(kind) for kind in wanted]
            kind = ir.FunctionType(context.get_value_type(types.void), kinds)
            function = builder.inttoptr(values[0], kind.as_pointer())
            builder.call(function, cgutils.unpack_tuple(builder, values[1]))
            return context.get_dummy_value()

        return types.void(types.intp, given), generate

    return call


@contextlib.contextmanager
def announced(dtype):
    """Tell the user if what is compiled within, for a dtype, takes a few seconds; once a dtype."""

    def announce() -> None:
        if dtype not in _announced:
            _announced.add(dtype)
            _log.warning("compiling the kernels for %s (once, where it can be kept)", dtype)

    timer = threading.Timer(ANNOUNCE_AFTER, announce)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _keep(compiled, function: Callable, sources: Sequence[str | Path]) -> None:
    """Give a compiled function its cache on disk."""
    files = (inspect.getfile(function), *sources)
    contents = [Path(file).read_bytes() for file in files]
    try:
        compiled._cache = KeptCode(function, contents)
    except (RuntimeError, OSError):
        _warn_once(
            "no folder can be written to keep compiled code in, so every process compiles "
            "anew. Set NUMBA_CACHE_DIR to one that can."
        )


class KeptCode(FunctionCache):
    """numba's cache of one function, in verified files; a failure is a warning.

    Parameters
    ----------
    function : the Python function
    sources : contents of all files that it is compiled from

    Raises
    ------
    RuntimeError
        If there is no folder that can be written.
    """

    def __init__(self, function: Callable, sources: list[bytes]):
        super().__init__(function)
        digest = hashlib.sha256()
        for source in sources:
            digest.update(hashlib.sha256(source).digest())
        # other versions of these read and make other code
        versions = numba.__version__, llvmlite.__version__, numpy.__version__
        stamp = (digest.hexdigest(), *versions)
        self._cache_file = KeptFiles(Path(self.cache_path), self._impl.filename_base, stamp)
        wanted = numba.config.CACHE_DIR
        if wanted and Path(wanted) not in Path(self.cache_path).parents:
            _warn_once(
                f"NUMBA_CACHE_DIR must be a folder that can be written; got {wanted!r}. Compiled "
                f"code is kept in {self.cache_path} instead."
            )

    def load_overload(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # whatever it is, compiling gives what is right
            _warn_once(
                f"compiled code kept in {self.cache_path} cannot be used ({_reason(error)}); it is "
                "compiled afresh."
            )
            return None

    def save_overload(self, sig, data) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:  # the code is there, for this process
            _warn_once(
                f"compiled code cannot be kept in {self.cache_path} ({_reason(error)}), so every "
                "process compiles anew. Free space, or set NUMBA_CACHE_DIR to another folder."
            )


class KeptFiles:
    """One file for each signature and kind of processor, behind a checksum.

    A file begins with the checksum of its own name and all that follows, which is the identity of
    the code and then the code. So nothing that is cut, altered or swapped is ever unpickled, let
    alone run; what fits but has another identity is of other sources or versions, and is replaced.
    Each file has a name that follows from what it holds, and is renamed to it when it is whole:
    processes that compile at once need no lock. (numba's own cache keeps an index beside its
    files, and announces a name in it before the file is there: two processes could each be left
    with the other's code.)

    This is against damage. Whoever can write into the folder can run code as its reader, as with
    any compiled file.
    """

    def __init__(self, folder: Path, name: str, stamp: tuple[str, ...]):
        self.folder, self.name, self.stamp = folder, name, stamp

    def load(self, key: tuple) -> object | None:
        """What was kept under this key; None if nothing was, or for other sources or versions.

        Raises
        ------
        ValueError, OSError
            If there is something that cannot be trusted.
        """
        path = self._path(key)
        try:
            if path.exists() and not path.is_file():  # reading a pipe would never end
                raise ValueError(f"{path.name} is no file")
            if path.stat().st_size > MOST_BYTES:
                raise ValueError(f"{path.name} is too large")
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        checksum, _, rest = content.partition(b"\n")
        if checksum != _checksum(path, rest):
            raise ValueError(f"{path.name} is truncated or altered: its checksum does not fit")
        identity, _, code = rest.partition(b"\n")
        return loads(code) if identity == self._identity(key) else None

    def save(self, key: tuple, code: object) -> None:
        """Keep the code under this key, in place of what was there."""
        path = self._path(key)
        self._forget_abandoned(path)
        rest = self._identity(key) + b"\n" + dumps(code)
        # not by mkstemp, whose files are private: users may share the folder
        unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex[:16]}.tmp")
        try:
            unfinished.write_bytes(_checksum(path, rest) + b"\n" + rest)
            os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def flush(self) -> None:
        """Forget all that is kept of this function."""
        for path in self.folder.glob(f"{self.name}.*.kept"):
            path.unlink(missing_ok=True)

    def _path(self, key: tuple) -> Path:
        return self.folder / f"{self.name}.{_digest(key)[:16]}.kept"

    def _identity(self, key: tuple) -> bytes:
        return _digest((self.stamp, key)).encode()

    def _forget_abandoned(self, path: Path) -> None:
        for unfinished in self.folder.glob(f"{path.name}.*.tmp"):
            with contextlib.suppress(OSError):  # gone, or another user's
                if time.time() - unfinished.stat().st_mtime > ABANDONED:
                    unfinished.unlink()


def _digest(key: tuple) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()


def _checksum(path: Path, content: bytes) -> bytes:
    # with the name: one function's code under another's name is damage too
    return hashlib.sha256(path.name.encode() + b"\n" + content).hexdigest().encode()


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())


def _warn_once(text: str) -> None:
    """One line a process, not one for every function and dtype."""
    if not _warned.is_set():
        _warned.set()
        _log.warning(text)
