"""The attention kernel against its definition and the derivative of that.

Symmetries of the definition follow; those of whole runs are in test_contract.py.
"""

import math

import numpy as np
import pytest
import torch
from builders import (
    BIASES,
    F64,
    assert_to_rounding,
    naive_field,
    naive_head_fields,
    normal,
    parts_of,
    random_parts,
)

from ipslimit import Heads, attention_field, attention_vjp

# Sums of at most a few hundred terms of size O(1), and one exponential: some tens of roundings
# in the mean, and ten times that is allowed.
ROUNDING = 400


def pytest_generate_tests(metafunc):
    """Every test runs on both paths of the kernel; those that patch `eager`, on that one."""
    paths = ["eager"] if "monkeypatch" in metafunc.fixturenames else ["eager", "fused"]
    metafunc.parametrize("path", paths, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def path(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPSLIMIT_KERNEL", request.param)
        yield request.param


# (leading dimensions of x, of heads): on x alone, on heads alone, on both, broadcast both ways.
LEADS = [
    ((), ()),
    ((3,), ()),
    ((), (3,)),
    ((3,), (3,)),
    ((3, 1), (1, 2)),
    ((2,), (3, 1)),
    ((3, 2), (2,)),
    ((1,), (1, 1)),
    ((1,), (3,)),
]


def example(x_lead, heads_lead, B=2, N=4, d=3, m=2, H=3, biases=BIASES, seed=0):
    x = normal(*x_lead, B, N, d, seed=seed)
    parts = random_parts(heads_lead, H, m, d, biases, seed=seed + 1)
    lead = torch.broadcast_shapes(x_lead, heads_lead)
    return x, parts, normal(*lead, B, N, d, seed=seed + 2)


def with_gradients(tensors):
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}


def all_results(x, heads, c, causal=True):
    dx, dheads = attention_vjp(x, heads, c, causal)
    results = {"field": attention_field(x, heads, causal), "dx": dx}
    return results | {"dheads": dheads.packed, "dweights": dheads.weights}


# --- the field ---------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_field_is_the_definition_written_as_loops(causal):
    x, parts, _ = example((), ())
    p = {name: tensor.numpy() for name, tensor in parts.items()}
    (B, N, d), (H, m) = x.shape, p["bq"].shape
    expected = np.zeros((B, N, d))
    for b in range(B):
        tokens = x[b].numpy()
        for h in range(H):
            for i in range(N):
                seen = range(i + 1) if causal else range(N)
                q = p["q"][h] @ tokens[i] + p["bq"][h]
                e = [math.exp(q @ (p["k"][h] @ tokens[j] + p["bk"][h]) / m**0.5) for j in seen]
                z = sum(w * (p["v"][h] @ tokens[j] + p["bv"][h]) for w, j in zip(e, seen))
                expected[b, i] += p["weights"][h] * (p["o"][h] @ z / sum(e) + p["bo"][h])
    actual = attention_field(x, Heads(**parts), causal)
    assert_to_rounding(actual, torch.from_numpy(expected), ROUNDING)


@pytest.mark.parametrize("sizes", [{"N": 1}, {"m": 1, "d": 1}, {"H": 1, "B": 1}, {"m": 5, "d": 2}])
def test_field_and_vjp_at_the_smallest_and_oddest_sizes(sizes):
    x, parts, c = example((2,), (2,), **sizes)
    check(x, parts, c, causal=False)


def test_default_weights_give_the_mean_over_heads():
    x, parts, _ = example((), ())
    parts.pop("weights")
    mean = naive_head_fields(x, parts).mean(dim=1)
    assert_to_rounding(attention_field(x, Heads(**parts)), mean, ROUNDING)


def test_a_head_of_weight_zero_adds_nothing():
    x, parts, _ = example((), ())
    parts["weights"][1] = 0.0
    others = {name: tensor[[0, 2]] for name, tensor in parts.items()}
    actual = attention_field(x, Heads(**parts))
    assert_to_rounding(actual, naive_field(x, others), ROUNDING)


@pytest.mark.parametrize("token", range(3))
def test_causal_tokens_do_not_change_when_later_tokens_do(token):
    x, parts, _ = example((), (), B=3)
    changed = x.clone()
    changed[:, token + 1 :] = normal(3, 3 - token, 3, seed=9) * 100
    heads = Heads(**parts)
    before, after = attention_field(x, heads, True), attention_field(changed, heads, True)
    assert torch.equal(before[:, : token + 1], after[:, : token + 1])  # masked weights are 0
    assert not torch.isclose(before[:, token + 1 :], after[:, token + 1 :]).any()
    free = attention_field(changed, heads)
    assert not torch.isclose(free[:, : token + 1], before[:, : token + 1]).all()


def test_causal_costates_reach_earlier_tokens_only():
    x, parts, c = example((), ())
    c[:, :2] = 0.0
    c[:, 3:] = 0.0
    dx, _ = attention_vjp(x, Heads(**parts), c, True)
    assert (dx[:, 3:] == 0).all()
    assert (dx[:, :3] != 0).any(dim=-1).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_extreme_logits_give_the_hard_maximum_and_no_nan(dtype, causal):
    x, parts, c = example((), ())
    parts["q"], parts["bq"] = parts["q"] * 1e9, parts["bq"] * 1e9
    heads, x, c = Heads(**parts).to(dtype), x.to(dtype), c.to(dtype)
    p = parts_of(heads)
    # logits ~1e9 differ by far more than their rounding (~100 in float32) and than 1: each token
    # attends to one token, with weight 1, whatever the order of summation
    field = attention_field(x, heads, causal)
    assert_to_rounding(field, naive_field(x, p, causal), ROUNDING)
    dx, dheads = attention_vjp(x, heads, c, causal)
    assert torch.isfinite(field).all()
    assert torch.isfinite(dx).all()
    assert torch.isfinite(dheads.packed).all()
    assert torch.isfinite(dheads.weights).all()


# --- the derivative ----------------------------------------------------------------------------


def check(x, parts, c, causal):
    """Field, dx, and derivatives per unit weight of every part: the definition and its autograd."""
    x_, p = x.clone().requires_grad_(), with_gradients(parts)
    (c * naive_field(x_, p, causal)).sum().backward()
    unit = with_gradients(parts | {"weights": torch.ones_like(parts["weights"])})
    (c * naive_field(x, unit, causal)).sum().backward()
    field = attention_field(x, Heads(**parts), causal)
    assert_to_rounding(field, naive_field(x, parts, causal), ROUNDING, "field")
    dx, dheads = attention_vjp(x, Heads(**parts), c, causal)
    assert_to_rounding(dx, x_.grad, ROUNDING, "x")
    assert_to_rounding(dheads.weights, p["weights"].grad, ROUNDING, "weights")
    for name, part in dheads.parts().items():
        if name == "bk":
            assert (part == 0).all()
        else:
            assert_to_rounding(part, unit[name].grad, ROUNDING, name)
            plain = part * parts["weights"].reshape(
                parts["weights"].shape + (1,) * (part.ndim - parts["weights"].ndim)
            )
            assert_to_rounding(plain, p[name].grad, ROUNDING, f"weighted {name}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biases", [(), BIASES, ("bk", "bo")], ids=lambda names: ",".join(names))
@pytest.mark.parametrize("x_lead,heads_lead", LEADS)
def test_field_and_vjp_are_the_definition_and_its_autograd(x_lead, heads_lead, biases, causal):
    x, parts, c = example(x_lead, heads_lead, biases=biases)
    check(x, parts, c, causal)


def test_a_head_of_weight_zero_has_a_derivative_per_unit_weight():
    x, parts, c = example((), ())
    parts["weights"][1] = 0.0
    check(x, parts, c, causal=False)
    dheads = attention_vjp(x, Heads(**parts), c)[1]
    for name, part in dheads.parts().items():
        assert name == "bk" or (part[1] != 0).all(), name


def test_derivative_per_unit_weight_does_not_depend_on_the_weights():
    x, parts, c = example((2,), (2,))
    dheads = attention_vjp(x, Heads(**parts), c)[1]
    other = attention_vjp(x, Heads(**parts | {"weights": 100 * parts["weights"]}), c)[1]
    assert torch.equal(dheads.packed, other.packed)


def test_derivative_in_bk_is_exactly_zero():
    for causal in (False, True):
        for scale in (1.0, 1e6):
            x, parts, c = example((), ())
            dheads = attention_vjp(scale * x, Heads(**parts), scale * c, causal)[1]
            assert (dheads.bk == 0).all()


def test_without_heads_dx_is_the_same_and_dheads_is_none():
    x, parts, c = example((3,), (3,))
    heads = Heads(**parts)
    dx, dheads = attention_vjp(x, heads, c, with_heads=False)
    assert dheads is None
    assert torch.equal(dx, attention_vjp(x, heads, c)[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biases", [(), BIASES])
@pytest.mark.parametrize("x_lead,heads_lead", LEADS)
def test_outputs_are_the_sums_of_what_o_is_applied_to(x_lead, heads_lead, biases, causal):
    x, parts, c = example(x_lead, heads_lead, biases=biases)
    heads = Heads(**parts)
    dx, dheads, outputs = attention_vjp(x, heads, c, causal, with_outputs=True)
    assert torch.equal(dx, attention_vjp(x, heads, c, causal)[0])
    assert torch.equal(dheads.packed, attention_vjp(x, heads, c, causal)[1].packed)
    # O = identity, d = m, makes a head's field its attention output
    eye = torch.eye(3, dtype=F64)[: heads.m]
    padded = parts | {"o": eye.mT.expand(parts["o"].shape)}
    padded.pop("bo", None)
    fields = naive_head_fields(x, padded, causal)[..., : heads.m]  # (..., B, H, N, m)
    expected = fields.sum(dim=(-4, -2)).sum_to_size(outputs.shape)
    assert_to_rounding(outputs, expected, ROUNDING)


def test_outputs_come_with_heads_only():
    x, parts, c = example((), ())
    with pytest.raises(ValueError, match="with_outputs must be False"):
        attention_vjp(x, Heads(**parts), c, with_heads=False, with_outputs=True)


def test_cotangent_broadcasts():
    x, parts, _ = example((3,), (3,))
    heads = Heads(**parts)
    one = normal(4, 3, seed=5)
    dx, dheads = attention_vjp(x, heads, one)
    full_dx, full_dheads = attention_vjp(x, heads, one.expand(3, 2, 4, 3))
    assert torch.equal(dx, full_dx)
    assert torch.equal(dheads.packed, full_dheads.packed)


def test_vjp_builds_no_graph():
    x, parts, c = example((), ())
    p = with_gradients(parts)
    dx, dheads = attention_vjp(x.requires_grad_(), Heads(**p), c.requires_grad_())
    assert not dx.requires_grad
    assert not dheads.packed.requires_grad
    assert not dheads.weights.requires_grad


def test_inputs_are_left_unchanged():
    x, parts, c = example((3, 1), (1, 2))
    heads = Heads(**parts)
    before = [t.clone() for t in (x, heads.packed, heads.weights, c)]
    attention_field(x, heads, True)
    attention_vjp(x, heads, c, True)
    for tensor, copy in zip((x, heads.packed, heads.weights, c), before):
        assert torch.equal(tensor, copy)


# --- the autograd face -------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("x_lead,heads_lead", [((), ()), ((2, 1), (1, 2))])
def test_gradcheck_of_the_field(x_lead, heads_lead, causal):
    x, parts, _ = example(x_lead, heads_lead, B=1, N=3, H=2, d=2)
    names = list(parts)
    tensors = with_gradients(parts | {"x": x})

    def field(x, *values):
        return attention_field(x, Heads(**dict(zip(names, values))), causal)

    assert torch.autograd.gradcheck(field, [tensors["x"], *(tensors[name] for name in names)])


@pytest.mark.parametrize("leaf", ["x", "v", "weights"])
def test_gradient_flows_to_whatever_asks_for_it(leaf):
    x, parts, c = example((2,), (3, 1))
    reference = with_gradients(parts | {"x": x})
    changed = dict(reference)
    (c * naive_field(changed.pop("x"), changed)).sum().backward()
    mine = parts | {"x": x}
    mine[leaf] = mine[leaf].clone().requires_grad_()
    changed = dict(mine)
    field = attention_field(changed.pop("x"), Heads(**changed))
    (gradient,) = torch.autograd.grad((c * field).sum(), mine[leaf])
    assert_to_rounding(gradient, reference[leaf].grad, ROUNDING)


def test_no_graph_is_built_where_none_is_asked_for():
    x, parts, _ = example((), ())
    assert attention_field(x, Heads(**parts)).grad_fn is None
    with torch.no_grad():
        assert attention_field(x.requires_grad_(), Heads(**parts)).grad_fn is None


def test_second_derivatives_are_refused():
    x, parts, _ = example((), ())
    x.requires_grad_()
    loss = attention_field(x, Heads(**parts)).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once|twice|second"):
        gradient.sum().backward()


def test_second_derivatives_are_refused_after_a_linear_loss():
    """The first derivative must not come back as a constant: the second would be wrong."""
    x, parts, c = example((), ())
    x.requires_grad_()
    loss = (c * attention_field(x, Heads(**parts))).sum()
    with pytest.raises(RuntimeError, match=r"once|twice|second"):
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (x * gradient).sum().backward()


# --- batch mates -------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
@pytest.mark.parametrize("where", ["x", "heads", "cotangent"])
def test_a_diverged_seed_leaves_its_batch_mates_bit_identical(where, bad):
    x, parts, c = example((3,), (3,))
    clean = (attention_field(x, Heads(**parts)), *attention_vjp(x, Heads(**parts), c))
    target = {"x": x, "heads": parts["k"], "cotangent": c}[where]
    target[1] = bad
    spoilt = (attention_field(x, Heads(**parts)), *attention_vjp(x, Heads(**parts), c))
    for before, after in zip(clean, spoilt):
        if isinstance(before, Heads):
            assert torch.equal(before.weights[[0, 2]], after.weights[[0, 2]])
            before, after = before.packed, after.packed
        assert torch.equal(before[[0, 2]], after[[0, 2]])


def test_a_diverged_context_leaves_the_others_bit_identical():
    x, parts, c = example((), (), B=3)
    heads = Heads(**parts)
    clean = attention_field(x, heads), attention_vjp(x, heads, c)[0]
    x[1] = math.nan
    spoilt = attention_field(x, heads), attention_vjp(x, heads, c)[0]
    for before, after in zip(clean, spoilt):
        assert torch.equal(before[[0, 2]], after[[0, 2]])
        assert torch.isnan(after[1]).all()


# --- devices -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("x_lead,heads_lead", [((), ()), ((3,), (3,)), ((3, 1), (1, 2))])
def test_cuda_agrees_with_the_cpu(monkeypatch, x_lead, heads_lead, causal):
    monkeypatch.setenv("IPSLIMIT_KERNEL", "auto")
    x, parts, c = example(x_lead, heads_lead, N=8, H=9)
    heads = Heads(**parts)
    expected = all_results(x, heads, c, causal)
    actual = all_results(x.cuda(), heads.to("cuda"), c.cuda(), causal)
    for name, result in actual.items():
        assert result.device.type == "cuda"
        assert_to_rounding(result.cpu(), expected[name], ROUNDING, name)
