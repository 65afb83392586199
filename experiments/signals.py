"""Ctrl-C and SIGTERM: a line of this process alone, and workers that it ends without a word."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

# What a terminal sends to a command and all of its workers, and what ends it from elsewhere.
ENDING = (signal.SIGINT, signal.SIGTERM)
AGAIN = 0.05  # seconds until an interrupt that was lost comes again


class Terminated(KeyboardInterrupt):
    """SIGTERM came: everything is put in order as after Ctrl-C."""


def number_of(interrupt: KeyboardInterrupt) -> int:
    """The signal that was raised as this."""
    return signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT


@contextlib.contextmanager
def handled(handler: Callable[[int, object], object]) -> Iterator[None]:
    """Both signals are handled so inside; only the main thread can have them otherwise.

    One that is ignored stays so: a shell starts commands behind & and nohup like that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    before = {n: old for n, old in before.items() if old not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def leave(number: int, frame: object) -> NoReturn:
    """While there is nothing to put in order; imports turn exceptions into their own."""
    with contextlib.suppress(OSError):
        os.write(2, f"ipslimit: {told(number)}\n".encode())
    os._exit(status(number))


def interrupt(number: int, frame: object) -> NoReturn:
    """While there is something to put in order."""
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


@contextlib.contextmanager
def not_lost() -> Iterator[None]:
    """An interrupt inside comes again if it came where Python drops exceptions.

    In a destructor, say, or a callback out of C, where it would be shown as a traceback, and
    everything would go on.
    """
    before = sys.unraisablehook

    def hook(lost) -> None:
        if not isinstance(lost.exc_value, KeyboardInterrupt):
            before(lost)
            return
        again = threading.Timer(AGAIN, signal.raise_signal, (number_of(lost.exc_value),))
        again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Signals that come inside are handled at its end; processes that are begun hear no Ctrl-C.

    They have it blocked from their first moment, and not only once they can say so themselves.
    """
    come: list[int] = []
    try:
        with handled(lambda number, frame: come.append(number)), _blocked():
            yield
    finally:
        for number in come[:1]:
            signal.raise_signal(number)


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Ctrl-C in this thread, where the system knows how; what it starts inherits that."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def status(number: int) -> int:
    """What a shell calls a command that this signal ended."""
    return 128 + number


def told(number: int) -> str:
    """What is said at the end."""
    word = "interrupted" if number == signal.SIGINT else "terminated"
    return f"{word}; finished cells are kept, run the same command again to resume"
