"""Where modules keep query, key, value and output of attention, by what their parts are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from .pairs import Pair
from .projections import Projection, projection_of, query_key_pairs, value_output_pairs
from .proposals import Found, Proposal, part_at, strangers
from .wrappers import uncompiled

# Parts of a module, dots leading into its children.
SEPARATE = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("q_proj", "k_proj", "v_proj", "dense"),
    ("q_proj", "k_proj", "v_proj", "c_proj"),
    ("q_proj", "k_proj", "v_proj", "proj"),
    ("query", "key", "value", "out"),
    ("query", "key", "value", "dense"),
    ("self.query", "self.key", "self.value", "output.dense"),
    ("self.query_proj", "self.key_proj", "self.value_proj", "output.dense"),
    ("attention.query", "attention.key", "attention.value", "output.dense"),
    ("q", "k", "v", "o"),
    ("q_lin", "k_lin", "v_lin", "out_lin"),
    ("linear_q", "linear_k", "linear_v", "linear_out"),
    ("to_q", "to_k", "to_v", "to_out"),
    ("to_q", "to_k", "to_v", "to_out.0"),
    ("wq", "wk", "wv", "wo"),
)
FUSED = (
    ("qkv", "proj"),
    ("qkv", "out_proj"),
    ("qkv", "o_proj"),
    ("qkv_proj", "o_proj"),
    ("qkv_proj", "out_proj"),
    ("query_key_value", "dense"),
    ("c_attn", "c_proj"),
    ("Wqkv", "out_proj"),
    ("Wqkv", "Wo"),
    ("to_qkv", "to_out"),
    ("to_qkv", "to_out.0"),
    ("self.in_proj", "output.dense"),
)
_ORDERS = ("qkv", "qvk", "kvq")
_GROUPS = ("mp_num",)  # CodeGen's
_NORMS = {"qk": ("q_norm", "k_norm", "query_norm", "key_norm"), "vo": ("v_norm", "value_norm")}
_SIZES = ("head_dim", "head_size", "attention_head_size")
_COUNTS = ("num_heads", "n_heads", "heads", "num_attention_heads", "n_head")


def separate_attention(module: nn.Module, name: str, per: str) -> Found | None:
    """Four projections, with fewer key heads than query heads or as many.

    The size of a head, or the number of heads, tells what a head is. Rotary positions commute with
    a scale.
    """
    names = next((ns for ns in SEPARATE if all(part_at(module, n) is not None for n in ns)), None)
    if names is None:
        return None

    def projection(i: int) -> Projection:
        return projection_of(part_at(module, names[i]), f"{name}.{names[i]}")

    def blocks() -> int:
        if per == "matrix":
            return 1
        return _key_heads(module, names[0], *(projection(i).count for i in range(3)))

    return _found(
        module,
        names,
        strangers(module, (*names, *_NORMS["qk"], *_NORMS["vo"])),
        (lambda: query_key_pairs(name, projection(0), projection(1), blocks()),),
        (lambda: value_output_pairs(name, projection(2), projection(3), blocks()),),
    )


def fused_attention(module: nn.Module, name: str, per: str) -> Found | None:
    """One projection to queries, keys and values, and one of what comes out.

    The three may lie behind one another, or so for every (key) head apart, which `Trials` tells.
    Where they are apart, per="matrix" too gives a pair each, for no block has all of one sort.
    """
    names = next((ns for ns in FUSED if all(part_at(module, n) is not None for n in ns)), None)
    if names is None:
        return None
    try:
        fused, output = (projection_of(part_at(module, n), f"{name}.{n}") for n in names)
    except ValueError as error:
        return Found({"qk": str(error), "vo": str(error)}, names)
    head = _head_size(module, names[0], output.inputs)
    cuts = list(_cuts(module, fused, output.inputs, head, _biases(module, name, names[0])))
    return _found(
        module,
        names,
        f"{fused.name} holds queries, keys and values, and which are where cannot be told",
        tuple(partial(_fused_pairs, module, name, per, names, cut, None) for cut in cuts),
        tuple(partial(_fused_pairs, module, name, per, names, cut, output) for cut in cuts),
    )


def _found(
    module: nn.Module,
    names: tuple[str, ...],
    doubt: str,
    qk: tuple[Callable[[], list[Pair]], ...],
    vo: tuple[Callable[[], list[Pair]], ...],
) -> Found:
    kinds = {
        kind: _norm_between(module, kind) or Proposal(builders, doubt)
        for kind, builders in (("qk", qk), ("vo", vo))
    }
    return Found(kinds, names)


Cut = list[tuple[Projection, Projection, Projection]]


def _cuts(
    module: nn.Module,
    fused: Projection,
    width: int,
    head: int | None,
    biases: dict[str, tuple[torch.Tensor, str]],
) -> Iterator[Cut]:
    """Ways to cut a projection of queries (`width` of them), keys and values: groups of the three.

    One group, or one for each key head, or what the module says; what comes out of the groups is
    in their order.
    """
    keys, odd = divmod(fused.count - width, 2)
    if keys <= 0 or odd:
        return
    numbers = [1, keys // head if head and keys % head == 0 else 1]
    numbers += [n for n in (getattr(module, name, None) for name in _GROUPS) if isinstance(n, int)]
    for groups in dict.fromkeys(numbers):
        if groups < 1 or width % groups or keys % groups:
            continue
        sizes = {"q": width // groups, "k": keys // groups, "v": keys // groups}
        for order in _ORDERS:
            starts = {part: sum(sizes[p] for p in order[:i]) for i, part in enumerate(order)}
            size = sum(sizes.values())
            yield [
                tuple(
                    _with_bias(fused.outputs(g * size + starts[p], sizes[p]), biases.get(p), g)
                    for p in "qkv"
                )
                for g in range(groups)
            ]


def _biases(module: nn.Module, name: str, path: str) -> dict[str, tuple[torch.Tensor, str]]:
    """Biases that the holder of the projection at `path` adds by itself to q, k or v."""
    container = path.rpartition(".")[0]
    own = part_at(module, container)._parameters
    place = f"{name}.{container}" if container else name
    names = {part: f"{part}_bias" for part in "qkv" if own.get(f"{part}_bias") is not None}
    return {part: (own[n], f"{place}.{n}") for part, n in names.items() if own[n].dim() == 1}


def _with_bias(
    projection: Projection, bias: tuple[torch.Tensor, str] | None, group: int
) -> Projection:
    if bias is None or projection.bias is not None:
        return projection
    vector, name = bias
    start = group * projection.count
    return dataclasses.replace(projection, bias=vector, bias_name=name, bias_start=start)


def _fused_pairs(
    module: nn.Module,
    name: str,
    per: str,
    names: tuple[str, str],
    cut: Cut,
    output: Projection | None,
) -> list[Pair]:
    """Those of query and key, or with `output` those of value and output."""
    pairs = []
    for g, (query, key, value) in enumerate(cut):
        sizes = (query.count, key.count, value.count)
        blocks = 1 if per == "matrix" else _key_heads(module, names[0], *sizes)
        first = None if len(cut) == 1 else g * blocks
        if output is None:
            pairs += query_key_pairs(name, query, key, blocks, first)
        else:
            part = output.entering(g * query.count, query.count)
            pairs += value_output_pairs(name, value, part, blocks, first)
    return pairs


def _norm_between(module: nn.Module, kind: str) -> str:
    norm = next((n for n in _NORMS[kind] if _active(getattr(module, n, None))), "")
    if not norm and kind == "qk" and getattr(module, "qk_norm", False):
        norm = "qk_norm"
    return norm and (
        f"{norm} normalises what comes out of the matrix, so that its scale does not reach the "
        "product (QK-norm): the two have a scale each and no pair"
    )


def _active(norm: object) -> bool:
    return norm is not None and not isinstance(uncompiled(norm), nn.Identity)


def _head_size(module: nn.Module, path: str, query: int) -> int | None:
    """The size of a head, of the module or of the part that holds the projection at `path`."""
    owners = [part_at(module, path.rpartition(".")[0]), module]
    for owner in owners:
        size = next((getattr(owner, n) for n in _SIZES if hasattr(owner, n)), None)
        if isinstance(size, int) and size > 0:
            return size
    for owner in owners:
        count = next((getattr(owner, n) for n in _COUNTS if hasattr(owner, n)), None)
        if isinstance(count, int) and count > 0:
            return query // count
    return None


def _key_heads(module: nn.Module, path: str, query: int, key: int, value: int) -> int:
    head = _head_size(module, path, query)
    if not head:
        raise ValueError("the size of its heads (head_dim or num_heads) cannot be seen")
    if key % head or query % key or value % (key // head):
        raise ValueError(
            f"{query} query, {key} key and {value} value rows are no whole heads of {head}"
        )
    return key // head
