"""What a command prints reaches whoever listens, or is given up in an orderly way."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO, Any

# What a shell calls a command that was ended by writing into a pipe that nobody reads.
UNREAD = 128 + 13


class CannotPrint(RuntimeError):
    """Results that standard output does not take; the message says what to do."""


class _Stream:
    """A stream whose refusals are put in this module's words, or nobody's."""

    def __init__(self, stream: IO[str]):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._refused(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._refused(error)

    def _refused(self, error: OSError) -> None:
        raise NotImplementedError


class _Output(_Stream):
    def _refused(self, error: OSError) -> None:
        _silence(self._stream)
        if isinstance(error, BrokenPipeError):
            sys.exit(UNREAD)
        raise CannotPrint(
            f"the output cannot be written ({error.strerror or error}); what is finished is kept. "
            "Send it elsewhere, and run the same command again to resume."
        ) from error


class _Beside(_Stream):
    """Progress and messages: where nobody can hear them, the run goes on without."""

    def _refused(self, error: OSError) -> None:
        _silence(self._stream)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Both streams can be written inside: what they cannot encode is replaced by question marks.

    When nobody reads the output any more, the program ends without a word, as others do; when it
    cannot be written, CannotPrint is raised. Flush it before leaving, to be told.
    """
    _fill_closed()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(_Beside(_lenient(sys.stderr))))
        stack.enter_context(contextlib.redirect_stdout(_Output(_lenient(sys.stdout))))
        yield


def _fill_closed() -> None:
    """Put nothing in a closed stream's place, or the next file would get its number and words."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # the lowest number that is free, which is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))


def _lenient(stream: IO[str]) -> IO[str]:
    if hasattr(stream, "reconfigure"):  # not where a notebook or a test has put its own
        stream.reconfigure(errors="replace")
    return stream


def _silence(stream: IO[str]) -> None:
    """What is left in it goes nowhere: Python would try again at its end, and complain."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
