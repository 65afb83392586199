"""A run without a direction: what the numbers of a backbone are by chance alone.

A backbone is made of the very updates that are compared with it, and displacements from one origin
are correlated whatever made them. So what a number of a `TrainingPath` says is told by a random
walk that is recorded in the same way, and not by a random direction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy

from ...checks import require_real, shown
from .backbone import TrainingPath
from .gram import gram_matrix, increasing


def random_walk_path(
    steps: Sequence[int], momentum: float = 0.0, *, corrected: bool = False, late: int | None = None
) -> TrainingPath:
    """The run of an optimizer with momentum on gradients that are white noise, in many dimensions.

    Rows are linear in the noise, and in the limit of many parameters the noise of two steps is
    orthogonal and of equal norm. So the inner products of rows are those of their coefficients:
    exact, with nothing drawn.

    Parameters
    ----------
    steps : sequence of K whole numbers > 0
        Recorded steps, increasing.
    momentum : float in [0, 1)
        A step moves by the buffer b <- momentum b + noise.
    corrected : bool
        Step k moves by b / (1 - momentum^k), like Adam's first moment. That is Adam itself where
        the second moment has averaged out: its share to 0.01 with beta2 from 0.9 on, but not with
        beta2 = 0, whose steps have heavy tails.
    late : int, optional
        A recorded step. The mark "fresh" then holds displacements at the recorded steps after it,
        of a walk begun there with an empty buffer, on the same noise.

    Returns
    -------
    TrainingPath
        With the marks "gradients" and "updates": the noise, and the one step it leads to, that
        follow each recorded point but the last; and "fresh", empty without `late`. Norms are in
        units of a step's noise. The walk goes along its gradients, not against them.

    Raises
    ------
    TypeError, ValueError
        For steps that are not whole, positive and increasing, a momentum outside [0, 1), and a
        `late` that is no recorded step before the last.
    """
    points = _whole(steps)
    momentum = require_real("momentum", momentum, 0.0, 1.0, include_high=False)
    if late is not None and late not in points[:-1]:
        raise ValueError(
            f"late must be a recorded step before the last, {points[-1]}; got {shown(late)}. Use "
            "one of steps."
        )

    def moved(start: int, stop: int) -> np.ndarray:
        """Coefficients of all noise in the way from `start`, with an empty buffer, to `stop`."""
        found = np.zeros(points[-1])
        scales = np.ones(stop - start)
        if corrected:
            scales /= 1.0 - momentum ** np.arange(1, stop - start + 1)
        # noise moves its own step, and momentum times what the next step's noise moves
        found[start:stop] = scipy.signal.lfilter([1.0], [1.0, -momentum], scales[::-1])[::-1]
        return found

    noise = np.zeros((len(points) - 1, points[-1]))
    noise[np.arange(len(noise)), points[:-1]] = 1.0
    marked = {
        "fresh": [moved(0, late) + moved(late, p) for p in points if late is not None and p > late],
        "gradients": list(noise),
        "updates": [moved(0, p + 1) - moved(0, p) for p in points[:-1]],
    }
    rows = [moved(0, p) for p in points]
    marks = {}
    for name, more in marked.items():
        marks[name] = slice(len(rows), len(rows) + len(more))
        rows += more
    return TrainingPath(gram_matrix([np.stack(rows)]), points, marks)


def random_walk_share(steps: Sequence[int]) -> float:
    """Share of the backbone that a random walk has, with nothing driving it anywhere.

    In high dimension the displacements of a random walk at times s and t have the cosine
    sqrt(min(s, t) / max(s, t)), so their first component is far above 1/K: the number that a
    share of displacements is to be compared with. One with momentum, and the other numbers of a
    backbone: `random_walk_path`.

    Parameters
    ----------
    steps : sequence of K whole numbers > 0
        Recorded steps, increasing.
    """
    return random_walk_path(steps).backbone().share


def _whole(steps: Sequence[int]) -> list[int]:
    given = increasing("steps", steps)
    if (given != np.rint(given)).any():
        raise ValueError(f"steps must be whole numbers; got {shown(steps)}. Count training steps.")
    return given.astype(int).tolist()
