"""Interleaved timing: all contestants of a case in turn, round after round, in one process.

A machine's speed drifts, with its clock and with what else it runs. Contestants that take turns
see the same drift, so their ratio, taken round by round, is steadier than their times are.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

import numpy as np

ROUNDS = 7
SAMPLE = 8e-3  # seconds that one sample lasts at least
# Threads of torch's OpenMP spin for about a millisecond after their work; the pause keeps those of
# one contestant out of the time of the next.
PAUSE = 3e-3


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int = ROUNDS,
    sample: float = SAMPLE,
    budget: float = 20.0,
) -> dict[str, np.ndarray]:
    """Seconds per call of every contestant, one number a round.

    Parameters
    ----------
    contestants : name -> function of no argument
        Each is called once before it is timed (compilation, caches), and once more, untimed, at
        the start of its turn.
    rounds : int
    sample : float
        Calls are repeated until a sample should last this long.
    budget : float
        Seconds for the whole case: a contestant whose share is spent keeps 3 rounds at least.

    Returns
    -------
    dict name -> array (rounds,)
        NaN in rounds that a slow contestant was left out of.
    """
    repeats, cost = {}, {}
    for name, call in contestants.items():
        call()
        once = min(_seconds(call), _seconds(call))
        repeats[name] = max(1, int(np.ceil(sample / max(once, 1e-7))))
        cost[name] = once * (repeats[name] + 1)
    samples = {name: np.full(rounds, np.nan) for name in contestants}
    share = budget / len(contestants)
    names = list(contestants)
    for i in range(rounds):
        # another order every round: nobody always follows the same neighbour
        for name in names[i % len(names) :] + names[: i % len(names)]:
            if i >= 3 and cost[name] * i > share:
                continue
            call = contestants[name]
            time.sleep(PAUSE)
            call()
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            samples[name][i] = (time.perf_counter() - start) / repeats[name]
    return samples


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclasses.dataclass
class Contest:
    """Our time against that of the best peer.

    Attributes
    ----------
    times : dict name -> median seconds, ours included
    best : str
        The peer with the smallest median; "" without peers.
    ratio, low, high : float
        Median and quartiles, over rounds, of the best peer's time over ours: above 1 we are
        faster.
    """

    times: dict[str, float]
    best: str
    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Mapping[str, np.ndarray], ours: str = "ipslimit") -> Contest:
        times = {name: float(np.nanmedian(values)) for name, values in samples.items()}
        peers = [name for name in times if name != ours]
        if not peers:
            return cls(times, "", np.nan, np.nan, np.nan)
        best = min(peers, key=times.get)
        ratios = samples[best] / samples[ours]
        low, middle, high = np.nanpercentile(ratios, [25, 50, 75])
        return cls(times, best, float(middle), float(low), float(high))

    def as_dict(self) -> dict:
        return dataclasses.asdict(self)


def relative_error(actual, expected) -> float:
    """Largest difference of two arrays over the largest entry of the second."""
    actual, expected = np.asarray(actual, float), np.asarray(expected, float)
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-300))


def spread(low: float, high: float) -> str:
    return f"{low:.2f}-{high:.2f}"
