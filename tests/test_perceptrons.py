"""Perceptrons: their definition, their transpose, what rules ask of them, and in bad use.

What is held here of the field and the transpose is held of the path that the sizes choose and of
the eager one; the compiled one has tests of its own.
"""

import itertools
import math

import pytest
import torch
from builders import F64, assert_to_rounding, normal
from perceptron_units import (
    KINDS,
    NAIVE,
    OPTIONAL,
    naive_field,
    naive_transpose,
    random_parts,
    random_perceptrons,
)

import ipslimit
from ipslimit import AdamW, Heads, Perceptrons, Rebalance, SBOAdamW
from ipslimit.model import by_autograd, perceptrons_eager
from ipslimit.model.activations import ACTIVATIONS
from ipslimit.model.rules import input_means
from ipslimit.model.sight import Sight
from ipslimit.model.symmetry import rescale_pairs

EVERY = pytest.mark.parametrize("activation", NAIVE)


@pytest.fixture
def eager(monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", "eager")


def tokens(*lead, B=2, N=5, d=3):
    return normal(*lead, B, N, d, seed=8), normal(*lead, B, N, d, seed=9)


# --- field and transpose ------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("names", KINDS, ids="-".join)
def test_field_and_transpose_are_those_of_the_definition(eager, activation, names):
    units, (x, c) = random_perceptrons(activation=activation, names=names), tokens()
    parts = units.parts() | {"weights": units.weights}
    assert_to_rounding(units.field(x), naive_field(x, parts, activation), 64, "field")
    dx, dunits, hidden = units.vjp(x, c, with_outputs=True)
    expected, dparts, dweights, sums = naive_transpose(x, units, c)
    assert_to_rounding(dx, expected, 128, "dx")
    assert_to_rounding(dunits.weights, dweights, 128, "dweights")
    assert_to_rounding(hidden, sums, 128, "hidden")
    for name, part in dunits.parts().items():
        assert_to_rounding(part, dparts[name], 128, name)


@EVERY
def test_the_definition_of_one_unit_gives_the_same_by_autograd(activation):
    units, (x, c) = random_perceptrons((1,), activation), tokens(1)
    arguments = x, units.packed, units.weights, c, units.layout, Sight(), True, True
    for ours, theirs in zip(
        perceptrons_eager.vjp(*arguments), by_autograd.vjp(*arguments), strict=True
    ):
        assert_to_rounding(ours, theirs, 128)


@EVERY
def test_single_precision_is_the_double_one_rounded(eager, activation):
    units, (x, c) = random_perceptrons(activation=activation, H=9), tokens()
    single = units.to(torch.float32)
    (dx, dunits), (dx64, dunits64) = single.vjp(x.float(), c.float()), units.vjp(x, c)
    pairs = [
        (single.field(x.float()), units.field(x)),
        (dx, dx64),
        (dunits.packed, dunits64.packed),
        (dunits.weights, dunits64.weights),
    ]
    for ours, exact in pairs:
        assert ours.dtype == torch.float32
        assert float((ours - exact).abs().max()) <= 1e-5 * max(1.0, float(exact.abs().max()))


@pytest.mark.parametrize(
    "x_lead, lead", [((2,), ()), ((), (2,)), ((3, 1), (2,)), ((2, 1, 3), (2, 1))]
)
def test_leading_dimensions_broadcast(x_lead, lead):
    units, (x, c) = random_perceptrons(lead), tokens(*x_lead)
    whole = torch.broadcast_shapes(x_lead, lead)
    parts = {
        name: part.expand(*whole, *part.shape[len(lead) :]) for name, part in units.parts().items()
    }
    wide = Perceptrons(**parts, weights=units.weights.expand(*whole, units.count))
    wide_x, wide_c = (t.expand(*whole, *t.shape[-3:]) for t in (x, c))
    assert_to_rounding(units.field(x), wide.field(wide_x), 16)
    dx, dunits = units.vjp(x, wide_c)
    wide_dx, wide_dunits = wide.vjp(wide_x, wide_c)
    assert_to_rounding(dx, wide_dx.sum_to_size(x.shape), 64)
    assert_to_rounding(dunits.packed, wide_dunits.packed.sum_to_size(units.packed.shape), 64)
    assert_to_rounding(dunits.weights, wide_dunits.weights.sum_to_size(units.weights.shape), 64)


@EVERY
@pytest.mark.parametrize("names", [(), OPTIONAL], ids=["plain", "all"])
def test_the_transpose_is_the_derivative_that_a_taylor_expansion_finds(activation, names):
    units, (x, c) = random_perceptrons((2,), activation, names=names, seed=3), tokens(2)
    dx, dunits = units.vjp(x, c)
    moves = normal(*x.shape, seed=10), normal(*units.packed.shape, seed=11)
    weights, h = normal(*units.weights.shape, seed=12), 1e-5

    def value(t):
        packed, moved = units.packed + t * moves[1], units.weights + t * weights
        at = Perceptrons.from_packed(packed, moved, units.layout)
        return float((c * at.field(x + t * moves[0])).sum())

    slope = (dx * moves[0]).sum() + (dunits.weights * weights).sum()
    slope = slope + (dunits.packed * moves[1] * units.weights.unsqueeze(-2)).sum()
    # the third derivative at this step, and rounding over it; no kink is crossed
    assert (value(h) - value(-h)) / (2 * h) == pytest.approx(float(slope), abs=2e-7)


@EVERY
@pytest.mark.parametrize("names", [(), OPTIONAL], ids=["plain", "all"])
def test_gradients_flow_through_the_field_as_through_the_definition(eager, activation, names):
    parts = {n: t.requires_grad_() for n, t in random_parts(names=names).items()}
    x, c = tokens()
    wanted = [x.requires_grad_(), *parts.values()]
    found = Perceptrons(**parts, activation=activation).field(x)
    expected = naive_field(x, parts, activation)
    for a, b in zip(
        torch.autograd.grad(found, wanted, c), torch.autograd.grad(expected, wanted, c), strict=True
    ):
        assert_to_rounding(a, b, 128)


def test_the_derivative_of_relu_at_its_kink_is_zero():
    units, (_, c) = random_perceptrons(activation="relu", names=()), tokens()
    dx, dunits = units.vjp(torch.zeros_like(c), c)
    assert not dx.any() and not dunits.packed.any()


@EVERY
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_huge_neurons_overflow_nothing_and_nan_goes_through(activation, dtype):
    z = torch.tensor([-1e30, -200.0, -30.0, 30.0, 200.0, 1e30], dtype=dtype)
    act = ACTIVATIONS[activation]
    inner = act.inner(z)
    leaf = z.clone().requires_grad_()
    NAIVE[activation](leaf.double()).sum().backward()
    if activation == "gelu_tanh":  # torch's own derivative is 0 * inf there
        leaf.grad[0], leaf.grad[-1] = 0.0, 1.0
    assert torch.allclose(act.value(z, inner), NAIVE[activation](z.double()).to(dtype), atol=1e-12)
    found = act.pull(torch.ones_like(z), z, act.inner(z))
    assert torch.allclose(found, leaf.grad, rtol=1e-6, atol=1e-12)
    nan = torch.tensor([math.nan], dtype=dtype)
    assert act.value(nan, act.inner(nan)).isnan().all()


# --- bits ---------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("path", ["eager", "auto"])
def test_seeds_alone_have_the_bits_that_they_have_together(monkeypatch, path, dtype, activation):
    monkeypatch.setenv("IPSLIMIT_KERNEL", path)
    for B, N, H, n, d in itertools.product((1, 3), (1, 4), (1, 5), (1, 3), (1, 4)):
        units = random_perceptrons((4,), activation, dtype, H=H, n=n, d=d)
        x, c = (t.to(dtype) for t in tokens(4, B=B, N=N, d=d))
        together = units.field(x), *units.vjp(x, c, with_outputs=True)
        for alone in (slice(0, 1), slice(2, 4)):
            part = units[alone]
            found = part.field(x[alone]), *part.vjp(x[alone], c[alone], with_outputs=True)
            for a, b in zip(found, together, strict=True):
                if isinstance(a, Perceptrons):
                    assert torch.equal(a.weights, b.weights[alone])
                    a, b = a.packed, b.packed
                assert torch.equal(a, b[alone]), (B, N, H, n, d)


@pytest.mark.parametrize("path", ["eager", "auto"])
def test_threads_change_no_bit(monkeypatch, path):
    monkeypatch.setenv("IPSLIMIT_KERNEL", path)
    units, (x, c) = random_perceptrons((2,), H=40, n=16, d=8), tokens(2, B=4, N=64, d=8)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            dx, dunits = units.vjp(x, c)
            results.append((units.field(x), dx, dunits.packed, dunits.weights))
        finally:
            torch.set_num_threads(1)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# --- blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 100, 2000])
def test_blocks_change_results_by_rounding_only(eager, monkeypatch, budget):
    units, (x, c) = random_perceptrons((5,), H=7), tokens(5, B=3, N=50)

    def results():
        dx, dunits, hidden = units.vjp(x, c, with_outputs=True)
        return units.field(x), dx, dunits.packed, dunits.weights, hidden

    whole = results()
    monkeypatch.setattr(perceptrons_eager, "BUDGET", budget)
    for found, expected in zip(results(), whole, strict=True):
        assert_to_rounding(found, expected, 64)


def test_blocks_cover_everything_once_within_the_budget_and_cut_alike_for_any_rows(monkeypatch):
    sizes = dict(tokens=150, units=37, d=6, n=5)
    for budget in (1, 400, 3000, 2**18):
        monkeypatch.setattr(perceptrons_eager, "BUDGET", budget)
        cuts = perceptrons_eager.blocks(4, **sizes)
        row, token, unit = (max(b.stop - b.start for b in blocks) for blocks in cuts)
        bound = max(budget, max(6, perceptrons_eager.FEWEST) * 6)
        assert row * max(token, 6) * max(unit * 5, 6) <= bound
        for total, blocks in zip((4, 150, 37), cuts, strict=True):
            assert [i for block in blocks for i in range(total)[block]] == list(range(total))
        assert perceptrons_eager.blocks(1, **sizes)[1:] == cuts[1:]


# --- what rules ask -----------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("names", KINDS, ids="-".join)
def test_pairs_are_there_where_a_scale_passes_and_leave_the_function_as_it_is(activation, names):
    units, (x, _) = random_perceptrons(activation=activation, names=names), tokens()
    passes = activation == "relu" or "w_gate" in names
    assert len(units.layout.pairs) == passes
    scaled = rescale_pairs(units, torch.tensor([[0.5, 2.0, 8.0]] * passes, dtype=F64).view(-1, 3))
    assert torch.equal(scaled.field(x), units.field(x))
    assert torch.equal(scaled.packed, units.packed) != passes
    if not passes:  # and what would be the pair is none
        parts = {name: 2.0 * units.parts()[name] for name in ("w_in", *names) if name != "b_out"}
        parts |= {"w_out": units.w_out / 2.0}
        other = Perceptrons(**units.parts() | parts, weights=units.weights, activation=activation)
        assert float((other.field(x) - units.field(x)).abs().max()) > 1e-3


@pytest.mark.parametrize("names", [("b_in", "b_out"), OPTIONAL], ids=["plain", "gated"])
def test_balanced_units_have_equal_norms_and_the_same_function(names):
    units, (x, c) = random_perceptrons(activation="relu", names=names), tokens()
    rule = Rebalance(AdamW(1e-30), 1)
    moved, _ = rule.update(units, rule.init(units), units.vjp(x, c)[1], 1)
    assert_to_rounding(moved.field(x), units.field(x), 64)
    norms = [moved.parts()[name].flatten(1).norm(dim=1) for name in ("w_in", "w_out")]
    assert_to_rounding(norms[0], norms[1], 16)


@EVERY
@pytest.mark.parametrize("names", [("b_in", "b_out"), OPTIONAL], ids=["plain", "gated"])
def test_affine_maps_move_at_their_mean_input_by_the_bias_alone(activation, names):
    units, (x, c) = random_perceptrons(activation=activation, names=names), tokens()
    rule = SBOAdamW(0.1, eps=0.01)
    _, g, hidden = units.vjp(x, c, with_outputs=True)
    means = input_means(x, hidden, 1.0 / 10)
    moved, _ = rule.update(units, rule.init(units), g, 1, means)
    inputs = {"w_in": means[:3].mT, "w_out": means[3:].mT}
    for matrix, (bias, _) in Perceptrons.maps.items():
        dw, db = (getattr(moved, n) - getattr(units, n) for n in (matrix, bias))
        step = db + torch.einsum("hij,hj->hi", dw, inputs[matrix])
        gb = getattr(g, bias)
        assert_to_rounding(step, -0.1 * gb / (gb.abs() + 0.01), 64, matrix)


def test_a_rule_that_balances_pairs_refuses_perceptrons_that_have_none():
    with pytest.raises(ValueError, match=r"perceptrons of Rebalance.* must have symmetry pairs"):
        Rebalance(AdamW(0.1)).init(random_perceptrons(names=()))


def test_mirrored_units_have_the_opposite_field():
    units, (x, _) = random_perceptrons(), tokens()
    opposite = {name: -part for name, part in units.parts().items() if name in units.mirror}
    mirrored = Perceptrons(**units.parts() | opposite, weights=units.weights)
    assert_to_rounding(mirrored.field(x), -units.field(x), 16)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed, exception, words",
    [
        ({"activation": "elu"}, ValueError, ("activation", "gelu_tanh", "'elu'")),
        ({"activation": None}, (TypeError, ValueError), ("activation", "gelu", "None")),
        ({"w_gate": normal(3, 4, 2)}, ValueError, ("w_gate", "(3, 4, 3)", "(3, 4, 2)")),
        ({"w_out": None}, TypeError, ("w_out", "NoneType")),
        ({"w_out": normal(3, 4, 3)}, ValueError, ("w_out", "(3, 3, 4)", "(3, 4, 3)")),
        ({"b_in": normal(3, 3)}, ValueError, ("b_in", "(3, 4)", "(3, 3)")),
        ({"b_out": normal(3, 4)}, ValueError, ("b_out", "(3, 3)", "(3, 4)")),
        ({"w_in": normal(4, 3)}, ValueError, ("w_in", "H, n, d", "(4, 3)")),
        ({"b_in": normal(3, 4).float()}, TypeError, ("dtype", "b_in", "float32")),
        ({"weights": normal(2)}, ValueError, ("weights", "H=3", "(2,)")),
    ],
)
def test_what_are_no_perceptrons_is_refused_in_one_line(changed, exception, words):
    with pytest.raises(exception) as caught:
        Perceptrons(**random_parts() | changed)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, f"{word!r} is missing in: {message}"


def test_tokens_of_another_size_are_refused_with_the_size_of_the_units():
    with pytest.raises(ValueError, match=r"d=3 as in perceptrons; got \(2, 5, 4\)"):
        random_perceptrons().field(normal(2, 5, 4))


def test_perceptrons_say_what_they_are():
    units = random_perceptrons(activation="silu", names=("w_gate", "b_out"))
    assert repr(units) == (
        "Perceptrons(H=3, n=4, d=3, activation=silu, biases=b_out, float64, cpu)"
    )
    assert ipslimit.Perceptrons is Perceptrons and units.layout != Heads.make_layout(d=3, m=4)
