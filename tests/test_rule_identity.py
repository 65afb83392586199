"""Which rule it is: told by its class and its fields, exactly."""

import dataclasses
import enum
import functools
import math
import pickle

import numpy as np
import pytest
import torch
from builders import small_atoms, small_problem, with_attributes

from ipslimit import SGD, AdamW, BlockAdamW, Rebalance, Rule, SBOAdamW, train_particles
from ipslimit.measure.errors import bias_table, error_table, weak_table
from ipslimit.measure.fluctuation import predict_fluctuation
from ipslimit.model.rules.identity import NAMELESS, class_name, rule_text
from ipslimit.solvers import solve_limit


class Descent(Rule):
    """The least that a rule can be."""

    def init(self, heads):
        return {}

    def update(self, heads, state, gradient, step):
        return heads.with_packed(heads.packed - 0.1 * gradient.packed), state


@dataclasses.dataclass
class Holding(Descent):
    """Holds anything."""

    value: object = None
    kept: object = dataclasses.field(default=None, compare=False)

    @functools.cached_property
    def follows(self):
        return [self.value]


@dataclasses.dataclass
class Cosine:
    peak: float
    total: int
    of: object = None

    def __call__(self, step):
        return self.peak * math.cos(step / self.total)


@dataclasses.dataclass
class Cosine2(Cosine):
    pass


class Classwise(Descent):
    lr = 0.1
    plan = Cosine(0.1, 10)
    names = property(lambda self: "not held")


class Plainly(Descent):
    """Not a dataclass: what it holds is what it sets."""

    def __init__(self, lr):
        self.rate = lr


class Kind(enum.Enum):
    A = 1
    B = 2


class Mute(SGD):
    def __repr__(self):
        return "SGD(lr=0.1, momentum=0, weight_decay=0)"


def local(lr=0.1):
    class Local(Descent):
        pass

    own = Local()
    own.lr = lr
    return own


