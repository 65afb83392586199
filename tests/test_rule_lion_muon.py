"""Lion and Muon against their definitions, and both models trained by them."""

import math

import pytest
import torch
from builders import (
    BIASES,
    F64,
    assert_to_rounding,
    normal,
    random_heads,
    small_atoms,
    small_problem,
)
from test_rules import gradients, train

from ipslimit import Lion, Muon, Rebalance, train_particles
from ipslimit.measure.fluctuation import predict_fluctuation
from ipslimit.solvers import solve_limit

RULES = [Lion(0.01), Muon(0.02), Muon(0.02, ns_steps=None), Rebalance(Muon(0.02), 2)]
EVERY_RULE = pytest.mark.parametrize("rule", RULES, ids=repr)
STEPS = 6


def biased_problem(**changed):
    return small_problem(small_atoms(biases=BIASES), **changed)


def test_lion_is_its_definition_written_as_a_loop_over_numbers():
    lr, b1, b2, wd = 0.05, 0.8, 0.95, 0.3
    heads = random_heads()
    theta, m = heads.packed.flatten().tolist(), [0.0] * heads.packed.numel()
    for g in gradients(heads, STEPS):
        for i, number in enumerate(g.packed.flatten().tolist()):
            c = b1 * m[i] + (1 - b1) * number
            theta[i] = (1 - lr * wd) * theta[i] - lr * ((c > 0) - (c < 0))
            m[i] = b2 * m[i] + (1 - b2) * number
    moved, state = train(Lion(lr, (b1, b2), wd), heads, steps=STEPS)
    assert_to_rounding(moved.packed.flatten(), torch.tensor(theta, dtype=F64), 10 * STEPS)
    assert_to_rounding(state["m"].flatten(), torch.tensor(m, dtype=F64), 10 * STEPS)
    assert Lion().betas == (0.9, 0.99)


def test_lion_moves_every_entry_by_lr_and_one_without_gradient_not_at_all():
    heads, rule = random_heads(), Lion(0.125)
    g = normal(*heads.packed.shape, seed=4)
    g[::2] = 0.0
    moved, _ = rule.update(heads, rule.init(heads), heads.with_packed(g), 1)
    assert_to_rounding(moved.packed, heads.packed - 0.125 * g.sign(), 10)


def as_matrix(part, name):
    return part.unsqueeze(-1) if name in BIASES else part


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("ns_steps", [None, 5, 1])
def test_muon_is_its_definition_by_singular_values(ns_steps, nesterov):
    """Every matrix, and every bias as a column, by itself: U p(..p(S)) V^T."""
    mu, lr, wd = 0.8, 0.05, 0.3
    heads = random_heads((2,), H=3, m=2, d=4)
    expected = {name: part.clone() for name, part in heads.parts().items()}
    averages = {name: torch.zeros_like(part) for name, part in expected.items()}
    for g in gradients(heads, STEPS):
        for name, part in expected.items():
            averages[name] = mu * averages[name] + (1 - mu) * getattr(g, name)
            u = (1 - mu) * getattr(g, name) + mu * averages[name] if nesterov else averages[name]
            left, values, right = torch.linalg.svd(as_matrix(u, name), full_matrices=False)
            values = values / values.norm(dim=-1, keepdim=True)
            for _ in range(ns_steps or 0):
                values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
            if ns_steps is None:
                values = torch.ones_like(values)
            step = left * values[..., None, :] @ right
            scale = math.sqrt(max(1.0, step.shape[-2] / step.shape[-1]))
            part.mul_(1 - lr * wd).sub_(lr * scale * step.reshape(part.shape))
    moved, _ = train(Muon(lr, mu, nesterov, wd, ns_steps), heads, steps=STEPS)
    for name, part in moved.parts().items():
        torch.testing.assert_close(part, expected[name], rtol=0, atol=1e-10)


