"""Families of units: the default field and transpose, and a user's own family end to end."""

import dataclasses
import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import F64, assert_to_rounding, naive_field, normal, parts_of, random_heads
from own_units import Relu, Tanh, TanhLaw

import ipslimit
from ipslimit import AdamW, Atoms, Heads, Problem, Rebalance, SBOAdamW, train_particles
from ipslimit.experiments.frame import own
from ipslimit.measure.errors import bias_table, error_table
from ipslimit.measure.fluctuation import predict_fluctuation
from ipslimit.model import by_autograd
from ipslimit.model.rules import BlockAdamW, input_means
from ipslimit.model.symmetry import rescale_pairs
from ipslimit.solvers import solve_limit
from ipslimit.solvers.grid import DepthGrid
from ipslimit.solvers.march import March
from ipslimit.solvers.on_grid import train_on_grid
from ipslimit.solvers.routes import costate_adjoint, forward_dopri5

RULE = AdamW(0.05, eps=0.1)


class Defined(Heads):
    """Heads from their definition alone, by the default path."""

    def path(self, contexts, tokens):
        return by_autograd

    @staticmethod
    def unit_field(x, causal, q, k, v, o, bq=0.0, bk=0.0, bv=0.0, bo=0.0):
        logits = (x @ q.mT + bq) @ (x @ k.mT + bk).mT / math.sqrt(q.shape[-2])
        if causal:
            logits = logits.masked_fill(torch.ones_like(logits).triu(1) > 0, -math.inf)
        z = torch.softmax(logits, dim=-1) @ (x @ v.mT + bv)
        return z @ o.mT + bo, z


def random_tanh(lead=(), H=3, n=5, d=2, seed=0):
    w_in, w_out = normal(*lead, H, n, d, seed=seed), normal(*lead, H, d, n, seed=seed + 1)
    weights = normal(*lead, H, seed=seed + 2).square() + 0.1
    return Tanh(w_in=w_in, w_out=w_out, weights=weights / weights.sum(-1, keepdim=True))


def random_relu(lead=(), H=3, n=5, d=2):
    parts = {"w_in": (n, d), "w_out": (d, n), "b_in": (n,), "b_out": (d,)}
    return Relu(**{name: normal(*lead, H, *tail, seed=len(name)) for name, tail in parts.items()})


def tanh_problem(law=None, B=3, N=4):
    law = law or TanhLaw(2, 3, size=1.5)
    return Problem(normal(B, N, 2, seed=5), normal(B, 2, seed=6), law)


def tanh_atoms(M=4):
    return Atoms(random_tanh(H=M, n=3))


@functools.cache
def solved():
    """The limit of a problem with atoms at steps 0 and 1, for the tests of it."""
    problem = tanh_problem(tanh_atoms())
    return problem, solve_limit(problem, RULE, 1, 1e-6, record=[0, 1], device="cpu")


# --- the default field and transpose -------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_the_default_transpose_is_that_of_the_hand_written_kernel(lead, causal):
    heads = random_heads(lead, H=4)
    x, c = normal(*lead, 2, 5, 3, seed=8), normal(*lead, 2, 5, 3, seed=9)
    defined = Defined(**heads.parts(), weights=heads.weights)
    assert_to_rounding(defined.field(x, causal), heads.field(x, causal), 64)
    for ours, kernel in zip(
        defined.vjp(x, c, causal, with_outputs=True),
        heads.vjp(x, c, causal, with_outputs=True),
        strict=True,
    ):
        named = [ours, kernel]
        if isinstance(ours, Heads):
            named = [units.packed for units in named]
            assert_to_rounding(ours.weights, kernel.weights, 512, "weights")
        assert_to_rounding(*named, 512)


@pytest.mark.parametrize("units", [random_tanh((2,)), random_relu((2,))], ids=["tanh", "relu"])
def test_the_transpose_is_the_derivative_that_a_taylor_expansion_finds(units):
    x, c = normal(2, 3, 4, 2, seed=3), normal(2, 3, 4, 2, seed=4)
    dx, dunits = units.vjp(x, c)
    moves = normal(*x.shape, seed=10), normal(*units.packed.shape, seed=11)
    weights, h = normal(*units.weights.shape, seed=12), 1e-5

    def value(t):
        moved = units.from_packed(
            units.packed + t * moves[1], units.weights + t * weights, units.layout
        )
        return float((c * moved.field(x + t * moves[0])).sum())

    slope = (dx * moves[0]).sum() + (dunits.weights * weights).sum()
    slope = slope + (dunits.packed * moves[1] * units.weights.unsqueeze(-2)).sum()
    # the third derivative at this step, and rounding over it; kinks are nowhere near
    assert (value(h) - value(-h)) / (2 * h) == pytest.approx(float(slope), abs=1e-7)


