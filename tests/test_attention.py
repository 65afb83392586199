"""The attention kernel against its definition, its derivative and its symmetries."""

import math

import numpy as np
import pytest
import torch
from builders import (
    BIASES,
    F64,
    MATRICES,
    assert_to_rounding,
    naive_field,
    naive_head_fields,
    normal,
    parts_of,
    random_parts,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ipslimit import Heads, attention_field, attention_vjp
from ipslimit.model import eager

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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biases", [(), BIASES, ("bk", "bo")], ids=lambda names: ",".join(names))
@pytest.mark.parametrize("x_lead,heads_lead", LEADS)
def test_field_broadcasts_over_leading_dimensions(x_lead, heads_lead, biases, causal):
    x, parts, _ = example(x_lead, heads_lead, biases=biases)
    actual = attention_field(x, Heads(**parts), causal)
    assert_to_rounding(actual, naive_field(x, parts, causal), ROUNDING)


@pytest.mark.parametrize("sizes", [{"N": 1}, {"m": 1, "d": 1}, {"H": 1, "B": 1}, {"m": 5, "d": 2}])
def test_field_and_vjp_at_the_smallest_and_oddest_sizes(sizes):
    x, parts, c = example((2,), (2,), **sizes)
    assert_to_rounding(attention_field(x, Heads(**parts)), naive_field(x, parts), ROUNDING)
    check_vjp(x, parts, c, causal=False)


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


@pytest.mark.parametrize("causal", [False, True])
def test_float32_is_within_1e5_of_float64(causal):
    # 1e-5 is about 100 roundings of float32, on fields and derivatives of size O(1)
    x, parts, c = example((3,), (3,), N=8, d=4, m=4, H=16)
    heads = Heads(**parts)
    narrow = (x.float(), heads.to(torch.float32))
    field = attention_field(x, heads, causal)
    dx, dheads = attention_vjp(x, heads, c, causal)
    field32 = attention_field(*narrow, causal)
    dx32, dheads32 = attention_vjp(*narrow, c.float(), causal)
    pairs = [(field32, field), (dx32, dx), (dheads32.packed, dheads.packed)]
    for single, double in [*pairs, (dheads32.weights, dheads.weights)]:
        assert single.dtype == torch.float32
        assert float((single - double).abs().max()) < 1e-5 * float(double.abs().max())


# --- the derivative ----------------------------------------------------------------------------


def check_vjp(x, parts, c, causal):
    """dx, and per-unit-weight derivatives of every part, against autograd of the definition."""
    x_, p = x.clone().requires_grad_(), with_gradients(parts)
    (c * naive_field(x_, p, causal)).sum().backward()
    unit = with_gradients(parts | {"weights": torch.ones_like(parts["weights"])})
    (c * naive_field(x, unit, causal)).sum().backward()
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
def test_vjp_is_autograd_of_the_definition(x_lead, heads_lead, biases, causal):
    x, parts, c = example(x_lead, heads_lead, biases=biases)
    check_vjp(x, parts, c, causal)


def test_a_head_of_weight_zero_has_a_derivative_per_unit_weight():
    x, parts, c = example((), ())
    parts["weights"][1] = 0.0
    check_vjp(x, parts, c, causal=False)
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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["x", *MATRICES, *BIASES, "weights"])
def test_vjp_is_the_adjoint_of_the_derivative(name, causal):
    """<c, D u> = <D^T c, u> for a direction u in each argument, D u of the definition."""
    x, parts, c = example((2,), (2,))
    arguments = parts | {"x": x}
    u = normal(*arguments[name].shape, seed=7)

    def field(value):
        changed = arguments | {name: value}
        return naive_field(changed.pop("x"), changed, causal)

    forward = (c * torch.autograd.functional.jvp(field, arguments[name], u)[1]).sum()
    dx, dheads = attention_vjp(x, Heads(**parts), c, causal)
    if name == "x":
        backward = (dx * u).sum()
    elif name == "weights":
        backward = (dheads.weights * u).sum()
    else:
        per_unit_weight = (dheads.parts()[name] * u).flatten(2).sum(-1)
        backward = (per_unit_weight * parts["weights"]).sum()
    # a sum of ~100 products more than in the field itself
    assert_to_rounding(backward, forward, 10 * ROUNDING)


def fitted_order(h, errors):
    return float(np.polyfit(np.log(h), np.log(errors), 1)[0])


