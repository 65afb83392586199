"""Which rules have a compiled form: all that are a formula, and what trains as one of ours."""

import dataclasses
import functools
import inspect
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from builders import assert_to_rounding, random_heads, small_atoms, small_problem, with_attributes

from ipslimit import SGD, AdamW, BlockAdamW, ElementwiseRule, Rebalance, SBOAdamW, train_particles
from ipslimit.cpu import rules as cpu_rules
from ipslimit.cpu.layers import CompiledLayers
from ipslimit.model.branch import Branch
from ipslimit.model.layers import Layers
from ipslimit.model.layers_chosen import make_layers
from ipslimit.model.rules import RULES
from ipslimit.model.rules.arithmetic import lerp, sign, sqrt, where
from ipslimit.model.rules.base import is_built_in


class Documented(AdamW):
    """Only says more."""

    purpose = "to be kept"

    def __init__(self, half):
        super().__init__(2 * half, eps=0.01)

    def __repr__(self):
        return "Documented"

    def notes(self, state):
        return [f"{len(state)} moments"]

    @property
    def half(self):
        return self.lr / 2


@dataclasses.dataclass
class Declared(AdamW):
    lr: float = 0.1
    betas: tuple = (0.9, 0.999)
    eps: float = 0.01
    weight_decay: float = 0.0


class Deeper(Documented):
    pass


class Double:
    """A helper of `update`, from a class that is no rule."""

    def _block_sizes(self, layout, g):
        return 4 * BlockAdamW._block_sizes(self, layout, g)


def chosen(rule, biases=("bq", "bk", "bv", "bo")):
    heads = random_heads((4, 2), H=5, biases=biases)
    return type(make_layers(Branch.alone(heads), 0.25, {}, rule, 3, 4))


KEPT = [
    (Documented(0.01), AdamW(0.02, eps=0.01)),
    (Deeper(0.01), AdamW(0.02, eps=0.01)),
    (Declared(), AdamW(0.1, eps=0.01, weight_decay=0.0)),
    (type("Own", (SBOAdamW,), {})(0.02), SBOAdamW(0.02)),
    (type("Own", (BlockAdamW,), {"more": len})(0.02, mean=True), BlockAdamW(0.02, mean=True)),
    (Rebalance(Documented(0.01), every=2), Rebalance(AdamW(0.02, eps=0.01), every=2)),
    (type("Own", (Rebalance,), {})(SGD(0.1), every=2), Rebalance(SGD(0.1), every=2)),
]


@pytest.mark.parametrize("own, ours", KEPT, ids=lambda rule: type(rule).__name__)
def test_a_subclass_that_overrides_nothing_that_matters_stays_compiled_to_the_bit(own, ours):
    assert chosen(own) is CompiledLayers and is_built_in(own)
    problem = small_problem(small_atoms(biases=("bq", "bk", "bv", "bo")))
    runs = [train_particles(problem, rule, 3, 4, 3, 2, device="cpu") for rule in (own, ours)]
    assert torch.equal(runs[0].heads[3].packed, runs[1].heads[3].packed)
    assert torch.equal(runs[0].x[3], runs[1].x[3])


def halved(self, heads, state, gradient, step):
    return SGD.update(self, heads, state, gradient.with_packed(gradient.packed / 2), step)


LOST = [
    type("Own", (SGD,), {"update": halved})(0.1),
    type("Later", (type("Own", (SGD,), {"update": halved}),), {})(0.1),
    type("Own", (BlockAdamW,), {"_block_sizes": Double._block_sizes})(0.1),
    type("Own", (Double, BlockAdamW), {})(0.1),
    type("Own", (SBOAdamW,), {"keeps_centre": True})(0.1),
    type("Own", (Rebalance,), {"is_due": lambda self, step: step == 2})(SGD(0.1)),
    with_attributes(SGD(0.1), update=functools.partial(halved, SGD(0.1))),
    Rebalance(with_attributes(SGD(0.1), update=functools.partial(halved, SGD(0.1)))),
]


@pytest.mark.parametrize("rule", LOST, ids=lambda rule: type(rule).__name__)
def test_a_rule_that_overrides_what_matters_gives_its_own_answers(rule, monkeypatch):
    assert chosen(rule) is Layers and not is_built_in(rule)
    problem = small_problem(small_atoms(biases=("bq", "bk", "bv", "bo")))
    run = train_particles(problem, rule, 3, 4, 2, 2, device="cpu")
    monkeypatch.setenv("IPSLIMIT_KERNEL", "eager")
    eager = train_particles(problem, rule, 3, 4, 2, 2, device="cpu")
    assert_to_rounding(run.heads[2].packed, eager.heads[2].packed, 1e4)


def test_a_class_of_ours_that_is_patched_is_no_longer_what_was_compiled(monkeypatch):
    class Later(SGD):
        pass

    rules = SGD(0.1), Later(0.1), Rebalance(SGD(0.1))
    assert all(chosen(rule) is CompiledLayers for rule in rules)
    with monkeypatch.context() as patch:
        patch.setattr(Later, "update", halved)
        assert [chosen(rule) for rule in rules] == [CompiledLayers, Layers, CompiledLayers]
    update = SGD.update
    monkeypatch.setattr(SGD, "update", lambda *arguments: update(*arguments))
    assert all(chosen(rule) is Layers for rule in rules)


