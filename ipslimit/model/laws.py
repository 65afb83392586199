"""Initial laws mu_0 of the heads: finitely many atoms, or a density that is sampled.

The particle transformer draws H heads i.i.d. from the law for every layer; the limit integrates
over the whole law. For `Atoms` that integral is a finite sum and exact; for the sampled laws it is
taken over quadrature nodes, `law.nodes(n, seed)`, and carries a quadrature error.
"""

from __future__ import annotations

import abc
import math

import numpy as np
import scipy
import torch

from ..checks import require_bool, require_finite, require_int, require_real, require_room
from .heads import BIASES, Heads, Layout


class Law(abc.ABC):
    """A probability law over heads with compact support."""

    layout: Layout

    @property
    def d(self) -> int:
        return self.layout.d

    @property
    def m(self) -> int:
        return self.layout.m

    @abc.abstractmethod
    def nodes(self, n: int = 1024, seed: int = 0) -> Atoms:
        """The whole law as weighted atoms: itself for `Atoms`, else n quadrature nodes."""

    def check_nodes(self, n: object, seed: object, names: tuple[str, str] = ("n", "seed")) -> None:
        """Refuse bad arguments of `nodes`, under the names the caller has for them."""
        require_int(names[0], n)
        require_int(names[1], seed, 0)

    @abc.abstractmethod
    def draw(self, count: int, depth: int, rng: np.random.Generator, dtype) -> Draw:
        """`count` i.i.d. heads for each of `depth` layers."""


class Draw:
    """Heads drawn for one seed, in the cheapest exact form.

    Attributes
    ----------
    packed : tensor (depth, P, K)
    weights : tensor (depth, K)
    counts : tensor (depth, M) of int64, or None
        How often each atom was drawn; None for laws without atoms.
    atoms : tensor (depth, K) of int64, or None
        The atom each stored head is a copy of.
    """

    def __init__(self, packed, weights, counts=None, atoms=None):
        self.packed, self.weights, self.counts, self.atoms = packed, weights, counts, atoms

    def share(self, stored: slice) -> Draw:
        """Some of the stored heads, with their weights in the whole; a copy, so the rest can go."""
        atoms = None if self.atoms is None else self.atoms[..., stored]
        packed, weights = self.packed[..., stored].clone(), self.weights[..., stored]
        return Draw(packed, weights, self.counts, atoms)


class Atoms(Law):
    """A law of finitely many atoms: its integral over heads is a finite sum, hence exact.

    Parameters
    ----------
    heads : Heads, without leading dimensions
        The atoms; their weights must be non-negative and sum to 1 (to 1e-6, then normalised).

    Raises
    ------
    TypeError, ValueError
        For anything else, and for non-finite parameters.

    Notes
    -----
    Heads of one layer that start equal stay equal, since each gets the same gradient whatever its
    weight. So H draws from M atoms ARE min(H, M) distinct heads with multinomial weights n_a / H,
    and `draw` returns them in that form: H = 10^6 costs what H = M does.
    """

    def __init__(self, heads: Heads):
        if not isinstance(heads, Heads):
            raise TypeError(f"heads must be ipslimit.Heads; got {type(heads).__name__}.")
        if heads.lead:
            raise ValueError(
                f"heads of Atoms must have no leading dimensions; got {heads!r}. "
                "Index one layer, or flatten the layers into one axis of heads."
            )
        require_finite("heads", heads.packed)
        require_finite("weights", heads.weights)
        heads = heads.map(torch.Tensor.detach)
        total = float(heads.weights.sum())
        if (heads.weights < 0).any() or abs(total - 1) > 1e-6:
            raise ValueError(
                f"weights of Atoms must be non-negative and sum to 1; got minimum "
                f"{float(heads.weights.min()):g}, sum {total:.8g}. Divide them by their sum."
            )
        # weights that sum to 1 up to rounding are left: the atoms of a law make the same law again
        rounding = heads.count * torch.finfo(heads.dtype).eps
        weights = heads.weights / (1.0 if abs(total - 1) <= rounding else total)
        self.heads = Heads.from_packed(heads.packed.clone(), weights, heads.layout)
        self.layout = heads.layout

    def nodes(self, n: int = 1024, seed: int = 0) -> Atoms:
        """The law itself: it needs no quadrature (n and seed are not used)."""
        return self

    def draw(self, count: int, depth: int, rng: np.random.Generator, dtype) -> Draw:
        # in float64 on the CPU always: draws must not depend on the run's dtype or device
        weights = self.heads.weights.double().cpu().numpy()
        counts = rng.multinomial(count, weights / weights.sum(), size=depth)
        kept = min(count, self.heads.count)
        order = np.argsort(counts == 0, axis=1, kind="stable")[:, :kept]  # drawn atoms first
        atoms = torch.from_numpy(np.sort(order, axis=1))
        counts = torch.from_numpy(counts)
        packed = self.heads.packed.to(dtype).cpu()[:, atoms].transpose(0, 1).contiguous()
        weights = (torch.gather(counts, 1, atoms).double() / count).to(dtype)
        return Draw(packed, weights, counts, atoms)

    def __repr__(self) -> str:
        return f"Atoms({self.heads!r})"