def remainders(x, parts, c, name, face):
    """|phi(a + h u) - phi(a) - h phi'(a) u| over h, for phi = sum(c * field), a the argument."""
    arguments = parts | {"x": x}
    moved = list(arguments) if name == "all" else [name]
    directions = {key: normal(*arguments[key].shape, seed=11 + i) for i, key in enumerate(moved)}

    def phi(changed):
        changed = dict(changed)
        return (c * attention_field(changed.pop("x"), Heads(**changed))).sum()

    if face == "autograd":
        leaves = with_gradients(arguments)
        phi(leaves).backward()
        slopes = {key: leaf.grad for key, leaf in leaves.items()}
    else:
        dx, dheads = attention_vjp(x, Heads(**parts), c)
        weighted = dheads.with_packed(dheads.packed * parts["weights"][..., None, :])
        slopes = weighted.parts() | {"x": dx, "weights": dheads.weights}
    slope = sum((slopes[key] * u).sum() for key, u in directions.items())
    h = 2.0 ** -np.arange(7, 16)
    errors = []
    for step in h:
        changed = arguments | {key: arguments[key] + step * u for key, u in directions.items()}
        errors.append(abs(float(phi(changed) - phi(arguments) - step * slope)))
    return h, errors


@pytest.mark.parametrize("face", ["vjp", "autograd"])
@pytest.mark.parametrize("name", ["all", "x", "q", "k", "bq"])
def test_error_of_the_linearisation_falls_like_h_squared(name, face):
    x, parts, c = example((), ())
    # phi'' is ~100 at most: at the smallest h, 3e-5, a slope wrong by 1 % would give order 1;
    # rounding, 1e-14, is far below phi'' h^2 / 2
    h, errors = remainders(x, parts, c, name, face)
    assert abs(fitted_order(h, errors) - 2) < 0.2


@pytest.mark.parametrize("face", ["vjp", "autograd"])
@pytest.mark.parametrize("name", ["v", "o", "bv", "bo", "weights", "bk"])
def test_linearisation_is_exact_where_the_field_is_affine(name, face):
    x, parts, c = example((), ())
    _, errors = remainders(x, parts, c, name, face)
    assert max(errors) < 10 * ROUNDING * torch.finfo(F64).eps  # a sum over the whole field


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


# --- chunks ------------------------------------------------------------------------------------


def set_budgets(monkeypatch, entries):
    monkeypatch.setattr(eager, "TOKEN_BUDGET", entries)
    monkeypatch.setattr(eager, "PAIR_BUDGET", 8 * entries)  # bytes, of doubles


def all_results(x, heads, c, causal=True):
    dx, dheads = attention_vjp(x, heads, c, causal)
    results = {"field": attention_field(x, heads, causal), "dx": dx}
    return results | {"dheads": dheads.packed, "dweights": dheads.weights}


@pytest.mark.parametrize("budget", [1, 50, 200, 1000])
@pytest.mark.parametrize("x_lead,heads_lead", [((5,), (5,)), ((5,), ()), ((), (5,))])
def test_chunks_change_results_by_rounding_only(monkeypatch, budget, x_lead, heads_lead):
    x, parts, c = example(x_lead, heads_lead, H=7, B=3)
    heads = Heads(**parts)
    whole = all_results(x, heads, c)
    set_budgets(monkeypatch, budget)
    for name, chunked in all_results(x, heads, c).items():
        # the same terms in another order of summation
        assert_to_rounding(chunked, whole[name], ROUNDING, name)