def test_a_unit_of_weight_zero_has_the_derivative_of_any_other():
    units = random_tanh()
    x, c = normal(3, 4, 2, seed=3), normal(3, 4, 2, seed=4)
    without = units.from_packed(units.packed, torch.tensor([1.0, 0, 0]).double(), units.layout)
    assert torch.equal(without.vjp(x, c)[1].packed, units.vjp(x, c)[1].packed)


def test_gradients_flow_through_the_field_as_through_the_definition():
    parts = {n: t.clone().requires_grad_() for n, t in parts_of(random_tanh()).items()}
    x, c = normal(3, 4, 2, seed=3).requires_grad_(), normal(3, 4, 2, seed=4)
    hidden = torch.tanh(torch.einsum("hnd,btd->bhtn", parts["w_in"], x))
    naive = torch.einsum("h,hdn,bhtn->btd", parts["weights"], parts["w_out"], hidden)
    wanted = [x, *parts.values()]
    expected = torch.autograd.grad((c * naive).sum(), wanted)
    found = torch.autograd.grad((c * Tanh(**parts).field(x)).sum(), wanted)
    for a, b in zip(found, expected, strict=True):
        assert_to_rounding(a, b, 64)


def test_seeds_alone_have_the_bits_that_they_have_together():
    units, x = random_tanh((3,)), normal(3, 2, 4, 2, seed=3)
    together, (dx, dunits) = units.field(x), units.vjp(x, x)
    for i in range(3):
        alone = units[i : i + 1]
        assert torch.equal(alone.field(x[i : i + 1])[0], together[i])
        one, done = alone.vjp(x[i : i + 1], x[i : i + 1])
        assert torch.equal(one[0], dx[i]) and torch.equal(done.packed[0], dunits.packed[i])


def test_mirrored_units_have_the_opposite_field():
    for units in (random_tanh(), random_relu(), random_heads()):
        x = normal(2, 4, units.d, seed=3)
        opposite = {name: -part for name, part in units.parts().items() if name in units.mirror}
        mirrored = type(units)(**units.parts() | opposite, weights=units.weights)
        assert_to_rounding(mirrored.field(x), -units.field(x), 16)


# --- what rules ask ------------------------------------------------------------------------------


def test_declared_pairs_can_be_rescaled():
    units, x = random_relu(), normal(3, 4, 2, seed=3)
    factors = torch.tensor([[0.5, 2.0, 8.0]], dtype=F64)
    assert torch.equal(rescale_pairs(units, factors).field(x), units.field(x))


@pytest.mark.parametrize("rule", [SBOAdamW(0.1, eps=0.01), Rebalance(SBOAdamW(0.1, eps=0.01), 2)])
def test_declared_maps_move_at_their_mean_input_by_the_bias_alone(rule):
    units, x, c = random_relu(), normal(3, 4, 2, seed=3), normal(3, 4, 2, seed=4)
    if isinstance(rule, Rebalance):  # balanced already, so that it is the plain rule
        norms = [units.parts()[name].flatten(1).norm(dim=1) for name in ("w_in", "w_out")]
        units = rescale_pairs(units, (norms[1] / norms[0]).sqrt()[None])
    state = rule.init(units)
    _, g, hidden = units.vjp(x, c, with_outputs=True)
    by_hand = torch.relu(
        torch.einsum("hnd,btd->hbtn", units.w_in, x) + units.b_in[:, None, None, :]
    )
    assert_to_rounding(hidden, by_hand.sum(dim=(1, 2)), 16)
    means = input_means(x, hidden, 1.0 / 12)
    moved, _ = rule.update(units, state, g, 1, means)
    inputs = {"w_in": means[:2].mT, "w_out": means[2:].mT}
    for matrix, (bias, _) in Relu.maps.items():
        dw, db = (getattr(moved, n) - getattr(units, n) for n in (matrix, bias))
        step = db + torch.einsum("hij,hj->hi", dw, inputs[matrix])
        gb = getattr(g, bias)
        assert_to_rounding(step, -0.1 * gb / (gb.abs() + 0.01), 64, matrix)


