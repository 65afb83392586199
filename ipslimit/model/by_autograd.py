"""Field and transpose of any family, from the function of one of its units and torch's autograd.

Rows (seeds, depth nodes) are taken one after the other, so that a seed's numbers do not depend on
how many are computed together, and no more than one row's outputs exist at a time.
"""

from __future__ import annotations

import torch
from torch.func import vmap

from .sight import Sight


def field(x, packed, weights, layout, sight: Sight) -> torch.Tensor:
    """Gamma(x) of shape (R, B, N, d), for x (R, B, N, d), packed (R, P, H), weights (R, H)."""
    out = torch.empty_like(x)
    for row, w in enumerate(weights):
        tokens = x[row].expand(len(w), *x.shape[1:])
        outputs, _ = _outputs(tokens, layout.parts(packed[row]), layout, sight.causal)
        out[row] = torch.einsum("h,hbnd->bnd", w, outputs)
    return out


def vjp(x, packed, weights, cotangent, layout, sight, with_units, with_outputs=False):
    """(dx, dpacked, dweights) of sum(cotangent * field); the last two per unit weight or None.

    With outputs, dpacked has `layout.inner` rows more: the inner inputs, summed over contexts and
    tokens.
    """
    dx, found = torch.empty_like(x), []
    for row, (w, c) in enumerate(zip(weights, cotangent, strict=True)):
        # each unit has tokens of its own: one pass back gives its part of dx beside its derivative
        tokens = x[row].expand(len(w), *x.shape[1:]).clone().requires_grad_()
        parts = {k: part.clone().requires_grad_() for k, part in layout.parts(packed[row]).items()}
        with torch.enable_grad():
            outputs, inner = _outputs(tokens, parts, layout, sight.causal)
        wanted = [tokens, *parts.values()] if with_units else [tokens]
        if not outputs.requires_grad:
            raise ValueError(
                f"{layout.family.__name__}.unit_field must be differentiable by torch; got a "
                "result without a gradient. Use torch operations, without detach or no_grad."
            )
        each, *dparts = torch.autograd.grad(
            outputs, wanted, c.expand_as(outputs), materialize_grads=True
        )
        dx[row] = torch.einsum("h,hbnd->bnd", w, each)
        if with_units:
            rows = [layout.pack(dict(zip(parts, dparts, strict=True)))]
            if with_outputs:
                rows += [sight.weighted(y.detach()).sum(dim=(1, 2)).mT for y in inner]
            found.append((torch.cat(rows), torch.einsum("bnd,hbnd->h", c, outputs.detach())))
    if not with_units:
        return dx, None, None
    return dx, *(torch.stack(each) for each in zip(*found, strict=True))


def _outputs(tokens, parts, layout, causal: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """f (H, B, N, d) of tokens (H, B, N, d), and the inner inputs (H, B, N, size)."""
    family, options = layout.family, dict(layout.options)

    def one(x, parts):
        return family.unit_field(x, causal, **parts, **options)

    try:
        found = vmap(vmap(one, in_dims=(0, None)))(tokens, parts)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise ValueError(
            f"{family.__name__}.unit_field must work on x (N, d) and the parts of one unit, for "
            f"torch.func.vmap; calling it failed: {' '.join(str(error).split())}. Branch on no "
            "values, and change nothing in place."
        ) from error
    outputs, *inner = found if isinstance(found, tuple) else (found,)
    lead, got = tokens.shape[:3], [tuple(t.shape) for t in (outputs, *inner)]
    sizes = [rows.stop - rows.start for rows in layout.inner_rows.values()]
    if got != [(*lead, size) for size in (layout.d, *sizes)] or outputs.dtype != tokens.dtype:
        expected = ", ".join(str((lead[2], size)) for size in (layout.d, *sizes))
        raise ValueError(
            f"{family.__name__}.unit_field must return {expected} in {tokens.dtype} for x "
            f"{(lead[2], layout.d)}; got {', '.join(str(shape[2:]) for shape in got)} in "
            f"{outputs.dtype}. It is f(x; theta) of one unit on one context, and its `inputs`."
        )
    return outputs, inner


def mixes_tokens(layout) -> bool:
    """Whether what a unit of a family does to one token depends on the others, as a trial tells.

    Of units that do, nothing tells how much a token is to weigh among the others.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, layout.d, dtype=torch.float64, generator=generator)
    packed = torch.randn(layout.size, 1, dtype=torch.float64, generator=generator)
    other = x.clone()
    other[0] += 1.0
    both = torch.stack([x, other])[None]
    found, _ = _outputs(both, layout.parts(packed), layout, causal=False)
    return not torch.allclose(found[0, 0, 1:], found[0, 1, 1:], rtol=1e-9, atol=1e-12)