def test_chunks_of_leading_indices_change_no_bit(monkeypatch):
    x, parts, c = example((6,), (6,), H=8, B=4, N=8, d=4, m=4)
    heads = Heads(**parts)
    unit = (8 + 4) * (3 * 4 + 4)
    whole = all_results(x, heads, c)
    for rows in (1, 2, 4):
        budget = unit * 4 * 8 * rows
        set_budgets(monkeypatch, budget)
        row_blocks, context_blocks, head_blocks = eager.blocks(6, 4, 8, 8, 4, 4)
        assert (len(row_blocks), len(context_blocks), len(head_blocks)) == (-(-6 // rows), 1, 1)
        for name, chunked in all_results(x, heads, c).items():
            assert torch.equal(chunked, whole[name]), (name, rows)


def test_the_cut_over_heads_and_contexts_ignores_leading_dimensions(monkeypatch):
    set_budgets(monkeypatch, 1000)
    alone = eager.blocks(1, 5, 40, 4, 3, 2)
    for rows in (2, 3, 100):
        assert eager.blocks(rows, 5, 40, 4, 3, 2)[1:] == alone[1:]


def test_blocks_cover_everything_once_within_the_budget(monkeypatch):
    unit = (6 + 2) * (3 * 3 + 2)
    for budget in (1, 150, 400, 1000, 3000, 2**18):
        set_budgets(monkeypatch, budget)
        cuts = eager.blocks(4, 5, 37, 6, 2, 3)
        largest = math.prod(max(b.stop - b.start for b in blocks) for blocks in cuts)
        assert unit * largest <= max(budget, unit)
        for total, blocks in zip((4, 5, 37), cuts):
            assert [i for block in blocks for i in range(total)[block]] == list(range(total))


class Temporaries(TorchDispatchMode):
    """Sizes, in entries, of the tensors that operations make and that are alive at one time."""

    def __init__(self, *inputs):
        super().__init__()
        self.inputs = {t.untyped_storage().data_ptr() for t in inputs}
        self.alive = {}  # address -> (size, weak reference)
        self.moments = set()  # {address: size} of what was alive after each operation

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.alive = {at: made for at, made in self.alive.items() if not made[1].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.inputs | self.alive.keys():
                    size = storage.nbytes() // tensor.element_size()
                    self.alive[storage.data_ptr()] = (size, StorageWeakRef(storage))
        self.moments.add(frozenset((at, size) for at, (size, _) in self.alive.items()))
        return result

    def without(self, *outputs):
        """(largest temporary, largest sum of live ones), not counting the outputs."""
        skip = {t.untyped_storage().data_ptr() for t in outputs}
        live = [[size for at, size in moment if at not in skip] for moment in self.moments]
        return max(map(max, filter(None, live))), max(map(sum, live))


def measured_temporaries(x, parts, c, causal=False):
    heads = Heads(**parts)
    with Temporaries(x, heads.packed, heads.weights, c) as field_mode:
        field = attention_field(x, heads, causal)
    with Temporaries(x, heads.packed, heads.weights, c) as vjp_mode:
        dx, dheads = attention_vjp(x, heads, c, causal)
    return field_mode.without(field), vjp_mode.without(dx, dheads.packed, dheads.weights)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("budget,H", [(1, 2), (1000, 24), (4000, 24)])
def test_temporaries_keep_to_the_stated_bound(monkeypatch, budget, H, causal):
    """No temporary over max(TOKEN_BUDGET, (N + d) (3 m + d), N^2); 6 and 10 of them at most."""
    set_budgets(monkeypatch, budget)
    x, parts, c = example((5,), (5,), H=H, N=6, B=3)
    bound = max(budget, (6 + 3) * (3 * 2 + 3))
    field, vjp = measured_temporaries(x, parts, c, causal)
    assert field[0] <= bound
    assert vjp[0] <= bound
    assert field[1] <= 6 * bound
    assert vjp[1] <= 10 * bound


def test_temporaries_keep_to_the_stated_bound_where_d_is_large(monkeypatch):
    set_budgets(monkeypatch, 4000)
    x, parts, c = example((2,), (2,), H=64, N=2, B=2, m=2, d=96)
    field, vjp = measured_temporaries(x, parts, c)
    assert max(field[0], vjp[0]) <= 4000


def test_broadcasting_copies_heads_and_tokens_at_most_once_each(monkeypatch):
    set_budgets(monkeypatch, 4000)
    x, parts, c = example((20, 1), (3,), H=40, N=2, B=1)
    expanded = 20 * 3 * Heads(**parts).packed[0].numel()
    field, vjp = measured_temporaries(x, parts, c)
    assert max(field[0], vjp[0]) <= expanded
    # packed, and its derivative before it is summed; weights and tokens are far smaller
    assert field[1] <= 1.2 * expanded
    assert vjp[1] <= 2.2 * expanded


def test_an_attention_map_over_the_budget_still_works(monkeypatch):
    set_budgets(monkeypatch, 10)
    x, parts, c = example((), (), N=12)
    assert_to_rounding(attention_field(x, Heads(**parts)), naive_field(x, parts), ROUNDING)
    check_vjp(x, parts, c, causal=True)


# --- symmetries --------------------------------------------------------------------------------

SIZES = st.fixed_dictionaries(
    {
        "B": st.integers(1, 3),
        "N": st.integers(1, 6),
        "d": st.integers(1, 4),
        "m": st.integers(1, 4),
        "H": st.integers(1, 5),
        "biases": st.sets(st.sampled_from(BIASES)).map(lambda some: tuple(sorted(some))),
        "seed": st.integers(0, 2**20),
    }
)
CAUSAL = st.booleans()


def permutation(n, seed):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


@given(SIZES)
def test_permuting_tokens_permutes_field_and_costates(sizes):
    x, parts, c = example((), (), **sizes)
    order = permutation(sizes["N"], sizes["seed"])
    heads = Heads(**parts)
    assert_to_rounding(
        attention_field(x[:, order], heads), attention_field(x, heads)[:, order], ROUNDING
    )
    dx, dheads = attention_vjp(x, heads, c)
    dx_permuted, dheads_permuted = attention_vjp(x[:, order], heads, c[:, order])
    assert_to_rounding(dx_permuted, dx[:, order], ROUNDING)
    assert_to_rounding(dheads_permuted.packed, dheads.packed, ROUNDING)


@given(SIZES, CAUSAL)
def test_permuting_heads_changes_nothing_but_their_order(sizes, causal):
    x, parts, c = example((), (), **sizes)
    order = permutation(sizes["H"], sizes["seed"])
    heads = Heads(**parts)
    permuted = Heads(**{name: tensor[order] for name, tensor in parts.items()})
    before, after = all_results(x, heads, c, causal), all_results(x, permuted, c, causal)
    before["dheads"], before["dweights"] = before["dheads"][:, order], before["dweights"][order]
    for name, result in after.items():
        assert_to_rounding(result, before[name], ROUNDING, name)


@given(SIZES, CAUSAL)
def test_splitting_a_head_into_two_of_half_the_weight_changes_nothing(sizes, causal):
    x, parts, c = example((), (), **sizes)
    split = {name: torch.cat([tensor, tensor[:1]]) for name, tensor in parts.items()}
    split["weights"][0] /= 2
    split["weights"][-1] /= 2
    before = all_results(x, Heads(**parts), c, causal)
    after = all_results(x, Heads(**split), c, causal)
    for name in ("field", "dx"):
        assert_to_rounding(after[name], before[name], ROUNDING, name)
    for name in ("dheads", "dweights"):  # per unit weight: both halves have the whole's
        whole = torch.cat([before[name], before[name][..., :1]], dim=-1)
        assert_to_rounding(after[name], whole, ROUNDING, name)


@given(SIZES)
def test_duplicating_every_token_duplicates_the_field(sizes):
    x, parts, c = example((), (), **sizes)
    heads = Heads(**parts)
    doubled = x.repeat_interleave(2, dim=1)
    field = attention_field(x, heads).repeat_interleave(2, dim=1)
    assert_to_rounding(attention_field(doubled, heads), field, ROUNDING)
    # each copy carries half of the costate: the head derivative is an average over tokens
    dx, dheads = attention_vjp(x, heads, c)
    dx_doubled, dheads_doubled = attention_vjp(doubled, heads, c.repeat_interleave(2, dim=1) / 2)
    assert_to_rounding(2 * dx_doubled[:, ::2], dx, ROUNDING)
    assert_to_rounding(2 * dx_doubled[:, 1::2], dx, ROUNDING)
    assert_to_rounding(dheads_doubled.packed, dheads.packed, ROUNDING)


def test_duplicating_every_token_changes_the_causal_field():
    x, parts, _ = example((), ())
    heads = Heads(**parts)
    field = attention_field(x, heads, True).repeat_interleave(2, dim=1)
    doubled = attention_field(x.repeat_interleave(2, dim=1), heads, True)
    # token 1, copy 0 sees (x0, x0, x1), so x0 counts twice; the copies of token 0 see x0 only
    assert float((doubled - field)[:, 2].abs().max()) > 1e-3
    assert_to_rounding(doubled[:, :2], field[:, :2], ROUNDING)


@given(SIZES, CAUSAL, st.floats(-20, 20))
def test_bk_shifts_all_logits_of_a_row_and_changes_nothing(sizes, causal, shift):
    sizes["biases"] = tuple({*sizes["biases"], "bk"})
    x, parts, c = example((), (), **sizes)
    shifted = parts | {"bk": parts["bk"] + shift}
    before = all_results(x, Heads(**parts), c, causal)
    for name, result in all_results(x, Heads(**shifted), c, causal).items():
        # logits up to |q| |shift| lose |logit| roundings in the softmax
        size = 1 + abs(shift) * 10
        assert_to_rounding(result, before[name], ROUNDING * size, name)


@given(SIZES, CAUSAL, st.floats(0.1, 10), st.booleans())
def test_only_the_products_of_query_and_key_and_of_value_and_output_matter(sizes, causal, c, qk):
    """Q, bQ -> c Q, c bQ with K, bK -> K/c, bK/c; and V, bV -> c V, c bV with O -> O/c."""
    x, parts, cotangent = example((), (), **sizes)
    up, down = (("q", "bq"), ("k", "bk")) if qk else (("v", "bv"), ("o",))
    factors = {name: c for name in up} | {name: 1 / c for name in down}
    scaled = {name: factors.get(name, 1.0) * tensor for name, tensor in parts.items()}
    before, after = Heads(**parts), Heads(**scaled)
    field = attention_field(x, before, causal)
    assert_to_rounding(attention_field(x, after, causal), field, ROUNDING)
    dx, dheads = attention_vjp(x, before, cotangent, causal)
    dx_scaled, dheads_scaled = attention_vjp(x, after, cotangent, causal)
    assert_to_rounding(dx_scaled, dx, ROUNDING)
    for name, part in dheads_scaled.parts().items():  # dtheta scales the other way
        rescaled = part * factors.get(name, 1.0)
        assert_to_rounding(rescaled, dheads.parts()[name], ROUNDING, name)


# --- devices -----------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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
