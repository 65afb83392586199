"""What a scheme in depth does: the forward and the costate equation on a grid's nodes."""

from __future__ import annotations

import abc
import dataclasses
from typing import NamedTuple

import torch

from ipslimit.model.branch import Branch
from ipslimit.model.rules import input_means
from ipslimit.model.sight import Sight

from .grid import DepthGrid, Trajectory, integrate


class UnitSums(NamedTuple):
    """Of the units of every family, at one node or at several: dictionaries by family.

    sums (..., P, H) is (df/dtheta)^T p, summed over contexts and tokens; means (..., d + inner, H),
    where asked for, are the mean inputs of the units' maps, see `rules.input_means`.
    """

    sums: dict[str, torch.Tensor]
    means: dict[str, torch.Tensor] | None

    @classmethod
    def room(cls, system: System) -> UnitSums:
        """Uninitialised, for all nodes of a system."""
        families = system.branch.families
        sums = {name: torch.empty_like(units.packed) for name, units in families.items()}
        means = None
        if system.with_means:
            means = {
                name: units.packed.new_empty(*units.lead, units.layout.mean_rows, units.count)
                for name, units in families.items()
            }
        return cls(sums, means)

    def store(self, nodes: int | slice, part: UnitSums) -> None:
        """Write those of a node, or of several, into these of all nodes."""
        for into, own in zip(self, part, strict=True):
            for name, t in (own or {}).items():
                into[name][nodes] = t

    def store_sums(
        self, nodes: slice, name: str, own: torch.Tensor, x: torch.Tensor, system: System
    ) -> None:
        """Those of a family at several nodes, of sums (..., P [+ inner], H) and tokens x there.

        The tokens as its units see them; the rows of inner inputs where there are means.
        """
        size = system.branch.families[name].layout.size
        self.sums[name][nodes] = own[:, :size]
        if self.means is not None:
            per_token = 1.0 / (x.shape[1] * x.shape[2])
            y = Sight.of(system.sight).weighted(x)
            self.means[name][nodes] = input_means(y, own[:, size:].mT, per_token)


@dataclasses.dataclass
class System:
    """The forward-backward system at frozen units, given at the nodes of a grid.

        dX/ds = Gamma(X; nu_s)          -dP/ds = (dGamma/dx)^T P

    `cost` counts evaluations of the field and of its transpose at one node. `with_means` tells
    whether unit sums hold the mean inputs, too.
    """

    grid: DepthGrid
    branch: Branch  # leading dimension: nodes
    sight: bool | Sight
    cost: dict[str, int]
    with_means: bool = False

    def field(self, x: torch.Tensor, nodes) -> torch.Tensor:
        """Gamma at a node (index) or at several (slice) with x of matching leading shape."""
        self.cost["field"] += self._count(nodes)
        return self.branch[nodes].field(x, self.sight)

    def pull(self, x: torch.Tensor, p: torch.Tensor, nodes, with_units: bool = False):
        """(dGamma/dx)^T p and, if asked, the `UnitSums`."""
        self.cost["vjp"] += self._count(nodes)
        asked = self.sight, with_units, with_units and self.with_means
        dx, sums, means = self.branch[nodes].vjp(x, p, *asked)
        return dx, UnitSums(sums, means) if with_units else None

    def _count(self, nodes) -> int:
        return 1 if isinstance(nodes, int) else len(range(*nodes.indices(self.branch.lead[0])))


class Scheme(abc.ABC):
    """Both equations on the nodes.

    Attributes
    ----------
    order : int
        In the elements' width, for smooth heads.
    least_elements : int
        Of a grid that it can go through.
    local : bool
        Whether some elements of a grid may be halved and others not.
    """

    order = 4
    least_elements = 1
    local = True

    @property
    def in_sequence(self) -> Scheme:
        """What goes through depth node by node, at this one's order or a higher one."""
        return self

    @abc.abstractmethod
    def evaluations(self, elements: int) -> tuple[int, int]:
        """Planned for a grid: of a sweep in either direction, and for unit sums on top."""

    def integral(self, grid: DepthGrid, values: torch.Tensor) -> torch.Tensor:
        """Integral over depth of what is given at the nodes, (nodes, ...) -> (1, ...)."""
        return integrate(grid, values)[-1:]

    @abc.abstractmethod
    def forward(
        self, system: System, x0: torch.Tensor, guess: Trajectory | None = None
    ) -> Trajectory:
        """X from X(0) = x0 (B, N, d); `guess` is the previous training step's."""

    @abc.abstractmethod
    def backward(
        self,
        system: System,
        x: Trajectory,
        p_end: torch.Tensor,
        with_units: bool,
        guess: Trajectory | None = None,
    ) -> tuple[Trajectory, UnitSums | None]:
        """P from P(1) = p_end on the stored X, and the unit sums at every node if asked."""
