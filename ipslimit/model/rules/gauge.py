"""AdamW whose every step is the same in every gauge of the symmetry pairs."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar

import torch

from ..heads import Heads, Layout
from ..symmetry import Chain, chains, power, scaled_norm
from .adamw import AdamW, adam_direction, adam_moments
from .arithmetic import where
from .base import Rule, State, refuse_without_pairs
from .elementwise import Numbers, named


@dataclasses.dataclass(eq=False, repr=False)
class GaugeAdamW(AdamW):
    """AdamW on what the gauge leaves as it is: its step commutes with every rescaling of a pair.

    Of a symmetry pair (A | B), see `ipslimit.symmetry`, with s = (|A|_F / |B|_F)^(1/2), which turns
    into c s where A <- c A and B <- B / c,

        g_A' = s g_A                          m, v of g', as AdamW
        A <- (1 - lr wd) A - lr s u_A         u = m^ / (sqrt(v^) + eps)

    and B with 1 / s in the place of s: the step that AdamW takes where the two norms are equal,
    told in the gauge that the parameters are in. Nothing is balanced. Biases go with their matrix;
    what is in no pair is trained as by AdamW.

    In general a matrix M has the factor sigma = |M|_F / max(G, lr |1|_F), G being the geometric
    mean of the norms of all matrices that pairs connect, and |1|_F, the root of the number of M's
    entries, times lr the norm of a step of AdamW: so no matrix moves by much more than its own norm
    where another one is nearly zero. A single matrix of norm zero takes the factor that its
    partners leave for it, (lr |1|_F / |A|_F of a pair), and grows out of zero. Where two norms are
    zero nothing tells them apart: their chain is left to the decay, and counted; runs report that
    in their `notes`.

    Raises
    ------
    ValueError
        By `init`, for units without pairs, and for pairs that close a ring.

    Notes
    -----
    Exact for scalar factors, one a pair; not for matrices, of which a head allows more. Our own
    construction; compare *Dead-Direction Conditioners*, arXiv:2606.29176, and `Rebalance`, which
    moves the parameters. Where rates are by matrix, lr in sigma is the largest.
    """

    # of gradients that have no gauge
    state_powers: ClassVar[dict[str, int]] = {"m": 0, "v": 0}

    def suited(self, layout: Layout) -> Rule:
        """Units without symmetry pairs are left to `AdamW`, which it is there."""
        if layout.pairs:
            return self
        return AdamW(self.lr, self.betas, self.eps, self.weight_decay)

    def refuse(self, layout: Layout, got: str) -> None:
        refuse_without_pairs(self, layout, got, "AdamW")

    def init(self, heads: Heads) -> State:
        if not heads.layout.pairs:
            self.refuse(heads.layout, repr(heads))
        skipped = heads.packed.new_zeros(*heads.lead, len(chains_of(heads.layout)), heads.count)
        return super().init(heads) | {"skipped": skipped}

    def numbers(self, step: int) -> Numbers:
        numbers = super().numbers(step)
        lr = numbers["lr"]
        floor = lr.amax(dim=-2, keepdim=True) if isinstance(lr, torch.Tensor) else lr
        return numbers | {"floor": floor}

    def update(self, heads: Heads, state: State, gradient: Heads, step: int) -> tuple[Heads, State]:
        n = named(self.numbers(step), heads.packed)
        scale, left_alone = gauge_scale(heads, n.floor)
        m, v = adam_moments(scale * gradient.packed, state["m"], state["v"], n)
        moved = n.keep * heads.packed - n.lr * (scale * adam_direction(m, v, n))
        skipped = state["skipped"] + left_alone.to(state["skipped"])
        return heads.with_packed(moved), {"m": m, "v": v, "skipped": skipped}

    def rescaled(self, layout: Layout, state: State, scale: torch.Tensor) -> State:
        return state

    def rescaling_refusal(self) -> str:
        return "its steps are the same in every gauge, and balancing would change none of them"

    def notes(self, state: State) -> list[str]:
        skipped = state["skipped"]
        alone, times = int((skipped > 0).sum()), int(skipped.sum())
        if not alone:
            return []
        return [
            f"{alone} of {skipped.numel()} chains of symmetry pairs had two norms that are zero, "
            f"or one that is not finite, and were left to the decay at {times} steps"
        ]


@functools.cache
def chains_of(layout: Layout) -> tuple[Chain, ...]:
    """The chains of the symmetry pairs of units, by the names of the parts that they have."""
    return chains(
        tuple(
            tuple(tuple(name for name in side if name in layout.slices) for side in pair)
            for pair in layout.pairs
        )
    )


def gauge_scale(heads: Heads, floor: float | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of `GaugeAdamW` for every parameter, (..., P, H), and which chains have none.

    floor : norm of a step of AdamW, for every entry of the root of their number

    Returns
    -------
    scale : tensor (..., P, H)
    skipped : tensor (..., chains, H) of bool
    """
    named: dict[str, torch.Tensor] = {}
    skipped = []
    for chain in chains_of(heads.layout):
        rows = [heads.layout.slices[name] for name in chain.matrices]
        norms = torch.stack([_norm(heads.packed[..., r, :]) for r in rows], dim=-2)
        # each filled in by itself, for a copy to a card would be waited for
        roots = torch.cat([norms.new_full((1, 1), math.sqrt(r.stop - r.start)) for r in rows])
        factors, left_alone = gauge_factors(norms, floor * roots)
        skipped.append(left_alone)
        for name, places in chain.members:
            own = [factors[..., place, None, :] for place in places]
            named[name] = functools.reduce(torch.mul, own)
    return heads.layout.spread(named, heads.packed), torch.stack(skipped, dim=-2)


def gauge_factors(norms: torch.Tensor, floors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """sigma of the matrices of many chains alike.

    Parameters
    ----------
    norms : tensor (..., n, H)
        Of the n matrices of every chain.
    floors : tensor, shape broadcastable to that

    Returns
    -------
    factors : tensor (..., n, H)
    skipped : tensor (..., H) of bool
        Chains that have no factors and get 0.
    """
    # in turn, as the compiled loops multiply; powers of two cancel without rounding
    product = functools.reduce(torch.mul, norms.unbind(-2))
    count, zeros = norms.shape[-2], (norms == 0).sum(dim=-2)
    mean = torch.sqrt(product) if count == 2 else power(product, 1.0 / count)
    floors, factors = floors.expand_as(norms), []
    for place in range(count):
        others = [norms[..., other, :] for other in range(count) if other != place]
        rest = functools.reduce(torch.mul, others)
        own = norms[..., place, :], floors[..., place, :]
        factors.append(gauge_factor(*own, mean, rest, zeros, count))
    return torch.stack(factors, dim=-2), (zeros > 1) | ~(mean < math.inf)


def gauge_factor(norm, floor, mean, rest, zeros, count):
    """sigma of one matrix of a chain.

    norm, floor : of the matrix;  mean : geometric, of the norms of the chain
    rest : product of the others' norms;  zeros, count : how many are zero, and how many there are
    """
    largest = where(mean > floor, mean, floor)
    factor = where(norm == 0, floor ** (count - 1) / rest, norm / largest)
    # neither where there is none, nor where lr is 0 and so is the mean
    return where((zeros < 2) & (factor < math.inf), factor, 0.0 * floor)


def _norm(rows: torch.Tensor) -> torch.Tensor:
    """|.|_F of rows (..., n, H) of every unit, (..., H)."""
    largest, square = scaled_norm(rows)
    return torch.where(largest == 0, largest, largest * square.sqrt())