NEXT = math.nextafter(0.1, 1.0)
DIFFERENT = {
    "the last bit": (SGD(0.1), SGD(NEXT)),
    "the last bit in a pair": (AdamW(betas=(0.9, 0.1)), AdamW(betas=(0.9, NEXT))),
    "class": (AdamW(), BlockAdamW()),
    "subclass": (AdamW(), type("AdamW", (AdamW,), {})()),
    "repr of another": (SGD(0.1), Mute(0.1)),
    "module": tuple(type("Own", (SGD,), {"__module__": name})(0.1) for name in "ab"),
    "defined again": (local(), local()),
    "attribute set later": (Descent(), with_attributes(Descent(), warmup=10)),
    "attribute of a rule of ours": (SGD(0.1), with_attributes(SGD(0.1), warmup=10)),
    "attribute of another name": (Plainly(0.1), Plainly(0.2)),
    "inner rule": (Rebalance(SGD(0.1)), Rebalance(SGD(0.2))),
    "bool": (BlockAdamW(mean=True), BlockAdamW(mean=False)),
    "bool and number": (Holding(True), Holding(1)),
    "text and number": (Holding("1"), Holding(1)),
    "sign of zero": (Holding(0.0), Holding(-0.0)),
    "schedule": (Holding(Cosine(0.1, 10)), Holding(Cosine(0.1, 20))),
    "class of schedule": (Holding(Cosine(0.1, 10)), Holding(Cosine2(0.1, 10))),
    "depth": (Holding({"q": [Cosine(0.1, 10)]}), Holding({"q": [Cosine(0.1, 11)]})),
    "list and tuple": (Holding([1]), Holding((1,))),
    "enum": (Holding(Kind.A), Holding(Kind.B)),
    "tensor": (Holding(torch.ones(2)), Holding(torch.tensor([1.0, 1.0 + 2**-23]))),
    "dtype of tensor": (Holding(torch.ones(2)), Holding(torch.ones(2).double())),
    "shape of tensor": (Holding(torch.ones(2, 1)), Holding(torch.ones(1, 2))),
    "array": (Holding(np.zeros(2)), Holding(np.array([0.0, -0.0]))),
    "class as a value": (Holding(SGD), Holding(AdamW)),
}
SAME = {
    "ours": (AdamW(0.02, (0.9, 0.99)), AdamW(lr=0.02, betas=[0.9, 0.99])),
    "numbers of numpy": (SGD(0.5), SGD(np.float64(0.5))),
    "whole numbers": (Holding(1), Holding(1.0)),
    "order of a dict": (Holding({"a": 1, "b": 2}), Holding({"b": 2, "a": 1})),
    "set": (Holding({"a", "b", "c"}), Holding({"c", "b", "a"})),
    "schedule": (Holding(Cosine(0.1, 10)), Holding(Cosine(0.1, 10))),
    "tensor": (Holding(torch.ones(4)), Holding(torch.ones(8)[::2])),
    "nan": (Holding(math.nan), Holding(math.nan)),
    "not compared": (Holding(1, kept=print), Holding(1, kept=len)),
    "plain class": (Plainly(0.1), Plainly(0.1)),
    "rebalanced": (Rebalance(Plainly(0.1)), Rebalance(Plainly(0.1))),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_rules_that_may_differ_have_different_texts(case):
    texts = {rule_text(rule) for rule in DIFFERENT[case]}
    assert len(texts) == 2 and not any(text.startswith(NAMELESS) for text in texts)


@pytest.mark.parametrize("case", SAME)
def test_equal_rules_have_equal_texts(case):
    first, second = map(rule_text, SAME[case])
    assert first == second and not first.startswith(NAMELESS)


def test_a_class_that_gives_values_to_its_rules_tells_them(monkeypatch):
    before = rule_text(Classwise())
    for name, value in {"lr": 0.2, "plan": Cosine(0.1, 11)}.items():
        with monkeypatch.context() as patch:
            patch.setattr(Classwise, name, value)
            assert rule_text(Classwise()) != before
    plan = f"{__name__}.Cosine(peak=0.1, total=10, of=None)"
    assert rule_text(Classwise()) == before == f"{__name__}.Classwise(lr=0.1, plan={plan})"


def test_texts_stay_readable_and_as_they_were():
    assert (
        rule_text(AdamW(0.02))
        == repr(AdamW(0.02))
        == ("AdamW(lr=0.02, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01)")
    )
    assert rule_text(Rebalance(SGD(0.1), every=3)) == (
        "Rebalance(rule=SGD(lr=0.1, momentum=0, weight_decay=0), every=3, damping=1)"
    )
    assert repr(SBOAdamW()).endswith("centre='batch', centre_decay=0.99, transport=False)")
    assert rule_text(Holding(Cosine(0.1, 10))) == (
        f"{__name__}.Holding(value={__name__}.Cosine(peak=0.1, total=10, of=None))"
    )
    assert repr(Plainly(0.1)) == "Plainly(rate=0.1)"
    first, second = local(), local()
    names = [class_name(type(rule)) for rule in (second, first, second)]  # in order of asking
    assert names[0] == names[2] and names[1] != names[0]
    assert names[1].rpartition("#")[2].isdigit()
    rule = Holding(2)
    assert rule.follows == [2] and rule_text(rule) == rule_text(Holding(2))  # kept, not held
    rule.value = rule
    assert rule_text(rule).startswith(NAMELESS)
    assert pickle.loads(pickle.dumps(rule_text(AdamW()))) == rule_text(AdamW())


NAMELESS_CASES = {
    "lambda": (Holding(lambda k: 0.1), "value of Holding is a function"),
    "function": (Plainly(math.cos), "rate of Plainly is a function"),
    "inside a schedule": (Holding(Cosine(0.1, 10, len)), "of of value of Holding is a function"),
    "inside another rule": (Rebalance(Plainly(print)), "rate of rule of Rebalance is a function"),
    "in a list": (Holding([1, print]), "value of Holding is a function"),
    "generator": (Holding(torch.Generator()), "value of Holding is a Generator"),
    "objects in an array": (Holding(np.array([{}])), "value of Holding is a ndarray"),
    "a patched method": (with_attributes(SGD(0.1), update=SGD(0.1).update), "update of SGD is"),
}


@pytest.mark.parametrize("case", NAMELESS_CASES)
def test_a_rule_without_an_identity_trains_and_is_compared_with_nothing(case):
    rule, reason = NAMELESS_CASES[case]
    problem = small_problem(small_atoms(equal=True))
    whole = train_particles(problem, rule, 3, None, 1, device="cpu")
    run = train_particles(problem, rule, 3, 2, 1, device="cpu")
    limit = solve_limit(problem, rule, 1, 1e-2, device="cpu")
    known = solve_limit(problem, SGD(0.1), 1, 1e-2, device="cpu")
    assert whole.rule == run.rule == limit.rule == rule_text(rule)
    assert limit.rule.startswith(f"{NAMELESS}{reason}")
    for name, compare in {
        "whole": lambda: bias_table(whole, limit),
        "run": lambda: error_table(run, whole, known),
        "run ": lambda: predict_fluctuation(problem, rule, run),
        "rule": lambda: train_particles(problem, rule, 2, 2, 1, device="cpu", group=object()),
    }.items():
        with pytest.raises(
            ValueError, match=f"^{name.strip()}.* fields .*; got one where {reason}"
        ):
            compare()


@pytest.fixture(scope="module")
def study():
    problem = small_problem(small_atoms(equal=True))
    rule = Holding(Cosine(0.1, 10))
    whole = train_particles(problem, rule, 3, None, 1, device="cpu")
    run = train_particles(problem, rule, 3, 2, 1, 2, device="cpu")
    return problem, rule, run, whole, solve_limit(problem, rule, 1, 1e-2, device="cpu")


def test_runs_of_equal_rules_are_compared(study):
    problem, _, run, whole, limit = study
    again = Holding(Cosine(0.1, 10))
    assert error_table(run, whole, limit) and weak_table(run, limit, limit.loss)
    assert bias_table(train_particles(problem, again, 3, None, 1, device="cpu"), limit)
    assert predict_fluctuation(problem, again, run).x
    limit = solve_limit(problem, again, 1, 1e-2, device="cpu")
    assert bias_table(whole, limit)


def test_a_run_is_not_compared_with_another_rule(study):
    """As a subclass with a schedule inside, of which `repr` says nothing."""
    problem, _, run, whole, limit = study
    other = Holding(Cosine(0.1, 11))
    other_whole = train_particles(problem, other, 3, None, 1, device="cpu")
    other_limit = solve_limit(problem, other, 1, 1e-2, device="cpu")
    said = "must be the rule that trained {}, .*total=10.*; got .*total=11"
    for name, compare in {
        "whole.rule": lambda: error_table(run, other_whole, limit),
        "limit.rule": lambda: error_table(run, whole, other_limit),
        "limit.rule ": lambda: weak_table(run, other_limit, other_limit.loss),
        "rule": lambda: predict_fluctuation(problem, other, run),
    }.items():
        with pytest.raises(ValueError, match=f"^{name.strip()} {said.format('run')}"):
            compare()
    with pytest.raises(ValueError, match=f"^limit.rule {said.format('whole')}"):
        bias_table(whole, other_limit)
    again = local(), local()
    whole, other = (train_particles(problem, rule, 3, None, 1, device="cpu") for rule in again)
    with pytest.raises(ValueError, match=r"same rule in both. A class .* again \(#\) is another"):
        error_table(whole, other, limit)
