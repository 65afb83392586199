"""What a scheme in depth does: the forward and the costate equation on a grid's nodes."""

from __future__ import annotations

import abc
import dataclasses
from typing import NamedTuple

import torch

from ipslimit import Units

from .grid import DepthGrid, Trajectory


class HeadSums(NamedTuple):
    """Sums over contexts and tokens, at one node or at several.

    packed (..., P, H) is (df/dtheta)^T p; outputs (..., H, m), where asked for, are the heads'
    attention outputs (the inner inputs of other units).
    """

    packed: torch.Tensor
    outputs: torch.Tensor | None


@dataclasses.dataclass
class System:
    """The forward-backward system at frozen heads, given at the nodes of a grid.

        dX/ds = Gamma(X; nu_s)          -dP/ds = (dGamma/dx)^T P

    `cost` counts evaluations of the field and of its transpose at one node. `with_outputs` tells
    whether head sums hold the attention outputs, too.
    """

    grid: DepthGrid
    heads: Units  # leading dimension: nodes
    causal: bool
    cost: dict[str, int]
    with_outputs: bool = False

    def field(self, x: torch.Tensor, nodes) -> torch.Tensor:
        """Gamma at a node (index) or at several (slice) with x of matching leading shape."""
        self.cost["field"] += self._count(nodes)
        return self.heads[nodes].field(x, self.causal)

    def pull(self, x: torch.Tensor, p: torch.Tensor, nodes, with_heads: bool = False):
        """(dGamma/dx)^T p and, if asked, the `HeadSums`."""
        self.cost["vjp"] += self._count(nodes)
        options = {"with_units": with_heads, "with_outputs": with_heads and self.with_outputs}
        dx, dheads, *outputs = self.heads[nodes].vjp(x, p, self.causal, **options)
        return dx, HeadSums(dheads.packed, *outputs or (None,)) if with_heads else None

    def _count(self, nodes) -> int:
        return 1 if isinstance(nodes, int) else len(range(*nodes.indices(self.heads.lead[0])))


class Scheme(abc.ABC):
    """Both equations on the nodes, of order 4 in the elements' width for smooth heads."""

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
        with_heads: bool,
        guess: Trajectory | None = None,
    ) -> tuple[Trajectory, HeadSums | None]:
        """P from P(1) = p_end on the stored X, and the head sums at every node if asked."""