# ------------------------------------------------------------------------ formulas of one's own


class Reader(AdamW):
    def __getattribute__(self, name):
        return 0.5 if name == "lr" else super().__getattribute__(name)


class Property(SGD):
    lr = property(lambda self: self.rate, lambda self, value: vars(self).update(rate=value / 2))


class Opened(AdamW):
    """Another start of the state, and other numbers."""

    def init(self, heads):
        return {name: torch.ones_like(heads.packed) for name in "mv"}

    def numbers(self, step):
        return super().numbers(step) | {"keep": 1.0}


def softened(x, n):
    return x / (sqrt(x * x) + n.soft)


@dataclasses.dataclass
class Soft(ElementwiseRule):
    """With a helper, all of the arithmetic, and a name for every number."""

    lr: float = 0.1
    soft: float = 0.3
    beta: float = 0.6
    slots = ("average", "last")
    state_powers: ClassVar = {"average": -1, "last": -1}

    @staticmethod
    def formula(theta, g, average, last, n):
        average = lerp(g, average, n.beta)
        along = where(g * last < 0, 0.5 * softened(average, n), softened(average, n))
        return theta - n.lr * (along + 0.1 * sign(last)), average, g


class Other(SGD):
    """The formula of a class of ours, overridden."""

    @staticmethod
    def formula(theta, g, buffer, n):
        return theta - 2 * n.lr * g, buffer


OWN = [Reader(0.1), Property(0.1), Opened(0.1), Soft(), Rebalance(Soft(), 2, 0.5), Other(0.1, 0.5)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rule", OWN, ids=lambda rule: type(rule).__name__)
def test_a_formula_of_ones_own_is_compiled_and_trains_as_on_tensors(rule, dtype, monkeypatch):
    assert chosen(rule) is CompiledLayers and not is_built_in(rule)
    problem = small_problem(small_atoms(biases=("bq", "bk", "bv", "bo")), dtype=dtype)
    run = train_particles(problem, rule, 3, 4, 3, 2, device="cpu")
    monkeypatch.setenv("IPSLIMIT_KERNEL", "eager")
    eager = train_particles(problem, rule, 3, 4, 3, 2, device="cpu")
    assert float((run.heads[3].packed - run.heads[3].packed.mean()).abs().max()) > 0.1
    assert_to_rounding(run.heads[3].packed, eager.heads[3].packed, 1e5)


def by_torch(theta, g, n):
    return theta - n.lr * torch.tanh(g)


def otherwise_for_numbers(theta, g, n):
    return theta - n.lr * (2 * g if isinstance(g, float) else g)


@pytest.mark.parametrize("formula", [by_torch, otherwise_for_numbers], ids=lambda f: f.__name__)
def test_a_formula_that_compiles_to_something_else_or_not_at_all_runs_on_tensors(formula):
    rule = type("Own", (ElementwiseRule,), {"formula": staticmethod(formula), "lr": 0.1})()
    assert chosen(rule) is Layers
    run = train_particles(small_problem(), rule, 2, 2, 1, device="cpu")
    assert run.status == "ok"


def test_rules_of_one_name_and_formulas_of_one_name_are_kept_apart():
    def descent(rate):
        class Descent(ElementwiseRule):
            @staticmethod
            def formula(theta, g, n):
                return theta - rate * g

        return Descent()

    problem = small_problem()
    for rate in (0.1, 0.2):
        rule, same = descent(rate), SGD(rate)
        assert chosen(rule) is CompiledLayers
        runs = [train_particles(problem, r, 3, 4, 2, device="cpu") for r in (rule, same)]
        assert_to_rounding(runs[0].x[2], runs[1].x[2], 100)


def test_kept_steps_are_known_by_every_file_that_they_are_compiled_from():
    for kind in RULES.values():
        loop = cpu_rules._loop(kind(0.1))
        if loop is not None:
            assert Path(inspect.getfile(getattr(loop, "py_func", loop))) in cpu_rules.STEP_SOURCES
    assert Path(inspect.getfile(sqrt)) in cpu_rules.STEP_SOURCES


def test_the_text_of_a_step_can_be_read_where_it_is_said_to_stand(monkeypatch):
    """numba asks for it when it keeps a step; Python from 3.13 on refuses what is no statement."""
    made = []
    monkeypatch.setattr(cpu_rules, "compiled_callback", lambda _, step, *a, **k: made.append(step))
    maker = cpu_rules._compiled.__wrapped__
    maker(AdamW.formula, ("lr",), (True, True), "torch.float64", True)
    lines, first = inspect.getsourcelines(made[0])
    assert lines[0] == "@functools.cache\n" and lines[1].startswith("def _compiled(")
    assert first == maker.__code__.co_firstlineno
