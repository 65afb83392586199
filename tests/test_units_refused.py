"""Families of units that do not hang together, and what units cannot do: refused by name."""

import pytest
from builders import normal
from own_units import Tanh
from test_units import random_tanh, tanh_problem

import ipslimit
from ipslimit import SGD, Rebalance, SBOAdamW, train_particles


def family(unit_field=Tanh.unit_field, **declared):
    return type("Mine", (ipslimit.Units,), {"unit_field": staticmethod(unit_field)} | declared)


DECLARED = {
    "no matrices": ({}, "got none with the size d"),
    "no size d": ({"matrices": {"w": "n n"}}, "got none with the size d"),
    "all optional": ({"matrices": {"w": "n d"}, "optional": ("w",)}, "that is always there"),
    "three sizes": ({"matrices": {"w": "n d k"}}, "got w of shape 'n d k'"),
    "bias of two sizes": ({"matrices": {"w": "n d"}, "biases": {"b": "n d"}}, "got b of shape"),
    "a taken name": ({"matrices": {"field": "n d"}}, "got field, a name that is taken"),
    "a taken size": ({"matrices": {"w": "size d"}}, "got size, a name that is taken"),
    "an unknown mirror": ({"matrices": {"w": "n d"}, "mirror": ("v",)}, "got v, which it does not"),
    "an unknown input": (
        {"matrices": {"w": "n d"}, "biases": {"b": "n"}, "maps": {"w": ("b", "y")}},
        "got y, which it does not",
    ),
}


@pytest.mark.parametrize(("declared", "reason"), DECLARED.values(), ids=DECLARED)
def test_families_that_do_not_hang_together_are_refused(declared, reason):
    with pytest.raises(TypeError, match="Mine must declare matrices") as error:
        family(**declared)
    assert reason in str(error.value) and "\n" not in str(error.value)


WRONG = {
    "sums over tokens": (lambda x, c, w: (x @ w.mT @ w).sum(0), "must return (4, 2) in"),
    "another dtype": (lambda x, c, w: (x @ w.mT @ w).float(), "in torch.float32"),
    "no derivative": (lambda x, c, w: (x @ w.mT @ w).detach(), "must be differentiable"),
    "branches": (lambda x, c, w: x if x.sum() > 0 else -x, "calling it failed: vmap: It looks"),
    "another size": (lambda x, c, w: x @ w, "for torch.func.vmap; calling it failed: "),
    "more than declared": (lambda x, c, w: (x @ w.mT @ w, x), "must return (4, 2) in"),
}


@pytest.mark.parametrize(("function", "reason"), WRONG.values(), ids=WRONG)
def test_functions_of_one_unit_that_do_not_fit_are_refused(function, reason):
    kind = family(lambda x, causal, w: function(x, causal, w), matrices={"w": "n d"})
    with pytest.raises(ValueError, match="unit_field must") as error:
        kind(w=normal(3, 5, 2)).vjp(*[normal(3, 4, 2)] * 2)
    assert reason in str(error.value) and "\n" not in str(error.value)


REFUSED = {
    "an unknown part": (lambda: Tanh(q=normal(1, 2, 2)), "must have parts w_in, w_out; got q"),
    "a part of another size": (
        lambda: Tanh(w_in=normal(1, 5, 2), w_out=normal(1, 2, 4)),
        "w_out must have shape (1, 2, 5) to fit w_in of shape (1, 5, 2) (H=1, n=5, d=2)",
    ),
    "x of another d": (lambda: random_tanh().field(normal(1, 2, 3)), "d=2 as in units"),
    "heads wanted": (
        lambda: ipslimit.attention_field(normal(1, 2, 2), random_tanh()),
        "heads must be ipslimit.Heads; got Tanh",
    ),
    "SBO without maps": (
        lambda: train_particles(tanh_problem(), SBOAdamW(0.1), 2, 2, 1, device="cpu"),
        "must have biases for it to act on; got Tanh with w_in",
    ),
    "Rebalance without pairs": (
        lambda: train_particles(tanh_problem(), Rebalance(SGD(0.1)), 2, 2, 1, device="cpu"),
        "must have symmetry pairs; got Tanh with w_in",
    ),
}


@pytest.mark.parametrize(("action", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_units_cannot_do_is_refused_by_name(action, reason):
    with pytest.raises((TypeError, ValueError)) as error:
        action()
    assert reason in str(error.value) and "\n" not in str(error.value)
