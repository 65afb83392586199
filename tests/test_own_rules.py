"""Rules of one's own: tried before they train, and refused with the reason."""

import dataclasses
import re
from typing import ClassVar

import numpy as np
import pytest
import torch
from builders import clipped, random_heads, small_atoms, small_problem

from ipslimit import SGD, AdamW, Heads, Rebalance, Rule, train_particles
from ipslimit.measure.errors import bias_table
from ipslimit.model.particles import train_from
from ipslimit.model.rules import trial
from ipslimit.model.runs import empty_run
from ipslimit.solvers import solve_limit


def train(rule, problem=None, depth=3, heads=4, steps=3, seeds=2, **options):
    problem = small_problem() if problem is None else problem
    return train_particles(problem, rule, depth, heads, steps, seeds, device="cpu", **options)


class Stateless(Rule):
    """theta - lr direction(g, theta): what most rules below have in common."""

    def init(self, heads):
        return {}

    def update(self, heads, state, gradient, step):
        moved = heads.packed - 0.1 * self.direction(gradient.packed, heads, step)
        return heads.with_packed(moved), state


def rule_of(direction, base=Stateless, **methods):
    """An instance of a new class, with this direction and other methods of its own."""
    methods |= {"direction": lambda self, g, heads, step: direction(g, heads, step)}
    return type("Own", (base,), methods)()


def momentum(update, init=lambda self, heads: {"m": torch.zeros_like(heads.packed)}):
    return type("Own", (Rule,), {"init": init, "update": update})()


def fallen(heads, state, gradient):
    """One step of gradient descent with what is in `state` for the new state."""
    return heads.with_packed(heads.packed - 0.1 * gradient.packed), state


class Counting(SGD):
    calls = 0

    def update(self, *arguments):
        self.calls += 1
        return super().update(*arguments)


class Cooling(SGD):
    def update(self, heads, state, gradient, step):
        self.lr = 0.1 / step
        return super().update(heads, state, gradient, step)


class Remembering(SGD):
    """Momentum in an attribute of the class instead of the state."""

    hidden: ClassVar[list] = []

    def update(self, heads, state, gradient, step):
        last = self.hidden[-1] if self.hidden else 0.0
        self.hidden[:] = [float(gradient.packed.mean())]
        moved, state = super().update(heads, state, gradient, step)
        return moved.with_packed(moved.packed - 0.1 * last), state


MEMORY = []


def remembered(g, heads, step):
    MEMORY.append(1.0)
    return g * len(MEMORY)


def drawn(g, heads, step):
    return g * (torch.rand_like(g) < 0.9)


def drawn_by_numpy(g, heads, step):
    return g * float(np.random.rand())


def seeded(g, heads, step):
    torch.manual_seed(step)
    return g * torch.rand(1, dtype=g.dtype)


def noisy(g, heads, step):
    generator = torch.Generator().manual_seed(step)
    return g + torch.randn(g.shape, generator=generator, dtype=torch.float64).to(g)


def skipped(g, heads, step):
    return g if torch.isfinite(g).all() else torch.zeros_like(g)


def stopped(g, heads, step):
    """No step, nor decay, where the gradient has become small."""
    return g + heads.packed if g.norm() > 1e-6 else torch.zeros_like(g)


def zero(g, heads, step):
    return g + heads.packed if (g != 0).all() else heads.packed


def every_tenth(g, heads, step):
    return g - g.mean(-1, keepdim=True) if step % 10 == 0 else g


def late(g, heads, step):
    return g / g.norm() if step > 22 else g


def paired(g, heads, step):
    """Of two seeds together, the first sees the second."""
    return g + (torch.arange(len(g)).to(g)[:, None, None] % 2 == 0) * g.roll(-1, 0) * (len(g) > 1)


class Alarmed(Stateless):
    alarm = False

    def direction(self, g, heads, step):
        self.alarm = not bool(torch.isfinite(g).all())
        return g


def grown(update):
    return lambda self, heads, state, gradient, step: update(heads, state, gradient)


