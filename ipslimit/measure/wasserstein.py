"""Wasserstein-2 distances of measures: of token clouds, and of heads at a depth.

    W2(mu, nu)^2 = min over couplings pi of mu and nu of  int |x - y|^2 pi(dx, dy)

The distance of the measures, whatever token is paired with which. Pairing token i with token i is
one coupling of many: W2 of token clouds is at most the root mean square error of paired tokens.
Sources: Peyre & Cuturi, Computational Optimal Transport, arXiv:1803.00567; for weights, POT
(Flamary et al., JMLR 22, 2021).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from ..checks import require_int, require_tensor
from ..model.runs import ParticleRun
from .errors import Limit, require_limit_of
from .parameters import theta_names
from .rows import layer_depths
from .token_sets import weights_at

# Pairs of points up to which distances are exact: 2048 against 2048 take about a second.
LARGEST = 2**22
# Orthonormal frames that a lower bound is the best of.
FRAMES = 8
# Coordinates above this are made smaller before they are squared.
HUGE = 1e140
# How far sums of weights may be from 1: those of float32 are.
ROUNDING = 1e-5


@dataclasses.dataclass(frozen=True)
class Wasserstein:
    """A distance, and how it was found.

    Attributes
    ----------
    distance : float
    method : str
        "sorting" (d = 1), "assignment" (as many points on both sides, all of one weight) or
        "network simplex" (else), which are exact up to rounding: to about 1e-8 of the size of the
        clouds, where the distance is smaller than that. "slices" above the size that is asked for.
    exact : bool
        If not, the distance is a lower bound: for every orthonormal frame the squares of the
        distances along its axes sum up to at most W2^2, and this is the largest of a few frames,
        the principal axes of both clouds among them.
    """

    distance: float
    method: str
    exact: bool


@dataclasses.dataclass(frozen=True)
class Distances:
    """Distances of many measures from those of the limit.

    Attributes
    ----------
    values : array (layers, seeds) or (layers, seeds, B), float64
        NaN for diverged seeds.
    methods : tuple of str
        As `Wasserstein.method`, all that were used.
    exact : bool
        Whether all of them are exact; if not, some are lower bounds.
    """

    values: np.ndarray
    methods: tuple[str, ...]
    exact: bool


def wasserstein2(
    x: object,
    y: object,
    weights_x: object = None,
    weights_y: object = None,
    *,
    largest: int = LARGEST,
) -> Wasserstein:
    """The Wasserstein-2 distance of two weighted clouds of points, in float64.

    Parameters
    ----------
    x : tensor or array, shape (n, d)
    y : tensor or array, shape (m, d)
    weights_x, weights_y : tensor or array, shape (n,) and (m,), optional
        Non-negative, with sum 1 up to rounding; all equal by default. Points of weight 0 do not
        count.
    largest : int
        Up to n m = `largest` the distance is exact, in any case if d = 1; above, a lower bound.

    Returns
    -------
    Wasserstein

    Raises
    ------
    TypeError, ValueError
        For shapes that do not fit together, points that are not finite, and weights that are not
        those of a probability measure.
    """
    require_int("largest", largest, 0)
    x, y = _points("x", x), _points("y", y)
    if x.shape[1] != y.shape[1]:
        raise ValueError(
            f"y must be points in as many dimensions as x, {x.shape[1]}; got {y.shape[1]}. Pass "
            "clouds of one space."
        )
    x, a = _massive("weights_x", x, _weights("weights_x", weights_x, len(x)))
    y, b = _massive("weights_y", y, _weights("weights_y", weights_y, len(y)))
    return _distance(x, y, a, b, largest)


def token_distances(run: ParticleRun, limit: Limit, k: int, *, largest: int = LARGEST) -> Distances:
    """W2 between the tokens of every layer and those of the limit at s = r/L, context by context.

    Tokens count with their weights, so tracers do not.

    Parameters
    ----------
    run : ParticleRun
    limit : the limit of the same problem and rule, recorded at step k
    k : int
        A recorded step.
    largest : int
        As in `wasserstein2`.

    Returns
    -------
    Distances, with values of shape (L+1, seeds, B)
        Of states alone: under a causal mask a token is more than its state.

    Raises
    ------
    TypeError, ValueError
        For other runs, and a step that is not recorded.
    """
    _require(run, limit, k, largest)
    depths, weights = layer_depths(run), weights_at(run, k)
    if weights is not None:
        weights = weights.expand(run.depth + 1, *weights.shape)
    of_seeds = None if weights is None else weights.expand(len(run.seeds), *weights.shape)
    return _distances(run, run.x[k], limit.x(k, depths), of_seeds, weights, largest)


def head_distances(
    run: ParticleRun, limit: Limit, k: int, *, largest: int = LARGEST
) -> dict[str, Distances]:
    """W2 between the heads of every layer and the limit's at s = r/L, as measures of parameters.

    A layer's measure has a head's weight at each of its heads: counts / H of the atoms that were
    drawn. Before training all of the distance is that of H draws from their law, which falls like
    H^(-1/4) where the law has atoms (mass has to go from one to another) and does not fall with L.
    Parameters are taken as they are: heads that differ by a rescaling are apart.

    Parameters
    ----------
    run : ParticleRun
    limit : the limit of the same problem and rule, recorded at step k
    k : int
        A recorded step.
    largest : int
        As in `wasserstein2`.

    Returns
    -------
    dict of str to Distances, with values of shape (L, seeds)
        "theta", or of two families "theta_attention" and "theta_perceptron". Of a sampled law the
        limit's heads are the nodes of its quadrature.

    Raises
    ------
    TypeError, ValueError
        For other runs, one without its heads, and a step that is not recorded.
    """
    _require(run, limit, k, largest)
    if k not in run.units:
        raise ValueError(
            f"run must hold its heads at step {k}; got none. Train it with record_heads=True."
        )
    depths = layer_depths(run)[:-1]
    reference, found = limit.units(k, depths), {}
    for family, variable in theta_names(run.unit_numbers).items():
        ours, theirs = run.units[k][family], reference[family]
        # a layer's heads are one cloud
        clouds = [units.packed.mT.unsqueeze(-3) for units in (ours, theirs)]
        masses = [units.weights.unsqueeze(-2) for units in (ours, theirs)]
        distances = _distances(run, *clouds, *masses, largest)
        found[variable] = dataclasses.replace(distances, values=distances.values[..., 0])
    return found


def _distance(
    x: np.ndarray, y: np.ndarray, a: np.ndarray | None, b: np.ndarray | None, largest: int
) -> Wasserstein:
    """Of finite points, all of positive weight; None for weights that are all equal."""
    size = max(float(np.abs(x).max()), float(np.abs(y).max()))
    if size > HUGE:  # its square would be infinite
        found = _distance(x / size, y / size, a, b, largest)
        return dataclasses.replace(found, distance=size * found.distance)
    alike = a is None and b is None and len(x) == len(y)
    if x.shape[1] == 1:
        return Wasserstein(float(_along_axes(x, y, a, b)[0]) ** 0.5, "sorting", True)
    if len(x) * len(y) > largest:
        squares = (_along_axes(x @ q, y @ q, a, b).sum() for q in _frames(x, y, a, b))
        return Wasserstein(float(max(squares)) ** 0.5, "slices", False)
    costs = cdist(x, y, "sqeuclidean")
    if alike:
        return Wasserstein(
            float(costs[linear_sum_assignment(costs)].mean()) ** 0.5, "assignment", True
        )
    import ot  # POT takes a second to import, and equal weights need none of it

    plan, log = ot.emd(_masses(a, x), _masses(b, y), costs, numItermax=10**9, log=True)
    if log["warning"] is not None:
        raise RuntimeError(f"POT found no plan of least cost: {log['warning']}")
    return Wasserstein(float((plan * costs).sum()) ** 0.5, "network simplex", True)


def _along_axes(
    x: np.ndarray, y: np.ndarray, a: np.ndarray | None, b: np.ndarray | None
) -> np.ndarray:
    """W2^2 of the coordinates, one by one (d,): on a line the order is the best coupling."""
    if a is None and b is None and len(x) == len(y):
        return np.square(np.sort(x, axis=0) - np.sort(y, axis=0)).mean(axis=0)
    import ot

    return ot.wasserstein_1d(x, y, _masses(a, x), _masses(b, y), p=2)


def _frames(
    x: np.ndarray, y: np.ndarray, a: np.ndarray | None, b: np.ndarray | None
) -> Iterator[np.ndarray]:
    """Orthonormal frames (d, d): the principal axes of both clouds, and some at random."""
    masses = np.concatenate([_masses(a, x), _masses(b, y)])
    yield np.linalg.eigh(np.cov(np.concatenate([x, y]).T, aweights=masses))[1]
    rng, d = np.random.default_rng(0), x.shape[1]
    for _ in range(FRAMES - 1):
        yield np.linalg.qr(rng.standard_normal((d, d)))[0]


def _masses(weights: np.ndarray | None, points: np.ndarray) -> np.ndarray:
    return np.full(len(points), 1.0 / len(points)) if weights is None else weights


def _distances(
    run: ParticleRun,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    weights_ours: torch.Tensor | None,
    weights_theirs: torch.Tensor | None,
    largest: int,
) -> Distances:
    """Of clouds (seeds, layers, C, n, d) from (layers, C, m, d), one by one."""
    seeds, layers, count = ours.shape[:3]
    values, methods, exact = np.full((layers, seeds, count), np.nan), {}, True
    targets = _clouds("weights of the limit", theirs, weights_theirs)
    for seed in np.flatnonzero(~run.diverged.cpu().numpy()):
        own = None if weights_ours is None else weights_ours[seed]
        pairs = zip(_clouds("weights of the run", ours[seed], own), targets, strict=True)
        found = [_distance(x, y, a, b, largest) for (x, a), (y, b) in pairs]
        values[:, seed] = np.reshape([w.distance for w in found], (layers, count))
        methods |= dict.fromkeys(w.method for w in found)
        exact = exact and all(w.exact for w in found)
    return Distances(values, tuple(methods), exact)


def _clouds(
    name: str, points: torch.Tensor, weights: torch.Tensor | None
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """(points, weights) of the clouds (layers, C, n, d), layer by layer."""
    points = _array(points.flatten(0, 1))
    masses = [None] * len(points) if weights is None else _array(weights.flatten(0, 1))
    return [_massive(name, x, a) for x, a in zip(points, masses, strict=True)]


def _require(run: object, limit: object, k: object, largest: object) -> None:
    require_int("largest", largest, 0)
    require_limit_of(run, limit)
    if require_int("k", k, 0) not in run.x:
        raise ValueError(
            f"k must be a recorded step of the run, one of {sorted(run.x)}; got {k}. Pass it in "
            "record= of train_particles."
        )


def _points(name: str, value: object) -> np.ndarray:
    points = _array(require_tensor(name, value, finite=True))
    if points.ndim != 2 or 0 in points.shape:
        raise ValueError(
            f"{name} must be points of shape (n, d), at least one; got {points.shape}. Pass one "
            "cloud at a time."
        )
    return points


def _weights(name: str, value: object, count: int) -> np.ndarray | None:
    if value is None:
        return None
    weights = _array(require_tensor(name, value, finite=True))
    if weights.shape != (count,):
        raise ValueError(
            f"{name} must have shape ({count},), one a point; got {weights.shape}. Leave them out "
            "for equal weights."
        )
    return weights


def _massive(
    name: str, points: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """The points of positive weight, and their weights with sum 1; None if they are all equal."""
    if weights is None:
        return points, None
    if weights.min() < 0 or not abs(weights.sum() - 1) <= ROUNDING:
        raise ValueError(
            f"{name} must be non-negative with sum 1; got least {weights.min():g}, sum "
            f"{weights.sum():g}. Divide them by their sum."
        )
    points, weights = points[weights > 0], weights[weights > 0]
    return points, None if (weights == weights[0]).all() else weights / weights.sum()


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()
