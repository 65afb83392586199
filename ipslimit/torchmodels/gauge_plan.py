"""By how much a step that is the same in every gauge is scaled, parameter by parameter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch

from ..model.rules.gauge import gauge_factors
from ..model.symmetry import Chain, chains
from .maps import at_least_single
from .pairs import Pair, Part
from .shards import is_sharded

# So many entries are sooner treated by themselves than with a factor for each of them.
PIECE = 2**14


@dataclasses.dataclass
class Plan:
    """What a step has to look up, out of the pairs.

    Attributes
    ----------
    names : of the chains
    matrices : list of Part, whose norms are taken, chain by chain
    alike : for chains of n matrices, where these are, (n, chains), and which chains they are
    products : the factors that there are, each a product of those of some matrices
    places : of every parameter in a pair, (rows, factor) of pieces that together are all of it; the
        factor of the whole piece, or of each entry (as a tensor that broadcasts to it)
    """

    names: list[str]
    matrices: list[Part]
    alike: list[tuple[torch.Tensor, list[int]]]
    products: list[tuple[int, ...]]
    places: dict[torch.Tensor, list[tuple[slice, int | torch.Tensor]]]

    @classmethod
    def of(cls, pairs: list[Pair]) -> Plan:
        parts = {part.key(): part for pair in pairs for part in pair.parts}
        _refuse_parts(pairs)
        named = [tuple(tuple(part.key() for part in side.parts) for side in pair) for pair in pairs]
        try:
            found = chains(named)
        except ValueError as error:
            raise ValueError(_told(str(error), parts)) from None
        names, matrices, members, by_size = [], [], {}, {}
        for number, chain in enumerate(found):
            names.append(_name(chain, pairs))
            first = len(matrices)
            matrices += [parts[key] for key in chain.matrices]
            by_size.setdefault(len(chain.matrices), []).append((first, number))
            for key, where in chain.members:
                part = parts[key]
                own = (part, tuple(first + place for place in where))
                members.setdefault(part.parameter, []).append(own)
        alike = []
        for size, at in by_size.items():
            firsts = torch.tensor([first for first, _ in at])
            alike.append((firsts + torch.arange(size)[:, None], [number for _, number in at]))
        products: dict[tuple[int, ...], int] = {(): 0}
        places = {p: _pieces(p, _places(p, own, products)) for p, own in members.items()}
        return cls(names, matrices, alike, list(products), places)

    def factors(self, lr: float) -> tuple[list[float], list[str]]:
        """All factors of a step with this rate, and the names of chains that are left alone."""
        norms = _norms([part.block for part in self.matrices])
        floors = lr * torch.tensor([part.block.numel() for part in self.matrices]).double().sqrt()
        each, left_alone = torch.empty_like(norms), []
        for where, numbers in self.alike:
            each[where], skipped = gauge_factors(norms[where], floors[where])
            left_alone += [self.names[numbers[i]] for i in skipped.nonzero().flatten().tolist()]
        each = each.tolist()
        return [
            math.prod(each[place] for place in product) for product in self.products
        ], left_alone


def _places(p: torch.Tensor, members: list, products: dict) -> torch.Tensor:
    """Which of the products each entry of a parameter takes; broadcasts to it."""
    whole = [all(part.block.shape[d] == p.shape[d] for part, _ in members) for d in range(p.dim())]
    cells = torch.zeros([1 if full else n for full, n in zip(whole, p.shape, strict=True)]).long()
    for part, places in members:
        spans = zip(whole, part.spans(), strict=True)
        index = tuple(slice(None) if full else slice(*span) for full, span in spans)
        before = cells[index]
        after = before.clone()
        for old in before.unique().tolist():
            product = (*list(products)[old], *places)
            after[before == old] = products.setdefault(product, len(products))
        cells[index] = after
    return cells


def _pieces(p: torch.Tensor, places: torch.Tensor) -> list[tuple[slice, int | torch.Tensor]]:
    """Rows that take one product, where they are large; else each entry's, of the whole."""
    rows = places.flatten().tolist()
    starts = [i for i, place in enumerate(rows) if i == 0 or place != rows[i - 1]]
    by_row = places.numel() == places.shape[0] if places.dim() else True
    if len(starts) > 1 and not (by_row and p.numel() >= PIECE * len(starts)):
        return [(slice(None), places)]
    return [(slice(a, b), rows[a]) for a, b in zip(starts, [*starts[1:], None], strict=True)]


def _norms(blocks: list[torch.Tensor]) -> torch.Tensor:
    """|.|_F of blocks on any devices, as float64 on the processor; one transfer a device."""
    norms = torch.empty(len(blocks), dtype=torch.float64)
    places: dict[tuple, list[int]] = {}
    for place, block in enumerate(blocks):
        places.setdefault((block.device, block.dtype), []).append(place)
    for (_, dtype), own in places.items():
        found = [blocks[place].detach() for place in own]
        found = torch._foreach_norm(found, 2, at_least_single(dtype))
        norms[own] = torch.stack(found).to(norms)
    return norms


def _refuse_parts(pairs: list[Pair]) -> None:
    """Refuse matrices that share some entries with others of the pairs, and sharded ones."""
    seen: dict[int, list[Part]] = {}
    for pair in pairs:
        for part in pair.parts:
            if is_sharded(part.parameter):
                raise ValueError(
                    f"pairs must have whole parameters; got {part.name or pair} sharded (DTensor), "
                    "whose norm no process knows. Use DistributedDataParallel, or SAGGS."
                )
        for side in pair:
            for other in seen.setdefault(id(side.matrix.parameter), []):
                if side.matrix.overlaps(other) and side.matrix.key() != other.key():
                    raise ValueError(
                        f"pairs must meet in whole matrices; got {pair}, of which "
                        f"{side.matrix.name or 'one'} has some entries of {other.name or 'another'}"
                        ". Leave one of these pairs out."
                    )
            seen[id(side.matrix.parameter)].append(side.matrix)


def _told(text: str, parts: Mapping) -> str:
    """A message of `chains` with the names of parts in the place of their keys."""
    for key, part in parts.items():
        text = text.replace(str(key), part.name or "a matrix")
    return text


def _name(chain: Chain, pairs: list[Pair]) -> str:
    return ", ".join(str(pair) for pair in pairs if pair.first.matrix.key() in chain.matrices)
