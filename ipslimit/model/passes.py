"""From any leading dimensions to rows, for every family of units.

What a family computes with (`Units.path`) works on rows alone: x (R, B, N, d), packed units
(R, P, H), weights (R, H). `units` stands for a collection of `units.Units` here. What autograd and
torch.func see of it is in `transforms`.
"""

from __future__ import annotations

import torch

from .sight import Sight


def field(x: torch.Tensor, units, sight: Sight, kept: list | None = None) -> torch.Tensor:
    """The field; a list `kept` is filled with what its transpose can use, if the path has such."""
    lead, rows, flat = _flatten(x, units)
    path = flat.path(*rows.shape[1:3])
    keeping = {"keep": kept} if kept is not None and getattr(path, "KEEPS", False) else {}
    sight = _repeated(sight, rows)
    arguments = (rows, flat.packed, flat.weights, units.layout, sight)
    out, shape = path.field(*arguments, **keeping), lead + x.shape[-3:]
    return out if out.shape == shape else out.reshape(shape)  # which takes its time


def vjp(
    x: torch.Tensor,
    units,
    cotangent: torch.Tensor,
    sight: Sight,
    with_units: bool,
    with_outputs: bool = False,
    kept: list | None = None,
) -> tuple:
    """(dx, dunits) or (dx, dunits, outputs); see `Units.vjp`. `kept` comes from `field`."""
    with torch.no_grad():
        lead, rows, flat = _flatten(x, units)
        shape = lead + x.shape[-3:]
        try:
            if not cotangent.shape == rows.shape == shape:
                cotangent = cotangent.expand(shape).reshape(rows.shape)
        except RuntimeError:
            raise ValueError(
                f"cotangent must broadcast to the field's shape {tuple(shape)}; got "
                f"{tuple(cotangent.shape)}. Give one cotangent per token of x."
            ) from None
        layout = units.layout
        dx, dpacked, dweights = flat.path(*rows.shape[1:3]).vjp(
            rows,
            flat.packed,
            flat.weights,
            cotangent,
            layout,
            _repeated(sight, rows),
            with_units,
            with_outputs,
            **({"kept": kept} if kept else {}),
        )
        if dx.shape != x.shape:
            dx = dx.reshape(shape).sum_to_size(x.shape)
        if not with_units:
            return dx, None
        own, size = units.lead, layout.size
        # units of a single leading index have had those of x summed as contexts
        index = own if own.numel() == 1 else lead

        def to_units(part: torch.Tensor) -> torch.Tensor:
            if part.shape[:1] == index:
                return part
            tail = part.shape[1:]
            return part.reshape(*index, *tail).sum_to_size(*own, *tail)

        dpacked, dweights = to_units(dpacked), to_units(dweights)
        if not with_outputs:
            return dx, units.from_packed(dpacked, dweights, layout)
        dunits = units.from_packed(dpacked[..., :size, :], dweights, layout)
        return dx, dunits, dpacked[..., size:, :].mT


def _flatten(x: torch.Tensor, units) -> tuple[torch.Size, torch.Tensor, object]:
    """Bring x to (R, B, N, d) and units to (R, P, H), R counting the broadcast leading indices.

    Units shared by all leading indices of x take these as more contexts instead: R = 1.
    """
    own = units.lead
    if x.shape[:-3] == own and len(own) <= 1:  # the calls of every sweep: nothing to broadcast
        if own:
            return own, x, units
        return own, x[None], units.map(lambda t: t[None])
    try:
        lead = torch.broadcast_shapes(x.shape[:-3], own)
    except RuntimeError:
        raise ValueError(
            f"leading dimensions of x and {units.noun} must broadcast; got {tuple(x.shape[:-3])} "
            f"of x {tuple(x.shape)} and {tuple(own)} of {units!r}. Insert dimensions of size 1."
        ) from None
    x = x.expand(lead + x.shape[-3:])
    if own.numel() == 1:
        flat = units.map(lambda t: t.reshape(1, *t.shape[len(own) :]))
        return lead, x.reshape(1, -1, *x.shape[-2:]), flat

    def flatten(t: torch.Tensor) -> torch.Tensor:
        tail = t.shape[len(own) :]
        return t.expand(lead + tail).reshape(-1, *tail)

    return lead, x.reshape(-1, *x.shape[-3:]), units.map(flatten)


def _repeated(sight: Sight, rows: torch.Tensor) -> Sight:
    """What contexts see, of rows in which leading indices have become more contexts."""
    if sight.plain:
        return sight
    own = len(sight.weights if sight.weights is not None else sight.ends)
    return sight.repeated(rows.shape[1] // own)
