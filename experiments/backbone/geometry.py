"""What is reported of a trajectory, as plain numbers."""

from __future__ import annotations

import math

import numpy as np

from ipslimit.measure.trajectory import TrainingPath


def describe(trajectory: TrainingPath, width: int, late: float | None = None) -> dict:
    """The geometry of a trajectory.

    Parameters
    ----------
    trajectory : TrainingPath
        With the marks "gradients" and "updates" where there are such rows: the batch gradient at a
        recorded point, and the one step that follows it.
    width : int
        Recorded points of a rolling window.
    late : float, optional
        A recorded step. With the mark "fresh" (displacements of a run begun there with a new
        optimizer) its excursion and that of the run itself going on are given.

    Returns
    -------
    dict
        "share": mean squared cosine of displacements with the backbone; "dimension",
        "components95"; "motion": part of the squared displacements, all together, along it;
        "growth": share of the points up to each; "rolling";
        "coordinates", "transverse"; "speeds"; "alignment" of gradients, single updates and
        updates over an interval (signed cosines).
    """
    backbone = trajectory.backbone()
    steps = trajectory.steps
    middles, along, across = backbone.speeds()
    rolling = trajectory.rolling(min(width, len(steps))) if len(steps) > 1 else None
    alignment = {"intervals": _cosines(along, across)}
    for name in ("gradients", "updates"):
        if name in trajectory.marks:
            alignment[name] = backbone.cosines(name).tolist()
    windows = None
    if rolling is not None:
        windows = {
            "steps": list(rolling.steps),
            "with_whole": rolling.with_whole.tolist(),
            "with_previous": rolling.with_previous.tolist(),
        }
    speeds = {"steps": middles.tolist(), "along": along.tolist(), "across": across.tolist()}
    return {
        "steps": list(steps),
        "share": backbone.share,
        "dimension": backbone.dimension,
        "components95": backbone.components(0.95),
        "spectrum": backbone.spectrum[:8].tolist(),
        "motion": backbone.motion(),
        "growth": [trajectory.until(step).backbone().share for step in steps],
        "rolling": windows,
        "coordinates": backbone.coordinates().tolist(),
        "transverse": backbone.transverse().tolist(),
        "norms": trajectory.norms().tolist(),
        "speeds": speeds,
        "alignment": alignment,
        "excursions": None if late is None else excursions(trajectory, late),
    }


def excursions(trajectory: TrainingPath, late: float) -> dict:
    """Motion from the point at step `late`, along and across the backbone of the points up to it.

    "continued" is the run itself going on, "fresh" the one begun there with a new optimizer;
    "start" is the coordinate of the point along that backbone.
    """
    start = trajectory.steps.index(late)
    backbone = trajectory.backbone(slice(0, start + 1))
    found = {"start": float(backbone.coordinates([start])[0])}
    for name, rows in (("continued", slice(start + 1, len(trajectory.steps))), ("fresh", "fresh")):
        along, across = backbone.excursion(rows, start)
        found[name] = {"along": along.tolist(), "across": across.tolist()}
    return found


def mean_absolute(cosines: list[float]) -> float:
    """Mean of |cosine| over the rows that have one."""
    defined = np.abs([value for value in cosines if math.isfinite(value)])
    return float(defined.mean()) if defined.size else math.nan


def _cosines(along: np.ndarray, across: np.ndarray) -> list[float]:
    length = np.hypot(along, across)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(length > 0, along / length, np.nan).tolist()
