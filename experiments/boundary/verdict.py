"""What the intervals say of the methods, in a sentence that they alone decide."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..intervals import SeedMean
from .baselines import Baselines
from .criteria import Criterion

if TYPE_CHECKING:  # which has a verdict
    from .results import MethodResult

FEWEST = 3  # seeds that can say something
_WORDS = {
    "better": "better is",
    "worse": "worse is",
    "alike": "not told apart is",
    "unknown": "not measured is",
}


def side(difference: SeedMean, higher: bool) -> str:
    """better, worse or alike: on which side of 0 the interval of a difference is.

    "alike" where the interval holds 0, "unknown" where there is none.
    """
    if not difference.side:
        return "unknown" if difference.side is None else "alike"
    return "better" if (difference.side > 0) == higher else "worse"


def verdict(
    task: str, criterion: Criterion, methods: dict[str, MethodResult], baselines: Baselines
) -> str:
    """A part of a sentence: which methods are better and worse than AdamW on a task, by how much.

    Every other method is named once, with the mean of its paired differences and their interval.
    Nothing is said of models that are worse than the baseline, and where their interval holds it
    that is said, too.
    """
    where = f"on {task} ({criterion.what} in the test, {criterion.difference} beside AdamW)"
    if "adamw" not in methods:
        return f"{where} nothing is said without AdamW"
    above = methods["adamw"].above
    beside = f"{above.text('+' + criterion.form)} beside {baselines.bar}"
    stands = side(above, criterion.higher)
    if stands == "worse" or not math.isfinite(above.mean):
        return f"{where} nothing is said: AdamW is {beside}"
    if stands == "alike":
        where = f"{where}, whose models are not told apart from {baselines.bar} (AdamW {beside}),"
    others = {name: found for name, found in methods.items() if name != "adamw"}
    if not others:
        return f"{where} there is no other method"
    if len(next(iter(others.values())).difference.values) < FEWEST:
        named = ", ".join(_shown(found, criterion) for found in others.values())
        return f"{where} fewer than {FEWEST} seeds decide nothing: {named}"
    sides: dict[str, list[str]] = {"better": [], "worse": [], "alike": [], "unknown": []}
    for found in others.values():
        sides[side(found.difference, criterion.higher)].append(_shown(found, criterion))
    said = [f"{_WORDS[kind]} {', '.join(sides[kind])}" for kind in _WORDS if sides[kind]]
    if not sides["better"]:
        said.insert(0, "no method is better")
    return f"{where} {'; '.join(said)}"


def _shown(found: MethodResult, criterion: Criterion) -> str:
    return f"{found.label} {found.difference.text('+' + criterion.form)}"
