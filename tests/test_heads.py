"""Heads: packing, weights, indexing."""

import copy
import pickle

import pytest
import torch
from builders import BIASES, F64, MATRICES, normal, parts_of, random_heads, random_parts
from hypothesis import given
from hypothesis import strategies as st

from ipslimit import Heads

TAILS = {"o": ("d", "m"), "bo": ("d",), "bq": ("m",), "bk": ("m",), "bv": ("m",)}


@given(
    lead=st.lists(st.integers(1, 3), max_size=2),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    biases=st.sets(st.sampled_from(BIASES)),
)
def test_parts_come_back_bit_by_bit_with_their_shapes(lead, sizes, biases):
    H, m, d = sizes
    biases = tuple(name for name in BIASES if name in biases)
    parts = random_parts(tuple(lead), H, m, d, biases)
    heads = Heads(**parts)
    assert (heads.count, heads.m, heads.d, heads.lead) == (H, m, d, torch.Size(lead))
    assert heads.packed.shape == (*lead, heads.layout.size, H)
    for name in MATRICES + BIASES:
        part = getattr(heads, name)
        if name not in parts:
            assert part is None
            continue
        tail = tuple({"m": m, "d": d}[axis] for axis in TAILS.get(name, ("m", "d")))
        assert part.shape == (*lead, H, *tail)
        assert torch.equal(part, parts[name]), name
    assert torch.equal(heads.weights, parts["weights"])


def test_parts_are_views_of_packed():
    heads = random_heads()
    for name, part in heads.parts().items():
        assert part.untyped_storage().data_ptr() == heads.packed.untyped_storage().data_ptr(), name
    heads.packed.zero_()
    assert all(float(part.abs().sum()) == 0.0 for part in heads.parts().values())


def test_every_packed_number_belongs_to_exactly_one_part():
    heads = random_heads(H=1, m=2, d=3)
    numbered = heads.with_packed(torch.arange(heads.layout.size, dtype=F64)[:, None])
    seen = torch.cat([part.flatten() for part in numbered.parts().values()])
    assert seen.sort().values.tolist() == list(range(heads.layout.size))


def test_default_weights_are_the_mean_over_heads():
    parts = random_parts((2,), H=4)
    parts.pop("weights")
    assert torch.equal(Heads(**parts).weights, torch.full((2, 4), 0.25, dtype=F64))


def test_weights_broadcast_over_leading_dimensions():
    parts = random_parts((2, 3), H=4)
    parts["weights"] = normal(4)
    heads = Heads(**parts)
    assert heads.weights.shape == (2, 3, 4)
    assert torch.equal(heads.weights[1, 2], parts["weights"])


def test_indexing_is_over_leading_dimensions():
    heads = random_heads((3, 2), H=4)
    for index in (1, -1, slice(0, 2), torch.tensor([2, 0]), (2, 1), None):
        taken = heads[index]
        for name, part in parts_of(heads).items():
            assert torch.equal(parts_of(taken)[name], part[index]), (name, index)
        assert taken.lead == torch.empty(3, 2)[index].shape
    assert [layer.lead for layer in heads] == [torch.Size([2])] * 3
    with pytest.raises(IndexError, match="no leading dimension"):
        random_heads()[0]


def test_indexing_may_insert_dimensions():
    heads = random_heads((2,), H=4)
    assert heads[None].lead == torch.Size([1, 2])
    assert heads[:, None].lead == torch.Size([2, 1])
    assert torch.equal(heads[:, None].packed[:, 0], heads.packed)
    assert torch.equal(heads[:, None].weights[:, 0], heads.weights)


@pytest.mark.parametrize("index", [(0, 0), (Ellipsis, 0)])
def test_an_index_that_reaches_the_heads_themselves_is_refused(index):
    with pytest.raises(IndexError):
        random_heads((2,), H=4)[index]


def test_iterating_heads_without_leading_dimensions_is_refused_clearly():
    with pytest.raises((IndexError, TypeError), match="leading dimension"):
        list(random_heads())


def test_map_and_to_act_on_parameters_and_weights():
    heads = random_heads()
    assert heads.to(torch.float32).dtype == torch.float32
    assert heads.to(torch.float32).weights.dtype == torch.float32
    doubled = heads.map(lambda tensor: 2 * tensor)
    assert torch.equal(doubled.q, 2 * heads.q)
    assert torch.equal(doubled.weights, 2 * heads.weights)


def test_with_packed_keeps_weights_and_layout():
    heads = random_heads()
    other = heads.with_packed(heads.packed + 1)
    assert other.layout == heads.layout
    assert torch.equal(other.weights, heads.weights)
    assert torch.equal(other.bo, heads.bo + 1)


def test_gradients_reach_the_tensors_heads_were_built_from():
    parts = {name: tensor.requires_grad_() for name, tensor in random_parts().items()}
    coefficients = {name: normal(*tensor.shape, seed=3) for name, tensor in parts.items()}
    heads = Heads(**parts)
    views = heads.parts() | {"weights": heads.weights}
    sum((coefficients[name] * view).sum() for name, view in views.items()).backward()
    for name, tensor in parts.items():
        assert torch.equal(tensor.grad, coefficients[name]), name


def test_heads_do_not_share_memory_with_the_matrices_given():
    parts = random_parts()
    heads = Heads(**parts)
    before = heads.q.clone()
    parts["q"].zero_()
    assert torch.equal(heads.q, before)


def test_arrays_are_accepted():
    parts = random_parts()
    heads = Heads(**{name: tensor.numpy() for name, tensor in parts.items()})
    assert torch.equal(heads.packed, Heads(**parts).packed)


def test_heads_survive_copying_and_pickling():
    heads = random_heads((2,))
    for other in (copy.deepcopy(heads), pickle.loads(pickle.dumps(heads))):
        assert torch.equal(other.packed, heads.packed)
        assert torch.equal(other.weights, heads.weights)
        assert other.layout == heads.layout


def test_text_shows_sizes_biases_and_dtype():
    text = repr(random_heads((2,), H=3, m=2, d=5, biases=("bv",), dtype=torch.float32))
    assert text == "Heads(lead=(2,), H=3, m=2, d=5, biases=bv, float32, cpu)"


def test_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'bz'"):
        _ = random_heads().bz
