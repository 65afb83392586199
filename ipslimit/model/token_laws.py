"""Laws of tokens: contexts of i.i.d. tokens, and quadrature nodes that stand for the whole law.

A context of N tokens drawn i.i.d. is a random measure within about N^-1/2 of the law; nodes, with
their weights, are within about n^-1 of it. A `Problem` takes either.
"""

from __future__ import annotations

import abc
import dataclasses
from functools import cached_property

import numpy as np
import scipy
import torch

from ..checks import (
    FLOAT_DTYPES,
    require_array,
    require_bool,
    require_int,
    require_real,
    require_room,
    shown,
)
from .sobol import sobol_points

# What the numbers of a seed are for: they must not be the same in both.
_DRAWS, _NODES = 0, 1
# Sobol numbers have 30 binary digits.
MOST_NODES = 2**30


class TokenLaw(abc.ABC):
    """The laws of the tokens of B contexts, by a map from uniforms: the base for one's own.

    A complete law, uniform on circles of several radii, a context each:

        @dataclasses.dataclass
        class Circles(ipslimit.TokenLaw):
            radii: tuple[float, ...]
            d = 2
            uniforms = 1

            @property
            def contexts(self):
                return len(self.radii)

            def from_uniform(self, u):
                angle = 2 * np.pi * u[..., 0]
                circle = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
                return np.reshape(self.radii, (-1, 1, 1)) * circle

    The smoother the map, the better the nodes.

    Attributes
    ----------
    d : int
        Token dimension, which the law must have.
    contexts : int
        B, 1 by default. Contexts are independent of each other.
    uniforms : int
        How many uniforms make a token, d by default.

    Notes
    -----
    A law of tokens has no order. Under a mask draws, being i.i.d., may stand in any: they have the
    positions 0..N-1, each of them the same law. Nodes are in an order of their own; ask for
    `ordered` ones, or give a `Problem` positions.
    """

    d: int
    contexts: int = 1

    @property
    def uniforms(self) -> int:
        return self.d

    @abc.abstractmethod
    def from_uniform(self, u: np.ndarray) -> np.ndarray:
        """Uniforms in (0, 1), float64 (B, n, `uniforms`), to tokens (B, n, d), each by itself."""

    def draw(self, N: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Contexts of N i.i.d. tokens.

        Parameters
        ----------
        N : int
        seed : int
            Decides a context together with its index alone. The first tokens of a longer draw are
            those of a shorter one.
        dtype : torch.float64 or torch.float32

        Returns
        -------
        tensor, shape (B, N, d)

        Raises
        ------
        TypeError, ValueError
            For other arguments, and for what a law of one's own gives that is no such tokens.
        """
        self._check("N", N, seed, dtype)
        each = [_rng(seed, _DRAWS, b).random((N, self.uniforms)) for b in range(self.contexts)]
        # 0 occurs, where a quantile may be infinite
        return torch.from_numpy(self._placed(np.maximum(np.stack(each), 2**-53))).to(dtype)

    def nodes(
        self,
        n: int = 1024,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        *,
        ordered: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole law as weighted tokens: n scrambled Sobol points.

        Parameters
        ----------
        n : int
            A power of two keeps the balance of the Sobol sequence.
        seed : int
            Of the scrambling, which is another one in every context. Independent ones estimate
            the quadrature error: `ipslimit.solvers.token_quadrature_error`.
        dtype : torch.float64 or torch.float32
        ordered : bool
            For a mask: nodes of the law of (share of the context, token), the share uniform in
            (0, 1) and the token independent of it, in order of the share. So the tokens up to any
            position are nodes of the law as well, and position i stands for the share (i + 1) / n.

        Returns
        -------
        (contexts, token_weights)
            (B, n, d) and (B, n), weights of a context summing to 1.

        Raises
        ------
        TypeError, ValueError
            As `draw`, and for sizes beyond those of the sequence.

        Notes
        -----
        The error in an integral of a smooth function falls about like n^-1, in few dimensions
        faster; over scramblings its mean is zero. (Owen, Scrambled net variance for integrals of
        smooth functions, Ann. Statist. 25, 1997.)
        """
        require_int("n", n, 1, MOST_NODES)
        self._check("n", n, seed, dtype)
        require_bool("ordered", ordered)
        require_int("uniforms", self.uniforms + ordered, 1, scipy.stats.qmc.Sobol.MAXDIM)
        if ordered:
            u = self._points(self.uniforms + 1, n, seed)
            order = np.argsort(u[..., :1], axis=1)
            x = self._placed(np.take_along_axis(u[..., 1:], order, axis=1))
            weights = np.full(x.shape[:2], 1.0 / n)
        else:
            x, weights = self._whole(n, seed)
        return torch.from_numpy(x).to(dtype), torch.from_numpy(weights).to(dtype)

    def _whole(self, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Nodes in any order, with their weights."""
        x = self._placed(self._points(self.uniforms, n, seed))
        return x, np.full(x.shape[:2], 1.0 / n)

    def _points(self, dims: int, n: int, seed: int) -> np.ndarray:
        """Sobol points (B, n, dims), scrambled anew for every context."""
        rngs = (_rng(seed, _NODES, b) for b in range(self.contexts))
        return np.stack([sobol_points(dims, n, rng) for rng in rngs])

    def _placed(self, u: np.ndarray) -> np.ndarray:
        """`from_uniform`, with a look at what a law of one's own gives."""
        x = self.from_uniform(u)
        shape = (*u.shape[:2], self.d)
        if np.shape(x) != shape or not np.isfinite(x).all():
            got = np.shape(x) if np.shape(x) != shape else "some that are not finite"
            raise ValueError(
                f"from_uniform of {type(self).__name__} must return finite numbers of shape "
                f"{shape} for uniforms of shape {u.shape}; got {got}. See ipslimit.TokenLaw."
            )
        return np.ascontiguousarray(x, dtype=np.float64)

    def _check(self, name: str, count: object, seed: object, dtype: object) -> None:
        """Refuse bad arguments, and sizes that a law of one's own lacks."""
        for own in ("d", "contexts", "uniforms"):
            if not hasattr(self, own):
                raise TypeError(
                    f"{type(self).__name__} must have {own}, an integer; got none. Add {own}: int."
                )
            require_int(own, getattr(self, own))
        require_int("seed", seed, 0)
        if dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"dtype must be torch.float32 or torch.float64; got {shown(dtype)}. Leave it out."
            )
        numbers = require_int(name, count) * self.contexts * (self.d + self.uniforms)
        require_room(f"{name}, d and contexts", numbers, torch.float64)

    def __repr__(self) -> str:
        fields = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        told = (f"{field.name}={shown(getattr(self, field.name))}" for field in fields)
        return f"{type(self).__name__}({', '.join(told)})"


@dataclasses.dataclass(eq=False, repr=False)
class GaussianTokens(TokenLaw):
    """Mixtures of K Gaussians, one for each context.

    Parameters
    ----------
    means : array or tensor (K, d), or (B, K, d)
        Of one context, or of B.
    covariances : array or tensor, or a number
        Symmetric and without negative eigenvalues (zero ones are fine), broadcast to (B, K, d, d):
        (d, d) for all components alike, (K, d, d) for all contexts. A number stands for that
        variance in every direction; for a diagonal give `torch.diag_embed(variances)`.
    weights : array or tensor (K,) or (B, K), optional
        Of the components, non-negative with sum 1 (to 1e-6, then normalised); equal by default.

    Raises
    ------
    TypeError, ValueError

    Notes
    -----
    Nodes are stratified: a component of weight w > 0 has n_k of them, as many as w n to the next
    integer and at least one, of weight w / n_k each. So the weights of components are exact, and
    where n w are integers all nodes weigh the same.
    """

    means: np.ndarray
    covariances: np.ndarray
    weights: np.ndarray | None = None

    def __post_init__(self):
        means = require_array("means", self.means)
        if means.ndim not in (2, 3) or 0 in means.shape:
            raise ValueError(
                f"means must have shape (K, d), or (B, K, d) for B contexts; got {means.shape}. A "
                "single Gaussian needs means[None]."
            )
        self.means = means if means.ndim == 3 else means[None]
        self.covariances = self._checked_covariances()
        self.weights = self._checked_weights()

    def _checked_covariances(self) -> np.ndarray:
        shape = (*self.means.shape, self.d)
        covariances = require_array("covariances", self.covariances)
        if covariances.ndim == 0:
            variance = require_real("covariances", float(covariances), 0.0)
            covariances = variance * np.eye(self.d)
        try:
            if covariances.shape[-2:] != shape[-2:]:
                raise ValueError
            covariances = np.broadcast_to(covariances, shape)
        except ValueError:
            raise ValueError(
                f"covariances must be a number or broadcast to (B, K, d, d) = {shape}; got shape "
                f"{covariances.shape}. For diagonal ones give torch.diag_embed(variances)."
            ) from None
        transposed = covariances.swapaxes(-1, -2)
        symmetric = (covariances + transposed) / 2
        gap = np.abs(covariances - transposed).max()
        least = np.linalg.eigvalsh(symmetric).min()
        if max(gap, -least) > 1e-6 * np.abs(covariances).max():
            raise ValueError(
                f"covariances must be symmetric with no negative eigenvalue; got asymmetry {gap:g} "
                f"and eigenvalue {least:g}. Give A A^T."
            )
        return symmetric

    def _checked_weights(self) -> np.ndarray:
        shape = self.means.shape[:2]
        if self.weights is None:
            return np.full(shape, 1.0 / shape[1])
        weights = require_array("weights", self.weights)
        if weights.shape not in (shape, shape[1:]):
            raise ValueError(
                f"weights must have shape (K,) = {shape[1:]} or (B, K) = {shape}; got "
                f"{weights.shape}. Give one weight a component."
            )
        total = weights.sum(-1, keepdims=True)
        if (weights < 0).any() or (np.abs(total - 1) > 1e-6).any():
            raise ValueError(
                f"weights must be non-negative and sum to 1; got minimum {weights.min():g}, sums "
                f"from {total.min():.8g} to {total.max():.8g}. Divide them by their sum."
            )
        return np.broadcast_to(weights / total, shape).copy()

    @property
    def d(self) -> int:
        return self.means.shape[-1]

    @property
    def contexts(self) -> int:
        return self.means.shape[0]

    @property
    def uniforms(self) -> int:
        """One for each component of a token, and one before them that chooses its Gaussian."""
        return self.d + 1

    @cached_property
    def _roots(self) -> np.ndarray:
        """Symmetric square roots of the covariances: they are continuous in these."""
        values, vectors = np.linalg.eigh(self.covariances)
        values = np.sqrt(np.maximum(values, 0.0))
        return (vectors * values[..., None, :]) @ vectors.swapaxes(-1, -2)

    def from_uniform(self, u: np.ndarray) -> np.ndarray:
        ends = np.cumsum(self.weights, axis=1)
        ends[ends >= ends[:, -1:]] = np.inf  # rounding leaves no uniform beyond the last component
        component = (u[..., :1] >= ends[:, None]).sum(-1)
        each = zip(component, u[..., 1:], strict=True)
        return np.stack([self._gaussian(b, k, v) for b, (k, v) in enumerate(each)])

    def _gaussian(self, b: int, k: np.ndarray | int, u: np.ndarray) -> np.ndarray:
        """Uniforms (n, d) to tokens of the components k of context b."""
        z = scipy.special.ndtri(u)
        return self.means[b, k] + (self._roots[b, k] @ z[..., None])[..., 0]

    def _whole(self, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        least = int((self.weights > 0).sum(1).max())
        if n < least:
            raise ValueError(
                f"n must be at least the number of components, {least}; got {n}. Use n={least}."
            )
        x, weights = np.empty((self.contexts, n, self.d)), np.empty((self.contexts, n))
        for b, shares in enumerate(self.weights):
            counts = apportioned(shares, n)
            for k in np.flatnonzero(counts):
                start = counts[:k].sum()
                own = slice(start, start + counts[k])
                u = sobol_points(self.d, counts[k], _rng(seed, _NODES, b, k))
                x[b, own] = self._gaussian(b, k, u)
                weights[b, own] = shares[k] / counts[k]
            if np.ptp(weights[b]) <= 8 * np.finfo(float).eps / n:
                weights[b] = 1.0 / n  # equal but for rounding
        return x, weights

    def __repr__(self) -> str:
        return f"GaussianTokens(B={self.contexts}, K={self.means.shape[1]}, d={self.d})"


@dataclasses.dataclass(eq=False, repr=False)
class BallTokens(TokenLaw):
    """Uniform in a ball.

    Parameters
    ----------
    radius : float, > 0
    d : int
    contexts : int
    centre : array or tensor (d,), or (B, d) with a centre for each context; optional
        The origin by default.

    Raises
    ------
    TypeError, ValueError
    """

    radius: float
    d: int
    contexts: int = 1
    centre: np.ndarray | None = None

    def __post_init__(self):
        self.radius = require_real("radius", self.radius, 0.0, include_low=False)
        self.d, self.contexts = require_int("d", self.d), require_int("contexts", self.contexts)
        if self.centre is not None:
            self.centre, one = require_array("centre", self.centre), (self.d,)
            if self.centre.shape not in (one, (self.contexts, self.d)):
                raise ValueError(
                    f"centre must have shape (d,) = {one} or (contexts, d); got "
                    f"{self.centre.shape}. Set d and contexts to go with it."
                )

    def from_uniform(self, u: np.ndarray) -> np.ndarray:
        # A Gaussian's direction is uniform, and the quantile of its length independent of it.
        z = scipy.special.ndtri(u)
        square = np.square(z).sum(-1, keepdims=True)
        length = scipy.special.gammainc(self.d / 2, square / 2) ** (1 / self.d)
        x = self.radius * length * z / np.sqrt(np.maximum(square, np.finfo(float).tiny))
        return x if self.centre is None else x + self.centre.reshape(-1, 1, self.d)


def apportioned(shares: np.ndarray, n: int) -> np.ndarray:
    """n in whole numbers in proportion to the shares, at least 1 where a share is positive."""
    ideal = shares * n
    counts = np.maximum(np.floor(ideal), shares > 0).astype(np.int64)
    while missing := n - counts.sum():
        step = 1 if missing > 0 else -1
        behind = np.where((shares > 0) & (counts + step > 0), step * (ideal - counts), -np.inf)
        order = np.argsort(-behind, kind="stable")[: min(abs(missing), np.isfinite(behind).sum())]
        counts[order] += step
    return counts


def _rng(seed: int, *use: int) -> np.random.Generator:
    """Numbers of a seed for one use: a context's draws, or its nodes, perhaps of a component."""
    return np.random.default_rng(np.random.SeedSequence(int(seed), spawn_key=use))