def test_a_rule_of_ones_own_trains_units_of_ones_own():
    @dataclasses.dataclass
    class Signum(ipslimit.Rule):
        lr: float

        def init(self, heads):
            return {"m": torch.zeros_like(heads.packed)}

        def update(self, heads, state, gradient, step):
            m = torch.lerp(gradient.packed, state["m"], 0.9)
            return heads.with_packed(heads.packed - self.lr * m.sign()), {"m": m}

    run = train_particles(tanh_problem(), Signum(0.25), 2, 3, 2, record=[0, 2], device="cpu")
    moved = (run.heads[2].packed - run.heads[0].packed) / 0.25
    assert_to_rounding(moved, moved.round(), 16)
    assert set(moved.round().unique().tolist()) == {-2.0, 0.0, 2.0}


def test_block_adamw_has_a_block_for_each_matrix():
    assert BlockAdamW(0.1).init(random_tanh())["v"].shape == (2, 3)


# --- end to end ----------------------------------------------------------------------------------


def naive_training(start, problem, lr, eps, steps):
    """x, p, w_in and w_out after training (L, H) units by torch alone, and all losses."""
    w_in, w_out = (start[n].clone().requires_grad_() for n in ("w_in", "w_out"))
    depth, count = w_in.shape[:2]
    optimizer = torch.optim.AdamW(
        [w_in, w_out], lr=lr, eps=eps / (depth * count), weight_decay=0.01
    )
    losses = []
    for step in range(steps + 1):
        states = [problem.contexts.clone().requires_grad_()]
        for r in range(depth):
            hidden = torch.tanh(torch.einsum("hnd,btd->hbtn", w_in[r], states[-1]))
            branch = torch.einsum("hdn,hbtn->btd", w_out[r], hidden) / count
            states.append(states[-1] + branch / depth)
        each = (states[-1].mean(dim=1) - problem.targets).square().sum(dim=1)
        losses.append(each.mean())
        if step == steps:
            p = [problem.N * g for g in torch.autograd.grad(each.sum(), states)]
            return torch.stack(states), torch.stack(p), w_in, w_out, torch.stack(losses)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()


def all_units(units, H):
    """The parts of all H units in every layer, (L, H, ., .), of the distinct ones with weights."""
    copies = (units.weights * H).round().long()
    return {
        name: torch.stack([p.repeat_interleave(n, 0) for p, n in zip(part, copies, strict=True)])
        for name, part in units.parts().items()
    }


@pytest.mark.parametrize("law", [TanhLaw(2, 3, size=1.5), tanh_atoms()], ids=["density", "atoms"])
def test_training_is_that_of_a_naive_model(law):
    """With atoms, of all H heads: the shortcut over distinct ones is exact."""
    problem, (L, H, k) = tanh_problem(law), (3, 6, 3)
    run = train_particles(problem, RULE, L, H, k, 2, record=[0, k], device="cpu")
    for seed in range(2):
        start, ends = (all_units(run.heads[step][seed], H) for step in (0, k))
        x, p, w_in, w_out, losses = naive_training(start, problem, 0.05, 0.1, k)
        pairs = {"x": (run.x[k][seed], x), "p": (run.p[k][seed], p)}
        pairs |= {"w_in": (ends["w_in"], w_in), "w_out": (ends["w_out"], w_out)}
        pairs["loss"] = run.loss[seed], losses
        for name, (ours, theirs) in pairs.items():
            assert float((ours - theirs).detach().abs().max()) < 1e-10, name


def test_the_limit_converges_and_its_schemes_have_order_four():
    problem, limit = solved()
    assert limit.status == "converged" and limit.error <= 1e-6
    s = torch.tensor([0.0, 0.5, 1.0])

    def error(elements):
        arguments = RULE, 1, (1,), DepthGrid.uniform(elements)
        cost = {"field": 0, "vjp": 0}
        solution = train_on_grid(problem, *arguments, March(), cost, torch.device("cpu"))
        gaps = solution.x[1](s) - limit.x(1, s), solution.p[1](s) - limit.p(1, s)
        return max(float(gap.abs().max()) for gap in gaps)

    coarse, fine = error(2), error(4)
    assert 10 < coarse / fine < 26, (coarse, fine)


