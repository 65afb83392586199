"""What tokens see of each other, as compiled loops know it: the addresses of what `Sight` holds.

Logits are in base 2 here, so that a token of weight u has log2 u added to the logits of its key:
they are what the product of queries and keys starts from. That of a tracer is -inf, whose
exponential is exactly 0 beside any finite logit, and which no maximum sees.

Addresses, since nearly all calls have nothing there: arrays that are not needed would cost small
fields more than a tenth of their time.
"""

from __future__ import annotations

import weakref
from collections import namedtuple

import torch
from numba import types
from numba.extending import intrinsic

from ..compilation import inner_loop
from ..model.sight import Sight

SightAt = namedtuple("SightAt", "causal shifts weights ends first")
SightAt.__doc__ = """A `Sight` in integers: 1 with a mask; the addresses, 0 for what is not there,
of log2 u and u (B, N) and of the ends (B, N) of int64; the first of B contexts that is meant."""

# Equal tokens, without a mask and with one.
PLAIN, MASKED = (0, 0, 0, 0, 0), (1, 0, 0, 0, 0)

_kept: weakref.WeakKeyDictionary[Sight, dict] = weakref.WeakKeyDictionary()


def sight_at(sight: bool | Sight, dtype: torch.dtype) -> tuple[int, ...]:
    """The `SightAt` of a sight, or of what a mask alone stands for, with numbers of this dtype.

    What is there is kept as long as the sight itself, which callers hold until loops are done.
    """
    sight = Sight.of(sight)
    if sight.plain:
        return MASKED if sight.causal else PLAIN
    kept = _kept.setdefault(sight, {})
    if dtype not in kept:
        u, ends = sight.weights, sight.ends
        u = None if u is None else u.detach().to(dtype).contiguous()
        kept[dtype] = (
            None if u is None else u.log2(),
            u,
            None if ends is None else ends.to(torch.int64).contiguous(),
        )
    places = (0 if t is None else t.data_ptr() for t in kept[dtype])
    return int(sight.causal), *places, 0


@intrinsic
def number_at(typingctx, array, address, index):
    """A number at an address, of the type of those of an array."""
    return array.dtype(array, types.intp, types.intp), _read


@intrinsic
def integer_at(typingctx, address, index):
    """An int64 at an address."""
    return types.int64(types.intp, types.intp), _read


def _read(context, builder, signature, args):
    kind = context.get_value_type(signature.return_type).as_pointer()
    *_, address, index = args
    return builder.load(builder.gep(builder.inttoptr(address, kind), [index]))


@inner_loop
def seen_by(sight, contexts, row, tokens):
    """How many tokens, from the first one on, a row has in view in any of some contexts.

    contexts : (first, how many, ..)
    """
    if sight.causal == 0:
        return tokens
    if sight.ends == 0:
        return row + 1
    seen = row + 1
    for context in range(contexts[0], contexts[0] + contexts[1]):
        seen = max(seen, integer_at(sight.ends, (sight.first + context) * tokens + row))
    return seen


@inner_loop
def from_context(sight, start):
    """What the contexts see from one of them on."""
    return sight[0], sight[1], sight[2], sight[3], sight[4] + start
