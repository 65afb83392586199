"""Rules of one's own that are what a rule must be: they train like ours."""

import dataclasses

import numpy as np
import pytest
import torch
from builders import assert_to_rounding, clipped, random_heads, small_atoms, small_problem
from contract import OWN, check_alone

from ipslimit import SGD, AdamW, Rebalance, Rule, SBOAdamW, train_particles
from ipslimit.measure.errors import bias_table
from ipslimit.model.particles import train_from
from ipslimit.model.runs import empty_run
from ipslimit.solvers import solve_limit


def train(rule, problem, depth=3, heads=4, steps=3, seeds=2, **options):
    return train_particles(problem, rule, depth, heads, steps, seeds, device="cpu", **options)


@dataclasses.dataclass
class HandAdam(Rule):
    """AdamW without decay, whose moments start as one and the same tensor."""

    lr: float

    def init(self, heads):
        zero = torch.zeros_like(heads.packed)
        return {"m": zero, "v": zero}

    def update(self, heads, state, gradient, step):
        g = gradient.packed
        m, v = 0.9 * state["m"] + 0.1 * g, 0.999 * state["v"] + 0.001 * g * g
        scale = (v / (1 - 0.999**step)).sqrt() + 1e-2
        moved = heads.packed - self.lr * m / (1 - 0.9**step) / scale
        return heads.with_packed(moved), {"m": m, "v": v}


@dataclasses.dataclass
class HeavyBall(Rule):
    """Momentum by the heads of the step before, kept as they are."""

    lr: float
    mu: float

    def init(self, heads):
        return {"before": heads.packed}

    def update(self, heads, state, gradient, step):
        theta = heads.packed
        moved = theta - self.lr * gradient.packed + self.mu * (theta - state["before"])
        return heads.with_packed(moved), {"before": theta}


@dataclasses.dataclass
class Filling(Rule):
    """Momentum that fills the dict it is given."""

    lr: float
    mu: float

    def init(self, heads):
        return {"m": heads.packed.new_zeros(*heads.lead, heads.layout.size, heads.count)}

    def update(self, heads, state, gradient, step):
        state["m"] = self.mu * state["m"] + gradient.packed
        return heads.with_packed(heads.packed - self.lr * state["m"]), state


@pytest.mark.parametrize(
    "own, ours",
    [
        (HandAdam(0.02), AdamW(0.02, eps=1e-2, weight_decay=0.0)),
        (HeavyBall(0.05, 0.8), SGD(0.05, momentum=0.8)),
        (Filling(0.05, 0.8), SGD(0.05, momentum=0.8)),
    ],
    ids=["one tensor twice", "the heads themselves", "the dict it is given"],
)
@pytest.mark.parametrize("bomb", [False, True])
def test_a_state_may_hold_any_tensors_and_trains_as_the_same_rule_written_otherwise(
    own, ours, bomb
):
    """Heads and states are written in place: a rule that keeps them must not see that."""
    problem, alive = small_problem(dtype=torch.float32 if bomb else torch.float64), [0, 1]
    heads = random_heads((3, 3), biases=("bq", "bv"), dtype=problem.dtype)
    if bomb:
        heads.packed[:, 2] *= 1e20
    runs = [
        train_from(heads, problem, rule, 4, (4,), empty_run(3, 3, range(3), 4, problem, "cpu"))
        for rule in (own, ours)
    ]
    for run in runs:
        assert run.diverged.tolist() == [False, False, bomb]
    actual, expected = (run.heads[4].packed[alive] for run in runs)
    assert float((expected - heads.packed[:, alive].transpose(0, 1)).abs().max()) > 1e-3
    assert_to_rounding(actual, expected, 1e4)  # four steps of training


@dataclasses.dataclass
class Averaged(Rule):
    """Descent along an average of gradients, with a rate that falls from step to step."""

    lr: float
    decay: float = 0.8

    def init(self, heads):
        return {"m": torch.zeros_like(heads.packed)}

    def update(self, heads, state, gradient, step):
        m = torch.lerp(gradient.packed, state["m"], self.decay)
        return heads.with_packed(heads.packed - self.lr / step**0.5 * m), {"m": m}


