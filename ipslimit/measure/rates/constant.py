"""The predicted fluctuation: measured over it, and how it goes with L.

The ratio of measured to predicted needs no fit. It tends to 1 as H grows at fixed L wherever the
state is differentiable in the weights, whatever the exponent in L: it cannot see a wrong one. The
trend of sqrt(L H) times the prediction in L can.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from .cells import Floor
from .choices import BOOTSTRAP, CORRECTION, choices, require_level
from .leastsquares import Refused
from .quantiles import student
from .single import fit_seeds
from .table import read_table

KEYS = ("step", "variable", "set", "L", "H")


def constant_ratios(table: list[dict], level: float = 0.95) -> list[dict]:
    """rms(measured) / rms(predicted) of every cell that has both, with its interval.

    Parameters
    ----------
    table : list of mappings
        As `fit_rates` takes, with rms rows of terms "fluctuation", "predicted" and "residual", one
        a seed (see `ipslimit.errors.error_table`).
    level : float
        Of the intervals.

    Returns
    -------
    list of dict with keys step, variable, set, L, H, ratio, ci95 (named by the level in percent:
    [low, high], or None from fewer than three seeds), residual (rms(measured - predicted) /
    rms(measured), path by path), seeds and diverged. Cells whose prediction is exactly zero
    are left out: they have no ratio.

    Raises
    ------
    TypeError, ValueError
        For a level that is no number between 0 and 1.

    Notes
    -----
    Seeds are paired, since measured and predicted share their draws: the interval is Student's for
    the mean over seeds of the influence of a seed on the logarithm of the ratio.
    """
    level = require_level(level)
    cells: dict[tuple, dict[str, dict]] = defaultdict(lambda: defaultdict(dict))
    for row in table:
        if row["norm"] == "rms" and row["term"] in ("fluctuation", "predicted", "residual"):
            cells[tuple(row[key] for key in KEYS)][row["term"]][row["seed"]] = row["error"]
    found = []
    for key in sorted(cells):
        terms = cells[key]
        if not terms["predicted"]:
            continue
        seeds = sorted(terms["predicted"])
        errors = np.array(
            [[terms[t][s] for s in seeds] for t in ("fluctuation", "predicted", "residual")]
        )
        finite = np.isfinite(errors).all(axis=0)
        measured, predicted, residual = errors[:, finite] ** 2
        if not predicted.any() or not measured.any():
            continue
        ratio = math.sqrt(measured.mean() / predicted.mean())
        found.append(
            dict(zip(KEYS, key, strict=True))
            | {
                "ratio": ratio,
                f"ci{100 * level:g}": _interval(ratio, measured, predicted, level),
                "residual": math.sqrt(residual.mean() / measured.mean()),
                "seeds": int(finite.sum()),
                "diverged": int((~finite).sum()),
            }
        )
    return found


def constant_trends(table: list[dict], level: float = 0.95) -> list[dict]:
    """How sqrt(L H) times the predicted fluctuation goes with L: like L^slope.

    Parameters
    ----------
    table : list of mappings
        As `constant_ratios` takes.
    level : float
        Of the intervals.

    Returns
    -------
    list of dict with keys step, variable, set, slope, ci95 (named by the level in percent), sizes,
    seeds, diverged and note: 1/2 more than the exponent in L of term "predicted" over all
    cells, as `fit_rates` finds that of the fluctuation, with a constant for every H. Where that
    refuses a fit, as from fewer than three depths, there is no entry.

    Raises
    ------
    TypeError, ValueError
        For a level that is no number between 0 and 1.

    Notes
    -----
    If the fluctuation is of order (L H)^-1/2 the slope is 0 for large L, in law for every H. Where
    a wider part of the layers responds the deeper the model is, as at a gradient that touches zero
    tangentially, it is not: there ratios may well be 1, each at its own L.

    The prediction is the response to a tenth of the noise. With a near-sign rule and so many heads
    that this flips no sign, the trend is that of the response without flips, and the cells' own
    nonlinearity (see `ipslimit.fluctuation`) says that it is not the one at full size.
    """
    chosen = choices(None, CORRECTION, BOOTSTRAP, level, 0, False)
    predicted = [row | {"term": "fluctuation"} for row in table if row["term"] == "predicted"]
    found = []
    for (step, variable, _, where), terms in (read_table(predicted) if predicted else {}).items():
        try:
            fit = fit_seeds(terms["fluctuation"], "L", "H", chosen, Floor())
        except Refused:
            continue
        found.append(
            {"step": step, "variable": variable, "set": where, "slope": fit["exponent"] + 0.5}
            | {f"ci{100 * level:g}": [end + 0.5 for end in fit["interval"]]}
            | {name: fit[name] for name in ("sizes", "seeds", "diverged", "note")}
        )
    return found


def _interval(
    ratio: float, measured: np.ndarray, predicted: np.ndarray, level: float
) -> list[float] | None:
    count = len(measured)
    if count < 3:
        return None
    influence = 0.5 * (measured / measured.mean() - predicted / predicted.mean())
    half = student(0.5 + level / 2, count - 1) * influence.std(ddof=1) / math.sqrt(count)
    return [ratio * math.exp(-half), ratio * math.exp(half)]
