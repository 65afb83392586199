"""Initial laws mu_0 of the units: finitely many atoms, or a density that is sampled.

The particle transformer draws H units i.i.d. from the law for every layer; the limit integrates
over the whole law. For `Atoms` that integral is a finite sum and exact; for other laws it is taken
over quadrature nodes, `law.nodes(n, seed)`, and carries a quadrature error.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from functools import cached_property
from typing import ClassVar

import numpy as np
import scipy
import torch

from ..checks import require_bool, require_finite, require_int, require_room, shown
from .entries import TruncatedNormalEntries, XavierEntries
from .heads import Heads
from .layout import Layout
from .sobol import sobol_points
from .units import Units


class Law(abc.ABC):
    """A probability law over units of one family, with compact support.

    One's own is a dataclass whose fields are the named sizes of its family (d and m of heads),
    perhaps `biases`, and its options; a docstring under a field is its help. Mostly `SampledLaw` is
    the base to take, which needs one formula; with this one, draws and quadrature are yours.

    Attributes
    ----------
    units : the family of units, a class attribute; `Heads` by default
    exact : bool
        Whether the integral over the law is a finite sum: `nodes` is the law itself.
    layout : Layout of the units
    """

    units: ClassVar[type[Units]] = Heads
    exact: ClassVar[bool] = False

    @cached_property
    def layout(self) -> Layout:
        """Sizes from the fields of their names; all biases of the family if `biases` is True."""
        biases = require_bool("biases", getattr(self, "biases", False))
        names = sorted({axis for shape in self.units.declared.values() for axis in shape.split()})
        missing = [name for name in names if not hasattr(self, name)]
        if missing:
            raise TypeError(
                f"{type(self).__name__} must have the sizes {', '.join(names)} of "
                f"{self.units.__name__} as fields; got no {missing[0]}. Add {missing[0]}: int."
            )
        sizes = {name: require_int(name, getattr(self, name)) for name in names}
        parts = (*self.optional, *(self.units.biases if biases else ()))
        options = {name: getattr(self, name) for name in self.units.options if hasattr(self, name)}
        return self.units.make_layout(parts, options, **sizes)

    @property
    def optional(self) -> tuple[str, ...]:
        """Those of its units' optional matrices that they have: none of them by default."""
        return ()

    @abc.abstractmethod
    def draw(self, count: int, depth: int, rng: np.random.Generator, dtype: torch.dtype) -> Draw:
        """`count` i.i.d. units for each of `depth` layers, of numbers from `rng` alone."""

    @abc.abstractmethod
    def nodes(self, n: int = 1024, seed: int = 0) -> Atoms:
        """The whole law as weighted atoms: n quadrature nodes, independent for other seeds."""

    def along(self, units: Units, s: torch.Tensor) -> Units:
        """The law at depths s, as a map of its units; by default it is the same at all depths.

        Parameters
        ----------
        units : Units with leading dimension (S,)
            Draws for layers r at s = r / L, or nodes.
        s : tensor (S,), float64, in [0, 1]

        Returns
        -------
        Units of the same layout and weights: theta <- T_s(theta), continuous in s for the limit to
        exist. Heads that start equal must stay equal.
        """
        return units

    def check_nodes(self, n: object, seed: object) -> None:
        """Refuse bad arguments of `nodes`."""
        require_int("n", n)
        require_int("seed", seed, 0)

    def stored(self, count: int) -> int:
        """How many units a layer of `count` draws, or nodes, takes in memory."""
        return count

    def drawn(self, count: int, depth: int, rng: np.random.Generator, dtype: torch.dtype) -> Draw:
        """`draw`, with a look at what a law of one's own gives."""
        draw, kept = self.draw(count, depth, rng, dtype), self.stored(count)
        wanted = [(depth, self.layout.size, kept), (depth, kept)]
        tensors = [draw.packed, draw.weights] if isinstance(draw, Draw) else []
        if [(tuple(t.shape), t.dtype) for t in tensors] != [(shape, dtype) for shape in wanted]:
            got = " and ".join(f"{tuple(t.shape)} in {t.dtype}" for t in tensors) or shown(draw)
            raise ValueError(
                f"draw of {self!r} must return a Draw of packed {wanted[0]} and weights "
                f"{wanted[1]} in {dtype}; got {got}. See ipslimit.Law."
            )
        return draw

    def whole(self, n: int, seed: int, dtype: torch.dtype) -> Units:
        """The units of `nodes`, with a look at what a law of one's own gives."""
        nodes = self.nodes(n, seed)
        if not isinstance(nodes, Atoms) or nodes.layout != self.layout:
            got = nodes if isinstance(nodes, Law) else shown(nodes)
            raise ValueError(f"nodes of {self!r} must return Atoms of its own units; got {got}.")
        return nodes.heads.to(dtype)

    def __repr__(self) -> str:
        named = dict(self.layout.sizes)
        if dataclasses.is_dataclass(self):
            named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        # biases are told of where there are some
        told = (item for item in named.items() if item != ("biases", False))
        texts = (f"{n}={v:g}" if isinstance(v, float) else f"{n}={v!r}" for n, v in told)
        return f"{type(self).__name__}({', '.join(texts)})"