def test_the_limit_at_frozen_units_is_that_of_the_independent_routes():
    problem, limit = solved()
    x, _ = forward_dopri5(problem.contexts, problem.law.heads, [0.5, 1.0])
    assert float((x - limit.x(0, torch.tensor([0.5, 1.0]))).abs().max()) < limit.error
    p0, _ = costate_adjoint(
        problem.contexts, problem.law.heads, lambda x: problem.loss(x, problem.targets)
    )
    assert float((p0 - limit.p(0, 0.0)).abs().max()) < limit.error


@pytest.mark.slow
def test_bias_and_fluctuation_fall_as_the_theory_has_it_and_the_constant_is_predicted():
    problem, limit = solved()
    rows = []
    for L in (4, 8, 16):
        whole = train_particles(problem, RULE, L, None, 1, 1, record=[0, 1], device="cpu")
        run = train_particles(problem, RULE, L, 8, 1, 8, record=[0, 1], device="cpu")
        predicted = predict_fluctuation(problem, RULE, run)
        rows += bias_table(whole, limit) + error_table(run, whole, limit, predicted)

    def rms(term, L, variable="x"):
        wanted = {"step": 1, "variable": variable, "term": term, "norm": "rms", "L": L}
        found = [r["error"] for r in rows if wanted.items() <= r.items()]
        return math.sqrt(np.mean(np.square(found)))

    fits = ipslimit.fit_rates(rows, reference_error=limit.error, bootstrap=200)
    for variable in ("x", "p"):
        fit = fits.select(step=1, variable=variable, term="bias", norm="rms", size="L")[0]
        assert fit.exponent == pytest.approx(-1.0, abs=0.1), variable
    for L in (4, 8, 16):
        assert rms("residual", L) < 0.35 * rms("fluctuation", L)
        # eight seeds of a few effective numbers each
        assert 0.8 < rms("fluctuation", L) / rms("predicted", L) < 1.25
        assert rms("fluctuation", L, "theta") > 0
    assert 1.2 < rms("fluctuation", 4) / rms("fluctuation", 16) < 3.3  # 2 but for eight seeds


def test_a_density_of_ones_own_has_a_limit_with_an_estimate_of_its_quadrature():
    problem = tanh_problem(TanhLaw(2, 3, size=1.5))
    options = {"quadrature_tol": 0.2, "nodes": 32, "max_nodes": 32}
    limit = solve_limit(problem, RULE, 1, 1e-4, device="cpu", **options)
    assert limit.status == "converged" and 0.0 < limit.quadrature_error <= 0.2
    whole = train_particles(problem, RULE, 16, None, 1, 1, nodes=32, device="cpu")
    gap = float((whole.x[1][0, -1] - limit.x(1, 1.0)).abs().max())
    assert 0.0 < gap < 0.1
    with pytest.raises(ValueError, match="run must come from a law with atoms"):
        run = train_particles(problem, RULE, 2, 3, 1, 1, device="cpu")
        predict_fluctuation(problem, RULE, run)


def test_units_and_law_come_in_from_a_users_file():
    file = Path(__file__).with_name("own_units.py")
    kind = own.own_class("law", f"{file}:TanhLaw", ipslimit.Law)
    run = train_particles(tanh_problem(kind(2, 3, 1.5)), RULE, 2, 3, 1, device="cpu")
    same = train_particles(tanh_problem(), RULE, 2, 3, 1, device="cpu")
    assert torch.equal(run.x[1], same.x[1])
    assert type(run.heads[1]).__name__ == "Tanh" and type(run.heads[1]) is not Tanh


def test_the_definition_of_heads_written_out_is_the_one_tested_here():
    heads, x = random_heads(H=4), normal(2, 5, 3, seed=8)
    defined = Defined(**heads.parts(), weights=heads.weights)
    assert_to_rounding(defined.field(x, True), naive_field(x, parts_of(heads), True), 64)