class _SampledLaw(Law):
    """Independent entries with a symmetric law given by its quantile function.

    Biases, where heads have them, are no random entries: they start at zero.
    """

    def __init__(self, d: int, m: int, biases: bool = False):
        present = BIASES if require_bool("biases", biases) else ()
        self.layout = Layout(require_int("d", d), require_int("m", m), present)
        self._random = 4 * d * m

    def _with_biases(self, matrices: torch.Tensor) -> torch.Tensor:
        """Packed heads (..., P, H) of the packed matrices alone."""
        zeros = self.layout.size - self._random
        return torch.nn.functional.pad(matrices, (0, 0, 0, zeros)) if zeros else matrices

    @property
    def _suffix(self) -> str:
        """What tells of biases in the law's repr."""
        return ", biases=True" if self.layout.biases else ""

    @abc.abstractmethod
    def _quantile(self, u: np.ndarray) -> np.ndarray:
        """Map uniforms in (0, 1) to entries."""

    def draw(self, count: int, depth: int, rng: np.random.Generator, dtype) -> Draw:
        entries = self._quantile(rng.random((depth, self._random, count)))
        weights = torch.full((depth, count), 1.0 / count, dtype=dtype)
        return Draw(self._with_biases(torch.from_numpy(entries).to(dtype)), weights)

    def check_nodes(self, n: object, seed: object, names: tuple[str, str] = ("n", "seed")) -> None:
        if require_int(names[0], n, 2) % 2:
            raise ValueError(
                f"{names[0]} must be even, for the antithetic pairs; got {n}. Use {n + 1}."
            )
        require_int(names[1], seed, 0)
        most = scipy.stats.qmc.Sobol.MAXDIM  # so far their sequences are tabulated
        if self._random > most:
            raise ValueError(
                f"d*m must be at most {most // 4} for Sobol nodes (one dimension per "
                f"parameter); got d={self.d}, m={self.m}. Use Atoms for larger heads."
            )
        require_room(names[0], n * self.layout.size, torch.float64)

    def nodes(self, n: int = 1024, seed: int = 0) -> Atoms:
        """n scrambled-Sobol nodes of equal weight in antithetic pairs O -> -O.

        Parameters
        ----------
        n : int
            Even; twice a power of two keeps the balance of the Sobol sequence.
        seed : int
            Of the scrambling. Independent scramblings estimate the quadrature error.

        Notes
        -----
        The pairs keep the law and make the mean field at initialisation exactly zero; training
        breaks that symmetry.
        """
        self.check_nodes(n, seed)
        sobol = scipy.stats.qmc.Sobol(self._random, scramble=True, rng=np.random.default_rng(seed))
        # next power of two, then cut: the sequence's own balance where n allows it
        points = sobol.random_base2(max(0, math.ceil(math.log2(n // 2))))[: n // 2]
        # a scrambled point can round to 0, where a quantile may be infinite
        half = torch.from_numpy(self._quantile(np.clip(points, 2**-53, 1 - 2**-53))).mT
        mirrored = half.clone()
        mirrored[self.layout.slices["o"]] *= -1
        packed = self._with_biases(torch.cat([half, mirrored], dim=1)).contiguous()
        return Atoms(
            Heads.from_packed(packed, torch.full((n,), 1.0 / n, dtype=packed.dtype), self.layout)
        )


class XavierUniform(_SampledLaw):
    """Entries uniform in +-gain sqrt(6 / (d + m)).

    Parameters
    ----------
    d, m : int
        Token dimension and head size.
    gain : float > 0
    biases : bool
        Whether heads have biases bq, bk, bv and bo, which start at zero.
    """

    def __init__(self, d: int, m: int, gain: float = 1.0, biases: bool = False):
        super().__init__(d, m, biases)
        self.gain = require_real("gain", gain, 0.0, include_low=False)
        self.bound = require_real(
            "gain * sqrt(6 / (d + m))", self.gain * math.sqrt(6.0 / (d + m)), 0.0, include_low=False
        )

    def _quantile(self, u: np.ndarray) -> np.ndarray:
        return (2.0 * u - 1.0) * self.bound

    def __repr__(self) -> str:
        return f"XavierUniform(d={self.d}, m={self.m}, gain={self.gain:g}{self._suffix})"


class TruncatedNormal(_SampledLaw):
    """Entries normal with standard deviation `std` before truncation to [-bound, bound].

    Parameters
    ----------
    d, m : int
        Token dimension and head size.
    std, bound : float > 0
        Both in the units of the entries.
    biases : bool
        Whether heads have biases bq, bk, bv and bo, which start at zero.
    """

    def __init__(self, d: int, m: int, std: float, bound: float, biases: bool = False):
        super().__init__(d, m, biases)
        self.std = require_real("std", std, 0.0, include_low=False)
        self.bound = require_real("bound", bound, 0.0, include_low=False)

    def _quantile(self, u: np.ndarray) -> np.ndarray:
        # odd about u = 1/2
        scale = math.sqrt(2.0) * self.std
        if self.bound <= 1e-8 * scale:  # uniform to rounding, and the quantiles would underflow
            return (2.0 * u - 1.0) * self.bound
        entries = scale * scipy.special.erfinv(
            (2.0 * u - 1.0) * scipy.special.erf(self.bound / scale)
        )
        return np.clip(entries, -self.bound, self.bound)

    def __repr__(self) -> str:
        numbers = f"d={self.d}, m={self.m}, std={self.std:g}, bound={self.bound:g}"
        return f"TruncatedNormal({numbers}{self._suffix})"