class Draw:
    """Units drawn for one seed, in the cheapest exact form.

    Attributes
    ----------
    packed : tensor (depth, P, K)
    weights : tensor (depth, K)
    counts : tensor (depth, M) of int64, or None
        How often each atom was drawn; None for laws without atoms.
    atoms : tensor (depth, K) of int64, or None
        The atom each stored unit is a copy of.
    """

    def __init__(self, packed, weights, counts=None, atoms=None):
        self.packed, self.weights, self.counts, self.atoms = packed, weights, counts, atoms

    def share(self, stored: slice) -> Draw:
        """Some of the stored units, with their weights in the whole; a copy, so the rest can go."""
        atoms = None if self.atoms is None else self.atoms[..., stored]
        packed, weights = self.packed[..., stored].clone(), self.weights[..., stored]
        return Draw(packed, weights, self.counts, atoms)


class Atoms(Law):
    """A law of finitely many atoms: its integral over units is a finite sum, hence exact.

    Parameters
    ----------
    heads : Heads, or units of another family, without leading dimensions
        The atoms; their weights must be non-negative and sum to 1 (to 1e-6, then normalised).

    Raises
    ------
    TypeError, ValueError
        For anything else, and for non-finite parameters.

    Notes
    -----
    Units of one layer that start equal stay equal, since each gets the same gradient whatever its
    weight. So H draws from M atoms ARE min(H, M) distinct units with multinomial weights n_a / H,
    and `draw` returns them in that form: H = 10^6 costs what H = M does.
    """

    exact = True

    def __init__(self, heads: Units):
        if not isinstance(heads, Units):
            raise TypeError(
                f"heads must be ipslimit.Heads, or other Units; got {type(heads).__name__}."
            )
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
        self.heads = heads.from_packed(heads.packed.clone(), weights, heads.layout)
        self.units, self.layout = type(heads), heads.layout
        for name, size in heads.layout.sizes:
            setattr(self, name, size)

    def nodes(self, n: int = 1024, seed: int = 0) -> Atoms:
        """The law itself: it needs no quadrature (n and seed are not used)."""
        return self

    def draw(self, count: int, depth: int, rng: np.random.Generator, dtype: torch.dtype) -> Draw:
        # in float64 on the CPU always: draws must not depend on the run's dtype or device
        weights = self.heads.weights.double().cpu().numpy()
        counts = rng.multinomial(count, weights / weights.sum(), size=depth)
        order = np.argsort(counts == 0, axis=1, kind="stable")  # drawn atoms first
        atoms = torch.from_numpy(np.sort(order[:, : self.stored(count)], axis=1))
        counts = torch.from_numpy(counts)
        packed = self.heads.packed.to(dtype).cpu()[:, atoms].transpose(0, 1).contiguous()
        weights = (torch.gather(counts, 1, atoms).double() / count).to(dtype)
        return Draw(packed, weights, counts, atoms)

    def stored(self, count: int) -> int:
        """The distinct ones: at most all atoms."""
        return min(count, self.heads.count)

    def __repr__(self) -> str:
        return f"Atoms({self.heads!r})"