@dataclasses.dataclass
class AMSGrad(Rule):
    lr: float

    def init(self, heads):
        return {name: torch.zeros_like(heads.packed) for name in ("m", "v", "largest")}

    def update(self, heads, state, gradient, step):
        g = gradient.packed
        m, v = torch.lerp(g, state["m"], 0.9), torch.lerp(g * g, state["v"], 0.99)
        largest = torch.maximum(state["largest"], v)
        moved = heads.packed - self.lr * m / (largest.sqrt() + 1e-2)
        return heads.with_packed(moved), {"m": m, "v": v, "largest": largest}


@dataclasses.dataclass
class Orthogonal(Rule):
    """Muon's idea: the gradient of every matrix of a head made orthogonal, by iteration."""

    lr: float

    def init(self, heads):
        return {"count": torch.zeros(*heads.lead, dtype=torch.int64, device=heads.device)}

    def update(self, heads, state, gradient, step):
        parts = dict(gradient.parts())
        for name in "qkvo":
            x = parts[name] / (parts[name].norm(dim=(-1, -2), keepdim=True) + 1e-12)
            for _ in range(5):
                x = 1.5 * x - 0.5 * x @ x.mT @ x
            parts[name] = x
        moved = heads.packed - self.lr * heads.layout.pack(parts)
        return heads.with_packed(moved), {"count": state["count"] + 1}


class Warm(AdamW):
    """A subclass that changes what its parent is given."""

    def update(self, heads, state, gradient, step):
        g = gradient.map(lambda t: t * min(1.0, step / 3))
        return super().update(heads, state, g, step)


class Undecayed(SBOAdamW):
    """A subclass with other numbers."""

    def numbers(self, step):
        return super().numbers(step) | {"decay": 1.0}


GOOD = {
    "documentation": OWN["own"](0.02),
    "documentation of formulas": OWN["own elementwise"](0.02),
    "average": Averaged(0.05),
    "amsgrad": AMSGrad(0.02),
    "orthogonal": Orthogonal(0.02),
    "warm": Warm(0.02, eps=0.01),
    "clip of every head": clipped(SGD(0.1), dim=-2),
    "clip of every head, AdamW": clipped(AdamW(0.02, eps=0.01), dim=-2),
    "rebalanced": Rebalance(type("Plain", (AdamW,), {"update": AdamW.update})(0.02), every=2),
    "means": Undecayed(0.02, centre="ema"),
}
BIASED = small_problem(small_atoms(biases=("bq", "bk", "bv", "bo")))


@pytest.mark.parametrize("case", GOOD)
def test_a_fit_rule_gives_a_seed_the_same_alone_and_among_others(case):
    check_alone(BIASED, GOOD[case], "fused", 4)


@pytest.mark.parametrize("case", ["clip of every head", "average", "amsgrad", "warm"])
def test_a_fit_rule_comes_to_its_limit_as_one_over_L(case):
    """What a clip over everything does not do: its distance from the limit stays."""
    limit = solve_limit(BIASED, GOOD[case], 3, 1e-6, device="cpu")
    errors = []
    for depth in (8, 32):
        whole = train(GOOD[case], BIASED, depth, None, seeds=1)
        errors.append([r["error"] for r in bias_table(whole, limit) if r["variable"] in "xp"])
    ratios = np.array(errors[0]) / np.array(errors[1])
    assert (3.5 < ratios).all() and (ratios < 4.5).all()


def test_the_rules_in_the_documentation_are_what_they_say():
    heads, g = random_heads(), random_heads(seed=1)
    rule = OWN["own elementwise"](0.1, beta=0.5)
    moved, state = rule.update(heads, rule.init(heads), g, 1)
    assert torch.equal(state["m"], 0.5 * g.packed)
    assert torch.equal(moved.packed, heads.packed - 0.1 * g.packed.sign())
    rule = OWN["own"](0.1)
    moved, _ = rule.update(heads, rule.init(heads), g, 1)
    assert_to_rounding(moved.packed, heads.packed - 0.1 * g.packed / (1 + g.packed.norm(dim=0)), 10)
