"""Learning rates: numbers, schedules over steps, profiles over depth, and one for every matrix."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from numbers import Real

import torch

from ...checks import require_int, require_real, shown
from ..layout import Layout
from .identity import Identified

# The key of a dict by matrix whose rate the matrices have that are not named.
DEFAULT = "default"


class LearningRate(Identified, abc.ABC):
    """A learning rate that changes with the step, or with the depth.

    Wherever a rule takes `lr` it takes a number, one of these, or a dict by matrix of both, such as
    {"q": 0.01, "o": ipslimit.warmup_cosine(0.02, 10, 100), "default": 0.02}. The names are those of
    the matrices and biases of the units. A bias without an entry has the rate of the matrix of its
    map (y -> W y + b, see `Units.maps`), and what then is left has that under "default"; a matrix
    for which there is none is refused. One dict serves all families of a layer, by all their names.

    A plain function of the step alone, lr=lambda step: 0.1 / step, will do in Python. Nothing
    tells it from another one, and so it is refused where runs are compared or stored.

    Every rate is checked when it is used: it must be finite and at least 0 (a warm-up may begin
    there, a schedule end there).

    A schedule of one's own is a dataclass, whose fields tell it from others. A complete one:

        @dataclasses.dataclass
        class InverseRoot(ipslimit.LearningRate):
            peak: float
            warmup: int = 10

            def __call__(self, step, s):
                return self.peak * min(step / self.warmup, (self.warmup / step) ** 0.5)
    """

    @abc.abstractmethod
    def __call__(self, step: int, s: float) -> float:
        """The rate of a step, from 1, at a depth s in [0, 1]; it follows from these alone."""


@dataclasses.dataclass(repr=False)
class warmup_cosine(LearningRate):
    """A linear warm-up, then half a cosine down to a floor.

        lr(k) = peak k / warmup                                               k <= warmup
                floor + (peak - floor) (1 + cos(pi t)) / 2                    warmup < k < total
                floor                                                         k >= total
        t = (k - warmup) / (total - warmup)

    with steps k counted from 1. At k = warmup it is `peak`.

    Raises
    ------
    TypeError, ValueError
        For other arguments.

    Notes
    -----
    Loshchilov & Hutter, arXiv:1608.03983, without restarts.
    """

    peak: float
    """The largest rate, > 0."""
    warmup: int
    """Steps of the warm-up, >= 0."""
    total: int
    """The step from which on the rate is `floor`, at least 1 and `warmup`."""
    floor: float = 0.0
    """The last rate, in [0, peak]."""

    def __post_init__(self):
        self.peak = require_real("peak", self.peak, 0.0, include_low=False)
        self.warmup = require_int("warmup", self.warmup, 0)
        self.total = require_int("total", self.total, max(1, self.warmup))
        self.floor = require_real("floor", self.floor, 0.0, self.peak)

    def __call__(self, step: int, s: float = 0.0) -> float:
        if step <= self.warmup:
            return self.peak * step / self.warmup
        if step >= self.total:
            return self.floor
        t = (step - self.warmup) / (self.total - self.warmup)
        return self.floor + (self.peak - self.floor) * (0.5 * (1.0 + math.cos(math.pi * t)))


@dataclasses.dataclass(repr=False)
class by_depth(LearningRate):
    """A learning rate that depends on the depth: lr(k, s) = profile(s) rate(k).

    Layer r of L is at s = r / L, and the limit asks at its own nodes.

    Raises
    ------
    TypeError, ValueError
        For other arguments.

    Notes
    -----
    For the limit's order in depth the profile must be smooth; where it jumps, so do the units.
    Make it a dataclass with __call__(self, s) where runs are compared or stored: nothing tells one
    function from another.
    """

    profile: Callable[[float], float]
    """A factor of the rate, as a function of one number s in [0, 1]; >= 0."""
    rate: float = 1.0
    """A number > 0, or a schedule."""

    def __post_init__(self):
        if not callable(self.profile) or isinstance(self.profile, type):
            raise TypeError(
                f"profile must be a function of the depth s in [0, 1]; got {shown(self.profile)}. "
                "Pass e.g. profile=lambda s: 1 + s."
            )
        self.rate = _require_one("rate", self.rate)

    def __call__(self, step: int, s: float) -> float:
        factor = _checked("profile", _asked("profile", self.profile, s), self.profile, depth=s)
        return factor * _one("rate", self.rate, step, s)


def require_rate(value: object) -> object:
    """Return the `lr` of a rule if it is a number > 0, a schedule, or a dict by matrix of these."""
    if not isinstance(value, dict):
        return _require_one("lr", value)
    if not value or not all(isinstance(name, str) for name in value):
        raise TypeError(
            f"lr must have names of matrices as its keys, one at least; got {shown(value)}. Pass "
            "e.g. lr={'q': 0.01, 'default': 0.02}."
        )
    return {name: _require_one(f"lr[{name!r}]", rate) for name, rate in value.items()}


def require_number(lr: object) -> float | torch.Tensor:
    """Return the `lr` of a rule that updates, which is that of a step."""
    if isinstance(lr, (Real, torch.Tensor)):
        return lr
    raise TypeError(
        f"lr must be a number where a rule updates; got {shown(lr)}. Call rule.at(step, layout, "
        "depth) first, and update by what it returns."
    )


def _require_one(name: str, value: object) -> object:
    if isinstance(value, type) and callable(value):
        raise TypeError(f"{name} must be a rate; got the class {value.__name__}. Call it first.")
    return value if callable(value) else require_real(name, value, 0.0, include_low=False)


def rate_at(
    lr: object,
    step: int,
    layout: Layout,
    depth: float | torch.Tensor,
    like: torch.Tensor | None = None,
) -> object:
    """The learning rate of a step, as numbers.

    Parameters
    ----------
    lr : number, schedule, or dict by matrix of these
        What is none of these is returned as it is.
    step : int
        Counted from 1.
    layout : Layout of the units
    depth : float, or tensor (nodes,)
        s of a layer, or of several.
    like : tensor, optional
        What has the dtype and device of a tensor that is returned; float64 on the CPU by default.

    Returns
    -------
    float, or tensor
        One number where it is the same for all parameters and depths, else (P, 1), (nodes, 1, 1) or
        (nodes, P, 1), which broadcasts over (..., P, H).

    Raises
    ------
    TypeError, ValueError
        For a rate that is not finite or negative, and for a matrix without one.
    """
    like = torch.empty((), dtype=torch.float64) if like is None else like
    if isinstance(lr, dict):
        return _by_matrix(lr, step, layout, depth, like)
    rate = _over_depths("lr", lr, step, depth)
    return rate.to(like) if isinstance(rate, torch.Tensor) else rate


def _by_matrix(
    lr: dict, step: int, layout: Layout, depth, like: torch.Tensor
) -> float | torch.Tensor:
    """`rate_at` for a dict by matrix."""
    rates = {
        key: _over_depths(f"lr[{key!r}]", lr[key], step, depth)
        for key in dict.fromkeys(keys_of(lr, layout).values())
    }
    if all(isinstance(rate, float) for rate in rates.values()) and len({*rates.values()}) == 1:
        return next(iter(rates.values()))
    columns = []
    for name, key in keys_of(lr, layout).items():
        rate, rows = rates[key], layout.slices[name]
        # a number is filled in where it is wanted, for a copy to a card would be waited for
        rate = rate.to(like) if isinstance(rate, torch.Tensor) else like.new_full((1, 1), rate)
        columns.append((rate, rows.stop - rows.start))
    lead = max((rate.shape[:-2] for rate, _ in columns), key=len)
    return torch.cat([rate.expand(*lead, length, 1) for rate, length in columns], dim=-2)


def keys_of(lr: dict, layout: Layout) -> dict[str, str]:
    """Which key of a dict by matrix the rate of each matrix and bias of units stands under.

    Raises
    ------
    ValueError
        For a matrix or bias without one.
    """
    matrix_of = {bias: matrix for matrix, (bias, _) in layout.family.maps.items()}
    keys = {}
    for name in layout.names:
        candidates = (name, matrix_of.get(name), DEFAULT)
        keys[name] = next((key for key in candidates if key in lr), None)
        if keys[name] is None:
            raise ValueError(
                f"lr must have a rate for {name}, of {', '.join(layout.names)}; got "
                f"{', '.join(lr)}. Add {name!r}, or {DEFAULT!r} for all that are not named."
            )
    return keys


def _over_depths(name: str, rate: object, step: int, depth) -> float | torch.Tensor:
    """One rate at all depths: a float, or (nodes, 1, 1) where it is not the same at all."""
    if not callable(rate):
        return rate
    if not isinstance(depth, torch.Tensor):
        # tied layers have no depth: a rate that asks for it is refused for what it makes of NaN
        return _one(name, rate, step, math.nan if depth is None else float(depth))
    # asked for one depth at a time, so that layers and nodes have the same bits
    values = [_one(name, rate, step, s) for s in depth.tolist()]
    if len(set(values)) == 1:
        return values[0]
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)


def _one(name: str, rate: object, step: int, s: float) -> float:
    """A number or schedule at one step and depth, checked."""
    if not callable(rate):
        return rate
    arguments = (step, s) if isinstance(rate, LearningRate) else (step,)
    return _checked(name, _asked(name, rate, *arguments), rate, step=step, depth=s)


def _asked(name: str, function: Callable, *arguments):
    if isinstance(function, by_depth):  # which names what fails in it
        return function(*arguments)
    try:
        return function(*arguments)
    except Exception as error:  # whatever the user's code raises
        said = " ".join(str(error).split())
        listed = ", ".join(f"{argument:g}" for argument in arguments)
        raise (TypeError if isinstance(error, TypeError) else ValueError)(
            f"{name} must be callable as {name}({listed}); got {shown(function)}, which failed: "
            f"{type(error).__name__}: {said}. Correct the function."
        ) from error


def _checked(name: str, value: object, source: object, **at: float) -> float:
    """A rate that a function gave, if it is one."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    where = ", ".join(f"{key} {number:g}" for key, number in at.items())
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name} must give a real number; got {shown(value)} at {where} of {shown(source)}. "
            "Return a float."
        )
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of floats
        number = math.inf
    if not (math.isfinite(number) and number >= 0.0):
        raise ValueError(
            f"{name} must be finite and at least 0 at every step; got {number:g} at {where} of "
            f"{shown(source)}. Correct the schedule."
        )
    return number