class SampledLaw(Law):
    """A law given by a map from uniforms: the base of `XavierUniform`, and for one's own.

    With the quantile function of an entry, all entries of all matrices are independent with that
    law, and biases start at zero. A complete law for heads:

        @dataclasses.dataclass
        class Laplace(ipslimit.SampledLaw):
            d: int
            m: int
            scale: float = 0.3
            \"\"\"Mean absolute value of an entry, before those beyond 3 are cut off.\"\"\"

            def quantile(self, u):
                far = np.log1p(-np.abs(2 * u - 1))
                return np.clip(-np.sign(u - 0.5) * self.scale * far, -3, 3)

    For anything else override `entries` (and `uniforms`, for more of them).
    """

    def __post_init__(self):
        for name, size in self.layout.sizes:  # refuses bad ones
            object.__setattr__(self, name, size)

    def quantile(self, u: np.ndarray) -> np.ndarray:
        """Uniforms in (0, 1) to entries, one by one; increasing."""
        raise NotImplementedError(f"{type(self).__name__} must have a quantile, or entries")

    def entries(self, u: np.ndarray) -> np.ndarray:
        """Uniforms (..., `uniforms`, H) to packed units, (..., P, H); see `Layout` for the rows.

        Biases come last and may be left out, (..., layout.matrix_rows, H): then they are zero.
        """
        return self.quantile(u)

    @property
    def uniforms(self) -> int:
        """How many uniforms make a unit: by default one for each entry of its matrices."""
        return self.layout.matrix_rows

    @property
    def symmetric(self) -> bool:
        """Whether a unit is as likely as its mirror image (`Units.mirror`), O -> -O for heads.

        Then, and only then, nodes come in such pairs. Read off the quantile, which is odd about
        1/2; a law with its own `entries` says so itself.
        """
        if type(self).entries is not SampledLaw.entries:
            return False
        u = np.linspace(0.0, 1.0, 1025)[1:-1]
        entries = self.quantile(u)
        return bool(np.abs(entries + entries[::-1]).max() <= 1e-12 * np.abs(entries).max())

    def draw(self, count: int, depth: int, rng: np.random.Generator, dtype: torch.dtype) -> Draw:
        packed = self._packed(rng.random((depth, self.uniforms, count))).to(dtype)
        return Draw(packed, torch.full((depth, count), 1.0 / count, dtype=dtype))

    def check_nodes(self, n: object, seed: object) -> None:
        if require_int("n", n, 2 if self._mirrored else 1) % 2 and self._mirrored:
            pairs = f"as those of {self!r} are antithetic pairs"
            raise ValueError(f"nodes must be even in number, {pairs}; got {n}. Use {n + 1}.")
        require_int("seed", seed, 0)
        most = scipy.stats.qmc.Sobol.MAXDIM  # so far their sequences are tabulated
        if self.uniforms > most:
            sizes = dict(sorted(self.layout.sizes))
            bound = most * math.prod(sizes.values()) // self.uniforms
            raise ValueError(
                f"{'*'.join(sizes)} must be at most {bound} for Sobol nodes (one dimension per "
                f"parameter); got {', '.join(f'{n}={s}' for n, s in sizes.items())}. Use Atoms for "
                f"larger {self.units.noun}."
            )
        require_room("n", n * self.layout.size, torch.float64)

    def nodes(self, n: int = 1024, seed: int = 0) -> Atoms:
        """n scrambled-Sobol nodes of equal weight, in antithetic pairs if the law is symmetric.

        Parameters
        ----------
        n : int
            Even for a symmetric law. A power of two keeps the balance of the Sobol sequence.
        seed : int
            Of the scrambling. Independent scramblings estimate the quadrature error.

        Notes
        -----
        The pairs (O -> -O for heads) keep the law and make the mean field at initialisation exactly
        zero; training breaks that symmetry.
        """
        self.check_nodes(n, seed)
        points = n // 2 if self._mirrored else n
        u = sobol_points(self.uniforms, points, np.random.default_rng(seed))
        packed = self._packed(u.T)
        if self._mirrored:
            mirrored = packed.clone()
            for name in self.units.mirror:
                if name in self.layout.slices:
                    rows = self.layout.slices[name]
                    mirrored[rows] = 0.0 - packed[rows]  # a bias of 0 stays +0
            packed = torch.cat([packed, mirrored], dim=1)
        weights = torch.full((n,), 1.0 / n, dtype=packed.dtype)
        return Atoms(Units.from_packed(packed.contiguous(), weights, self.layout))

    @property
    def _mirrored(self) -> bool:
        return bool(self.units.mirror) and self.symmetric

    def _packed(self, u: np.ndarray) -> torch.Tensor:
        """Packed units (..., P, H) in float64, with biases zero where `entries` leaves them out."""
        entries, rows = np.asarray(self.entries(u), dtype=np.float64), self.layout.matrix_rows
        shapes = [(*u.shape[:-2], number, u.shape[-1]) for number in (rows, self.layout.size)]
        if entries.shape not in shapes or not np.isfinite(entries).all():
            got = entries.shape if entries.shape not in shapes else "some that are not finite"
            raise ValueError(
                f"entries of {type(self).__name__} must be finite numbers of shape {shapes[0]} for "
                f"uniforms of shape {u.shape}; got {got}. The law needs compact support."
            )
        zeros = self.layout.size - entries.shape[-2]
        return torch.nn.functional.pad(torch.from_numpy(entries), (0, 0, 0, zeros))


@dataclasses.dataclass(eq=False, repr=False)
class XavierUniform(XavierEntries, SampledLaw):
    """Entries uniform in +-gain sqrt(6 / (d + m))."""

    d: int
    """Token dimension."""
    m: int
    """Head size."""
    gain: float = 1.0
    """Of the uniform law +-gain sqrt(6 / (d + m))."""
    biases: bool = False
    """Whether heads have biases bq, bk, bv and bo, which start at zero."""


@dataclasses.dataclass(eq=False, repr=False)
class TruncatedNormal(TruncatedNormalEntries, SampledLaw):
    """Entries normal with standard deviation `std` before truncation to [-bound, bound]."""

    d: int
    """Token dimension."""
    m: int
    """Head size."""
    std: float
    """Standard deviation of an entry, before truncation."""
    bound: float
    """Entries beyond +-bound do not occur."""
    biases: bool = False
    """Whether heads have biases bq, bk, bv and bo, which start at zero."""


# By the names that a command line has for them.
LAWS: dict[str, type[Law]] = {
    "xavier": XavierUniform,
    "truncated-normal": TruncatedNormal,
    "atoms": Atoms,
}