def test_muon_is_that_of_torch_to_the_bfloat16_that_it_computes_in():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    settings = {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.3}
    heads = random_heads(H=1, m=3, d=5)
    theirs = {n: p[0].clone().requires_grad_() for n, p in heads.parts().items() if p.ndim == 3}
    optimizer = torch.optim.Muon(theirs.values(), **settings)
    for g in gradients(heads, STEPS):
        for name, parameter in theirs.items():
            parameter.grad = getattr(g, name)[0].clone()
        optimizer.step()
    mine, _ = train(Muon(**settings), heads, steps=STEPS)
    for name, parameter in theirs.items():
        moved = (getattr(mine, name)[0] - getattr(heads, name)[0]).norm()
        gap = (getattr(mine, name)[0] - parameter.detach()).norm()
        assert float(gap) < 0.02 * float(moved), name


@pytest.mark.parametrize("ns_steps", [None, 5])
def test_muon_takes_no_step_along_nothing_and_small_momenta_stay_small(ns_steps):
    heads = random_heads((2,))
    rule = Muon(0.1, ns_steps=ns_steps, eps=1e-3)
    zero = heads.with_packed(torch.zeros_like(heads.packed))
    moved, state = rule.update(heads, rule.init(heads), zero, 1)
    assert torch.equal(moved.packed, heads.packed) and (state["m"] == 0).all()
    sizes = []
    for size in (1e-12, 1e-9):
        g = heads.with_packed(size * heads.packed)
        moved, _ = Muon(0.1, ns_steps=1, eps=1e-3).update(heads, rule.init(heads), g, 1)
        sizes.append(float((moved.packed - heads.packed).norm()))
    assert sizes[1] == pytest.approx(1e3 * sizes[0], rel=1e-3) and sizes[1] < 1e-4


def test_exact_muon_leaves_a_rank_that_is_missing_alone():
    heads = random_heads(H=2, m=3, d=5, biases=())
    g = heads.map(torch.clone)
    g.q[:, 2] = g.q[:, 1]
    moved, _ = Muon(1.0, ns_steps=None).update(heads, Muon().init(heads), g, 1)
    left, values, right = torch.linalg.svd(g.q, full_matrices=False)
    expected = left[..., :2] @ right[..., :2, :]
    # what rounding leaves of the missing rank grows by 3.4445 sixteen times
    torch.testing.assert_close(heads.q - moved.q, expected, rtol=0, atol=1e-5)


def test_bad_options_are_refused_by_name():
    for rule, options, reason in (
        (Lion, {"betas": 0.9}, r"betas must be a pair .* Use betas=\(0.9, 0.99\)"),
        (Lion, {"betas": (0.9, 1.0)}, r"betas\[1\] must be a finite number in \[0, 1\)"),
        (Muon, {"momentum": 1.0}, "momentum must be a finite number in"),
        (Muon, {"ns_steps": 0}, "ns_steps must be at least 1"),
        (Muon, {"nesterov": 1}, "nesterov must be True or False"),
        (Muon, {"eps": 0.0}, "eps must be a finite number in"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{reason}") as caught:
            rule(**options)
        assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------ in both models


@EVERY_RULE
def test_both_models_train_and_the_loss_falls(rule):
    problem = biased_problem()
    run = train_particles(problem, rule, 16, None, 5, device="cpu")
    limit = solve_limit(problem, rule, 5, 1e-2, device="cpu")
    assert run.status == "ok" and limit.status in ("converged", "tolerance not reached")
    assert float(run.loss[0, 5]) < float(run.loss[0, 0])
    assert float((limit.loss - run.loss[0]).abs().max()) < 0.05 * float(limit.loss[0])


def test_the_fluctuation_of_lion_is_not_linear_and_says_so():
    problem, rule = small_problem(small_atoms(biases=BIASES)), Lion(0.05)
    run = train_particles(problem, rule, 4, 4, 3, 8, record=[0, 3], device="cpu")
    predicted = predict_fluctuation(problem, rule, run)
    assert predicted.status == "not linear" and "at step 3" in predicted.message
