"""How far running tasks have come: they tell, in whichever process, and one bar shows it.

Tasks tell by a file with one number a task, which the process that shows the bar looks at now and
then. So nothing of it goes through arguments or results, and a worker that is killed leaves nothing
but the last number it wrote.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import struct
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

# Seconds between two numbers that a task writes, and two looks at them where a terminal shows the
# bar, or where it goes into a file, which keeps all that was ever shown; and at least between two
# finished tasks that are shown apart.
WRITTEN, ON_TERMINAL, INTO_FILE, APART = 0.25, 0.5, 10.0, 0.1
# Of the work that was missing, what must be done before it tells the time that is left: the first
# tasks compile and read what later ones find.
TELLING = 0.02

_SHARE = struct.Struct("=d")
_listener: contextvars.ContextVar[Callable[[float], None] | None] = contextvars.ContextVar(
    "listener", default=None
)


class Place(NamedTuple):
    """Where a task tells its share: the file, and the task's number there."""

    file: str
    number: int


def report(done: float, total: float) -> None:
    """Tell that so much of the task that runs in this thread is done.

    Called as often as wanted: it is written a few times a second, and where nobody listens not at
    all.
    """
    listener = _listener.get()
    if listener is not None:
        listener(done / total)


def reporting_steps(steps: int) -> Callable[[int, object], None]:
    """A callback of `train_particles` that reports each of so many steps."""
    return lambda step, run: report(step, max(1, steps))


@contextlib.contextmanager
def stage(start: float, stop: float) -> Iterator[None]:
    """What is reported inside counts from `start` to `stop`, shares of the whole task."""
    outer = _listener.get()
    if outer is None:
        yield
        return
    with _listening(lambda share: outer(start + (stop - start) * share)):
        yield


@contextlib.contextmanager
def reporting(place: Place | None) -> Iterator[None]:
    """What is reported inside is of the task of this place; of None nobody hears."""
    with _listening(None if place is None else _Writer(place)):
        yield


@contextlib.contextmanager
def _listening(listener: Callable[[float], None] | None) -> Iterator[None]:
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class _Writer:
    """Writes shares at a task's place, but not more often than is looked."""

    def __init__(self, place: Place):
        self._place, self._next = place, 0.0

    def __call__(self, share: float) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + WRITTEN
        # the file goes with the run that shows the bar, and is not made anew for nobody
        with contextlib.suppress(OSError), open(self._place.file, "r+b", buffering=0) as file:
            file.seek(_SHARE.size * self._place.number)
            file.write(_SHARE.pack(share))


class _Bar(tqdm):
    """A tqdm bar that says how much time is left once that can be known."""

    begun: float | None = None  # when the first task was

    @property
    def format_dict(self) -> dict:
        new, missing = self.n - self.initial, self.total - self.initial
        left = ""
        if self.begun is not None and new > 0 and new >= TELLING * missing:
            seconds = (time.monotonic() - self.begun) * (missing - new) / new
            left = f", {tqdm.format_interval(max(0.0, seconds))} left"
        return super().format_dict | {"left": left}


class Progress:
    """The bar of a run: the costs of finished tasks, and of those that run their shares so far.

    Parameters
    ----------
    total : float
        The cost of all tasks.
    found : float
        Of those that were found finished.
    name : str
        Of the bar.
    shown : bool or "always"
        True is on a terminal alone, "always" also where it goes into a file. Otherwise nothing is
        shown, and no task writes anything.
    """

    def __init__(self, total: float, found: float, name: str, shown: bool | str = True):
        self._bar = _Bar(
            total=total,
            initial=found,
            desc=name,
            disable={True: None, False: True}.get(shown, False),  # None: but for a terminal
            dynamic_ncols=True,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}{left}{postfix}",
        )
        self._finished, self._lock, self._looked = found, threading.Lock(), -math.inf
        self._file: Path | None = None
        # number and cost of every unfinished task
        self._running: dict[Hashable, tuple[int, float]] = {}

    def __enter__(self) -> Progress:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if not self._bar.disable:
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._look()
        self._bar.close()

    def say(self, text: str) -> None:
        """What stands behind the bar."""
        self._bar.set_postfix_str(text)

    @contextlib.contextmanager
    def of(
        self, costs: dict[Hashable, float], file: Path | None
    ) -> Iterator[dict[Hashable, Place | None]]:
        """Tasks of these costs are computed inside; gives the place where each may report.

        `file` is for what they report, and goes at the end: None where workers would not see it.
        """
        shown = not self._bar.disable
        self._file = file if file is not None and shown and _emptied(file, len(costs)) else None
        self._running = {key: (number, costs[key]) for number, key in enumerate(costs)}
        if self._bar.begun is None:
            self._bar.begun = time.monotonic()
        try:
            yield {
                key: None if self._file is None else Place(str(self._file), number)
                for key, (number, _) in self._running.items()
            }
        finally:
            self._running = {}
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.unlink()
                self._file = None

    def finish(self, key: Hashable) -> None:
        """That task is done."""
        with self._lock:
            self._finished += self._running.pop(key)[1]
        if time.monotonic() >= self._looked + APART:
            self._look()

    def _watch(self) -> None:
        interval = ON_TERMINAL if self._bar.fp.isatty() else INTO_FILE
        while not self._stop.wait(interval):
            self._look()

    def _look(self) -> None:
        self._looked = time.monotonic()
        with self._lock:
            shares = _shares(self._file)
            begun = sum(shares.get(number, 0.0) * cost for number, cost in self._running.values())
            # a task that is begun again, after its worker died, does not take the bar back
            self._bar.n = max(self._bar.n, min(self._finished + begun, self._bar.total))
        self._bar.refresh()


def _emptied(file: Path, count: int) -> bool:
    """Whether a file of so many zeros could be made."""
    try:
        file.write_bytes(bytes(_SHARE.size * count))
    except OSError:  # a full disk: whatever it takes no more of is not this
        return False
    return True


def _shares(file: Path | None) -> dict[int, float]:
    """What tasks have written, within [0, 1]."""
    try:
        content = b"" if file is None else file.read_bytes()
    except OSError:
        return {}
    whole = len(content) // _SHARE.size * _SHARE.size
    found = enumerate(share for (share,) in _SHARE.iter_unpack(content[:whole]))
    return {number: share for number, share in found if 0.0 <= share <= 1.0}
