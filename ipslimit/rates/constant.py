"""Measured over predicted fluctuation: the constant, checked without a fit."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
from scipy.stats import t as student

from .settings import check_level

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
    level = check_level(level)
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


def _interval(ratio, measured, predicted, level):
    count = len(measured)
    if count < 3:
        return None
    influence = 0.5 * (measured / measured.mean() - predicted / predicted.mean())
    half = student.ppf(0.5 + level / 2, count - 1) * influence.std(ddof=1) / math.sqrt(count)
    return [ratio * math.exp(-half), ratio * math.exp(half)]