HEADS = r"act on every head by itself; got .* step of a head changes by [\d.e-]+ of .* beside it"
ROWS = "act on every seed, layer and depth node by itself; got .* others stacked beside it"
ANY = "act on every head, seed, layer and depth node by itself; got .* others beside it"
PLACE = "leave what it is given unchanged; got .* works in place"
SELF = "not change itself; got .*, whose {} was .* and is .* after it was called"
CALLED = r"be callable as update\(heads, state, gradient, step\)"
# What is wrong with a rule, and what it is told.
BAD = {
    "clipped AdamW": (clipped(AdamW(0.02)), HEADS),
    "clipped SGD": (clipped(SGD(0.1)), HEADS),
    "clip inside Rebalance": (Rebalance(clipped(AdamW(0.02)), every=2), HEADS),
    "clip over the heads of a layer": (clipped(SGD(0.1), dim=(-1, -2)), HEADS),
    "clip over the seeds": (clipped(SGD(0.1), dim=(0, -2)), ROWS),
    "mean over heads": (rule_of(lambda g, heads, k: g - g.mean(-1, keepdim=True)), HEADS),
    "heads that were before": (rule_of(lambda g, heads, k: g.cumsum(-1)), HEADS),
    "largest of all": (rule_of(lambda g, heads, k: g / g.abs().max()), HEADS),
    "count of heads": (rule_of(lambda g, heads, k: g / heads.count), HEADS),
    "stop": (rule_of(stopped), ANY),
    "some zero": (rule_of(zero), HEADS),
    "every tenth step": (rule_of(every_tenth), ANY + ".* at step 10"),
    "after a warm-up": (rule_of(late), HEADS),
    "mean over seeds": (rule_of(lambda g, heads, k: g - g.mean(0)), ROWS),
    "size of the batch": (rule_of(lambda g, heads, k: g / heads.lead.numel()), ROWS),
    "place in the batch": (
        rule_of(lambda g, heads, k: g * torch.arange(len(g)).to(g)[:, None, None]),
        ROWS,
    ),
    "pairs of seeds": (rule_of(paired), ROWS),
    "dimensions from the front": (
        momentum(
            grown(lambda h, s, g: fallen(h, s, g.with_packed(g.packed * s["m"]))),
            lambda self, h: {"m": h.packed.norm(dim=1, keepdim=True).expand_as(h.packed)},
        ),
        ROWS,
    ),
    "weights": (
        rule_of(lambda g, heads, k: g * heads.weights[..., None, :]),
        "not look at the weights",
    ),
    "dropout": (rule_of(drawn), "leave the global generators of random numbers alone"),
    "numpy's numbers": (rule_of(drawn_by_numpy), "leave the global generators"),
    "a seed of its own": (rule_of(seeded), "leave the global generators"),
    "noise by place": (rule_of(noisy), HEADS),
    "a global": (rule_of(remembered), "give one answer .* whose second answer differs by"),
    "sets lr": (Cooling(0.1), SELF.format("lr")),
    "counts": (Counting(0.1), SELF.format("calls")),
    "remembers itself": (Remembering(0.1), SELF.format("hidden")),
    "remembers what diverged": (Alarmed(), SELF.format("alarm")),
    "all stop with one": (rule_of(skipped), "let a seed that diverged harm no other"),
    "raises with one": (
        rule_of(lambda g, heads, k: g if torch.isfinite(g).all() else 1 / 0),
        CALLED + ".* failed where a seed is not finite: ZeroDivisionError",
    ),
    "gradient in place": (rule_of(lambda g, heads, k: g.clamp_(-1, 1)), PLACE),
    "heads in place": (
        momentum(grown(lambda h, s, g: (h.with_packed(h.packed.sub_(g.packed)), s))),
        PLACE,
    ),
    "state in place": (
        momentum(grown(lambda h, s, g: fallen(h, {"m": s["m"].add_(g.packed)}, g))),
        PLACE,
    ),
    "loses state": (
        momentum(grown(lambda h, s, g: fallen(h, {}, g))),
        r"keep the names of .* \['m'\]",
    ),
    "new state": (
        momentum(grown(lambda h, s, g: fallen(h, s | {"n": s["m"]}, g))),
        "keep the names",
    ),
    "another dtype": (
        rule_of(
            lambda g, heads, k: g.float(),
            update=lambda self, h, s, g, k: (h.with_packed(h.packed.float()), s),
        ),
        "leave the form of packed as it is, float64",
    ),
    "a gradient's graph": (
        rule_of(lambda g, heads, k: g * torch.ones(1, dtype=g.dtype, requires_grad=True)),
        "leave the form of packed as it is.* with a gradient",
    ),
    "own weights": (
        momentum(grown(lambda h, s, g: (Heads(h.q, h.k, h.v, h.o, None, h.bq, h.bk, h.bv), s))),
        "return heads with the weights and layout of those given",
    ),
    "no state back": (
        momentum(grown(lambda h, s, g: h)),
        r"return \(heads, state\); got .* which gave Heads",
    ),
    "half a rule of ours": (
        type("Own", (SGD,), {"__init__": lambda self: None, "momentum": 0.5})(),
        CALLED + ".* failed of shape .*: AttributeError: 'Numbers' object has no attribute 'lr'",
    ),
    "rounds by batch": (
        rule_of(lambda g, heads, k: (g.float() / g.float().norm(dim=-2, keepdim=True)).double()),
        HEADS + ".* in their dtype",
    ),
    "one argument less": (momentum(lambda self, heads, state, gradient: None), CALLED),
    "state of no heads": (
        momentum(grown(fallen), lambda self, heads: {"m": torch.zeros(())}),
        "make a state of",
    ),
    "state that is none": (momentum(grown(fallen), lambda self, heads: None), "make a state of"),
    "only without leading dimensions": (
        rule_of(lambda g, heads, k: g.reshape(heads.layout.size, heads.count)),
        CALLED,
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_rule_that_is_not_one_map_of_every_head_is_refused_with_the_reason(case):
    rule, reason = BAD[case]
    problem = small_problem()
    numbers = torch.get_rng_state(), np.random.get_state()[1].copy()
    for start in (
        lambda: train(rule, problem, steps=25),
        lambda: solve_limit(problem, rule, 25, 1e-2, device="cpu"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^rule must {reason}") as caught:
            start()
        assert "\n" not in str(caught.value)
        assert re.search(
            r"Own|Alarmed|Clipped|Cooling|Counting|Remembering|Rebalance", str(caught.value)
        )
    assert torch.equal(numbers[0], torch.get_rng_state())
    assert (numbers[1] == np.random.get_state()[1]).all()


def test_a_clip_over_everything_does_train_otherwise_among_other_seeds_and_stays_off_its_limit(
    monkeypatch,
):
    """What the trial is for: without it both runs say ok."""
    for module in ("ipslimit.model.particles", "ipslimit.solvers.limit"):
        monkeypatch.setattr(f"{module}.require_rule", lambda *arguments: None)
    rule = BAD["clipped AdamW"][0]
    alone, among = (train(rule, steps=5, seeds=seeds) for seeds in (1, 4))
    assert alone.status == among.status == "ok"
    assert abs(float(alone.loss[0, 5] - among.loss[0, 5])) > 1e-3
    rule, problem = BAD["clipped SGD"][0], small_problem()
    limit = solve_limit(problem, rule, 3, 1e-2, device="cpu")
    wholes = [train(rule, problem, depth, None, seeds=1) for depth in (8, 64)]
    errors = [bias_table(whole, limit)[0]["error"] for whole in wholes]
    assert errors[1] > 0.8 * errors[0]  # an eighth of it, were it a bias


def test_a_rule_is_tried_in_the_dtype_it_will_train_in():
    wide = rule_of(lambda g, heads, k: g * torch.ones(1, dtype=torch.float64))
    assert train(wide).status == "ok"
    with pytest.raises(TypeError, match=r"leave the form of packed as it is, float32 .* float64"):
        train(wide, small_problem(dtype=torch.float32))


def test_training_from_given_heads_tries_the_rule_too():
    heads, problem = random_heads((2, 1), biases=("bq", "bv")), small_problem()
    run = empty_run(2, 3, (0,), 1, problem, "cpu")
    with pytest.raises(ValueError, match=f"^rule must {HEADS}"):
        train_from(heads, problem, BAD["clipped SGD"][0], 1, (1,), run)


def test_nothing_is_tried_where_nothing_is_trained():
    assert train(BAD["clipped SGD"][0], steps=0).status == "ok"


# --- when it is tried --------------------------------------------------------------------------


@dataclasses.dataclass
class Watched(Rule):
    lr: float
    calls: list = dataclasses.field(default_factory=list, compare=False)
    direction: object = dataclasses.field(default=None)

    def init(self, heads):
        return {}

    def update(self, heads, state, gradient, step):
        self.calls.append(step)
        return heads.with_packed(heads.packed - self.lr * gradient.packed), state


def trials(rule, **options):
    """Whether the rule was tried before it trained one layer."""
    rule.calls.clear()
    steps = options.get("steps", 3)
    train(rule, depth=1, **options)
    return len(rule.calls) > steps


def test_a_rule_is_tried_once_and_again_where_something_is_new():
    trial._tried.clear()
    rule = Watched(0.1)
    assert trials(rule)
    assert not trials(rule) and not trials(Watched(0.1)) and not trials(rule, seeds=3)
    rule.lr = 0.2
    assert trials(rule) and not trials(rule)
    assert trials(rule, steps=4)  # a rule may do something at its fourth step
    assert trials(rule, problem=small_problem(dtype=torch.float32))
    assert trials(rule, problem=small_problem(small_atoms(biases=())))
    nameless = Watched(0.1, direction=lambda g: g)
    assert trials(nameless) and trials(nameless)  # nothing says that it is still the same


def test_a_class_whose_update_is_replaced_is_tried_again():
    class Mended(Stateless):
        def direction(self, g, heads, step):
            return g

    train(Mended())
    whole = Mended.update
    Mended.update = clipped(Mended()).update.__func__
    with pytest.raises(ValueError, match=f"^rule must {HEADS}"):
        train(Mended())
    Mended.update = whole
    train(Mended())


def test_what_is_remembered_of_trials_stays_small():
    trial._tried.clear()
    for lr in range(trial.MOST_TRIED + 3):
        trial._tried.add(lr)
    train(Watched(0.3))
    assert len(trial._tried) == 1
