"""Learning rates: schedules as torch has them, by matrix, by depth, on every path; and refusals."""

import dataclasses
import math
import re

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
from contract import KINDS, OWN, Steeper, documented, make, train
from own_units import Relu, Tanh
from test_rules import gradients, updated

import ipslimit
from ipslimit import (
    SGD,
    AdamW,
    Clip,
    GaugeAdamW,
    LearningRate,
    Rebalance,
    SBOAdamW,
    by_depth,
    warmup_cosine,
)
from ipslimit.model.rules import RULES
from ipslimit.model.rules.identity import rule_text
from ipslimit.solvers import solve_limit

LAYOUT = random_heads().layout
SCHEDULES = [
    warmup_cosine(0.05, 4, 10),
    warmup_cosine(0.05, 4, 10, 0.01),
    warmup_cosine(0.05, 0, 12),
    warmup_cosine(0.05, 5, 5, 0.02),
]
EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
DEPTHS = torch.tensor([0.0, 0.25, 1.0], dtype=F64)
InverseRoot = documented(LearningRate, "InverseRoot")


def share(schedule, k):
    """Of the peak, at step k from 1: by the half angle."""
    w, T, floor = schedule.warmup, schedule.total, schedule.floor / schedule.peak
    if k <= w:
        return k / w
    return floor + (1 - floor) * math.cos(math.pi / 2 * (k - w) / (T - w)) ** 2 if k < T else floor


# --- over steps --------------------------------------------------------------------------------


@EVERY_SCHEDULE
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD], ids=lambda k: k.__name__)
def test_a_warm_up_and_cosine_trains_as_torch_does(schedule, kind):
    heads = random_heads((2,))
    theta = heads.packed.clone().requires_grad_()
    optimizer = kind([theta], lr=schedule.peak, weight_decay=0.2)
    # of torch's own count of steps, which starts at 0
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: share(schedule, k + 1))
    rule = {torch.optim.AdamW: AdamW, torch.optim.SGD: SGD}[kind](schedule, weight_decay=0.2)
    state = rule.init(heads)
    for step, g in enumerate(gradients(heads, 12), start=1):
        theta.grad = g.packed
        optimizer.step()
        plan.step()
        heads, state = rule.at(step, heads.layout, 0.3).update(heads, state, g, step)
        torch.testing.assert_close(heads.packed, theta.detach(), rtol=1e-12, atol=1e-12)


def test_a_warm_up_meets_its_peak_and_a_cosine_its_floor_and_both_stay_there():
    schedule = warmup_cosine(0.3, 3, 7, 0.1)
    rates = [schedule(k) for k in range(1, 10)]
    assert rates[2] == 0.3 and rates[6:] == [0.1] * 3
    assert rates[:2] == [0.3 * 1 / 3, 0.3 * 2 / 3]
    assert rates[4] == pytest.approx(0.2, rel=1e-15)  # half-way
    assert warmup_cosine(0.3, 0, 1)(1) == 0.0


def test_a_rule_with_a_number_is_the_rule_itself_and_one_with_a_schedule_is_left_as_it_is():
    for rule in (SGD(0.1), Rebalance(Clip(AdamW(0.1), 1.0)), *(kind(0.1) for kind in OWN.values())):
        assert rule.at(3, LAYOUT, 0.5) is rule and rule.at(3, LAYOUT, DEPTHS) is rule
    rule = Rebalance(Clip(AdamW(SCHEDULES[0]), 1.0))
    assert rule.at(2, LAYOUT, DEPTHS).rule.rule.lr == 0.025
    assert rule.rule.rule.lr is SCHEDULES[0]


def test_a_rule_without_a_learning_rate_of_its_own_is_itself():
    @dataclasses.dataclass
    class Plain(ipslimit.Rule):
        size: float = 0.1

        def init(self, heads):
            return {}

        def update(self, heads, state, gradient, step):
            return heads, state

    assert Plain().at(1, LAYOUT, DEPTHS).size == 0.1
    rule = Plain()
    assert rule.at(1, LAYOUT, DEPTHS) is rule


def test_a_rate_by_matrix_is_in_the_dtype_of_the_units_where_they_are_given():
    like = torch.zeros(1, dtype=torch.float32)
    rule = Rebalance(Clip(SGD(BY_MATRIX), 1.0))
    assert rule.at(1, LAYOUT, 0.5).rule.rule.lr.dtype == F64
    assert rule.at(1, LAYOUT, 0.5, like).rule.rule.lr.dtype == torch.float32


def test_schedules_of_ones_own_train_as_the_numbers_that_they_give():
    heads = random_heads()
    for lr in (InverseRoot(0.1, 2), lambda k: 0.1 * min(k / 2, (2 / k) ** 0.5)):
        moved, state, other, same = heads, {}, heads, {}
        for step, g in enumerate(gradients(heads, 4), start=1):
            moved, state = updated(SGD(lr), moved, state, g, step)
            number = 0.1 * min(step / 2, (2 / step) ** 0.5)
            other, same = updated(SGD(number), other, same, g, step)
            assert torch.equal(moved.packed, other.packed)


# --- by matrix ---------------------------------------------------------------------------------

BY_MATRIX = {"q": 0.01, "o": 0.04, "bo": 0.02, "default": 0.03}
# of the parts in storage order, where a bias has that of its map's matrix
EACH = {"q": 0.01, "k": 0.03, "v": 0.03, "o": 0.04, "bq": 0.01, "bk": 0.03, "bv": 0.03, "bo": 0.02}


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_rates_by_matrix_are_parameter_groups(name):
    heads = random_heads((2,))
    parts = {n: t.clone().requires_grad_() for n, t in heads.parts().items()}
    groups = [{"params": [t], "lr": EACH[n]} for n, t in parts.items()]
    optimizer = getattr(torch.optim, name)(groups, weight_decay=0.2)
    rule = getattr(ipslimit, name)(BY_MATRIX, weight_decay=0.2)
    state = rule.init(heads)
    for step, g in enumerate(gradients(heads, 12), start=1):
        for n, t in g.parts().items():
            parts[n].grad = t.clone()
        optimizer.step()
        heads, state = rule.at(step, heads.layout, 0.3).update(heads, state, g, step)
    for n, t in heads.parts().items():
        torch.testing.assert_close(t, parts[n].detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
# each by itself, which biases are not in SBOAdamW, nor the two of a pair in GaugeAdamW
@pytest.mark.parametrize("kind", [k for k in RULES.values() if k not in (SBOAdamW, GaugeAdamW)])
def test_every_block_moves_as_by_a_rule_with_its_rate_alone(kind, dtype):
    heads = random_heads((2,), dtype=dtype)
    options = {"weight_decay": 0.2, "eps": 0.1, "momentum": 0.5}
    runs = {}
    for lr in (BY_MATRIX, *set(EACH.values())):
        rule, moved = make(kind, lr=lr, **options), heads
        state = rule.init(heads)
        for step, g in enumerate(gradients(heads, 3), start=1):
            moved, state = updated(rule, moved, state, g, step)
        runs[str(lr)] = moved.packed
    for name, rows in heads.layout.slices.items():
        assert torch.equal(runs[str(BY_MATRIX)][:, rows], runs[str(EACH[name])][:, rows]), name


def test_sbo_moves_a_matrix_by_its_rate_and_the_bias_by_its_own_and_what_undoes_the_matrix():
    heads, g = random_heads(), random_heads(seed=1)
    means = normal(heads.d + heads.m, heads.count, seed=4)
    options = {"eps": 0.1, "weight_decay": 0.2}
    rule = SBOAdamW(BY_MATRIX, **options).at(1, heads.layout, 0.0)
    moved = rule.update(heads, rule.init(heads), g, 1, means)[0]
    for affine in heads.layout.maps:
        inputs = means[affine.means].mT
        gradient = getattr(g, affine.matrix) - torch.einsum(
            "hi,hj->hij", getattr(g, affine.bias), inputs
        )
        old = getattr(heads, affine.matrix)
        lr, lr_of_bias = EACH[affine.matrix], EACH[affine.bias]
        new = (1 - 0.2 * lr) * old - lr * gradient / (gradient.abs() + 0.1)
        assert_to_rounding(getattr(moved, affine.matrix), new, 32, affine.matrix)
        b, gb = getattr(heads, affine.bias), getattr(g, affine.bias)
        shift = torch.einsum("hij,hj->hi", new - old, inputs)
        expected = b - lr_of_bias * gb / (gb.abs() + 0.1) - shift
        assert_to_rounding(getattr(moved, affine.bias), expected, 64, affine.bias)


def test_a_bias_goes_with_the_matrix_of_its_map_and_units_without_maps_need_a_default():
    relu = Relu.make_layout(("b_in", "b_out"), d=2, n=3)
    lr = SGD({"w_in": 0.1, "w_out": 0.2}).at(1, relu, 0.5).lr
    expected = [0.1] * 6 + [0.2] * 6 + [0.1] * 3 + [0.2] * 2
    assert torch.equal(lr, torch.tensor(expected, dtype=F64)[:, None])
    both = SGD({"w_in": 0.1, "w_out": by_depth(Steeper(), 0.2)}).at(1, relu, DEPTHS).lr
    assert both.shape == (3, 17, 1) and torch.equal(both[0], lr)
    assert SGD({"default": 0.1, "q": 0.2}).at(1, relu, DEPTHS).lr == 0.1  # one dict for all


# --- by depth ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RULES.values())
def test_rates_by_depth_are_those_of_each_layer_by_itself_to_the_bit(kind):
    heads, g = (random_heads((3,), seed=seed) for seed in (0, 1))
    means = (normal(3, heads.d + heads.m, heads.count, seed=4),) if kind.uses_means else ()
    for lr in (by_depth(Steeper(), warmup_cosine(0.05, 4, 10)), {"q": by_depth(Steeper())}):
        lr = lr | {"default": 0.05} if isinstance(lr, dict) else lr
        rule = make(kind, lr=lr, weight_decay=0.2, eps=0.1)
        together = rule.at(2, heads.layout, DEPTHS)
        assert together.lr.shape == ((3, heads.layout.size, 1) if "q" in str(lr)[:3] else (3, 1, 1))
        moved = together.update(heads, rule.init(heads), g, 2, *means)[0]
        for r, s in enumerate(DEPTHS.tolist()):
            alone = rule.at(2, heads.layout, s)
            some = (means[0][r],) if means else ()
            one = alone.update(heads[r], rule.init(heads[r]), g[r], 2, *some)[0]
            assert torch.equal(moved.packed[r], one.packed)
    scaled = [0.025 * (1 + 0.5 * s) for s in DEPTHS.tolist()]
    rule = SGD(by_depth(Steeper(), warmup_cosine(0.05, 4, 10)))
    assert rule.at(2, LAYOUT, DEPTHS).lr.flatten().tolist() == pytest.approx(scaled, rel=1e-15)


def test_where_all_depths_have_one_rate_it_is_a_number():
    assert SGD(by_depth(lambda s: 1.0, 0.1)).at(1, LAYOUT, DEPTHS).lr == 0.1
    assert isinstance(SGD({"default": SCHEDULES[0]}).at(1, LAYOUT, DEPTHS).lr, float)


@pytest.mark.parametrize("path", ["eager", "fused", "layers"])
def test_particles_by_depth_are_those_whose_layers_have_rules_of_their_own(path):
    """At step 1, layer r moves by (1 + r / (2 L)) times as much as by a plain rule."""
    problem = small_problem(small_atoms(biases=BIASES))
    plain = train(problem, SGD(0.1), steps=1, depth=4, path=path)
    steep = train(problem, SGD(by_depth(Steeper(), 0.1)), steps=1, depth=4, path=path)
    for r in range(4):
        step, larger = (
            run.heads[1].packed[:, r] - run.heads[0].packed[:, r] for run in (plain, steep)
        )
        assert_to_rounding(larger, (1 + r / 8) * step, 64)


def test_particles_by_depth_go_to_their_limit_like_1_over_L():
    problem, options = small_problem(small_atoms(equal=True)), {"eps": 0.1, "weight_decay": 0.0}
    rule = AdamW(by_depth(Steeper(2.0), 0.05), **options)
    limit = solve_limit(problem, rule, 2, 1e-6, device="cpu")
    assert limit.status == "converged"
    other = solve_limit(problem, AdamW(0.05, **options), 2, 1e-6, device="cpu")
    gaps = []
    for depth in (8, 16, 32):
        x = train(problem, rule, None, 1, 2, depth, record=[2]).x[2][0, -1]
        gaps.append(float((x - limit.x(2, torch.ones(1, dtype=F64))[0]).abs().max()))
    assert gaps[0] / gaps[1] == pytest.approx(2, rel=0.15) == gaps[1] / gaps[2]
    end = torch.ones(1, dtype=F64)
    assert float((other.x(2, end) - limit.x(2, end)).abs().max()) > 10 * gaps[2]


# --- identity ----------------------------------------------------------------------------------


def test_rules_tell_their_schedules_and_those_without_an_identity_say_so():
    rule = SGD({"q": by_depth(Steeper(), warmup_cosine(0.1, 2, 9)), "default": 1})
    assert (
        rule_text(rule)
        == repr(rule)
        == (
            "SGD(lr={'default': 1, 'q': by_depth(profile=contract.Steeper(slope=0.5), "
            "rate=warmup_cosine(peak=0.1, warmup=2, total=9, floor=0))}, momentum=0, "
            "weight_decay=0)"
        )
    )
    for lr, what in (
        (lambda k: 0.1, "lr of SGD is a function"),
        (by_depth(math.cos), "profile of lr of SGD is a function"),
        ({"default": math.cos}, "lr of SGD is a function"),
    ):
        assert rule_text(SGD(lr)).startswith(f"no identity: {what}")
        SGD(lr).at(1, LAYOUT, 0.5)
    given = {"default": 0.1}
    rule, _ = SGD(given), given.update(q=0.2)
    assert rule.lr == {"default": 0.1}


# --- refusals ----------------------------------------------------------------------------------


class Nan(LearningRate):
    def __call__(self, step, s):
        return 0.1 if step < 3 else math.nan


REFUSED = [
    (lambda: SGD({}), TypeError, r"lr must have names of matrices .*; got \{\}\. Pass"),
    (lambda: SGD({1: 0.1}), TypeError, "lr must have names of matrices"),
    (lambda: SGD({"q": {"q": 0.1}}), TypeError, r"lr\['q'\] must be a real number; got \{"),
    (lambda: SGD({"q": 0.0}), ValueError, r"lr\['q'\] must be a finite number in \(0, inf\)"),
    (lambda: AdamW(warmup_cosine), TypeError, "got the class warmup_cosine. Call it first"),
    (lambda: warmup_cosine(0.1, 5, 4), ValueError, "total must be at least 5; got 4"),
    (lambda: warmup_cosine(0.1, 0, 0), ValueError, "total must be at least 1"),
    (lambda: warmup_cosine(0.1, -1, 4), ValueError, "warmup must be at least 0"),
    (lambda: warmup_cosine(0.1, 1, 4, 0.2), ValueError, r"floor must be .* in \[0, 0.1\]"),
    (lambda: warmup_cosine(math.nan, 1, 4), ValueError, "peak must be a finite number"),
    (lambda: by_depth(0.1), TypeError, "profile must be a function of the depth s .*; got 0.1"),
    (lambda: by_depth(math.cos, {"q": 0.1}), TypeError, "rate must be a real number; got {'q'"),
    (lambda: at(SGD(Nan()), 3), ValueError, r"lr must be finite .*got nan at step 3, depth 0.5 of"),
    (lambda: at(SGD({"q": Nan(), "default": 1.0}), 4), ValueError, r"lr\['q'\] .* at step 4"),
    (lambda: at(SGD(lambda k: -0.1)), ValueError, "at least 0 .*; got -0.1 at step 1"),
    (lambda: at(SGD(lambda k: 10**400)), ValueError, "got inf at step 1"),
    (lambda: at(SGD(lambda k: None)), TypeError, "lr must give a real number; got None at step 1"),
    (lambda: at(SGD(lambda: 1)), TypeError, r"lr must be callable as lr\(1\); got .* TypeError: "),
    (lambda: at(SGD(lambda k: 1 / 0)), ValueError, "which failed: ZeroDivisionError"),
    (lambda: at(SGD(by_depth(lambda s: math.nan))), ValueError, "profile .* nan at depth 0.5"),
    (lambda: at(SGD({"q": 0.1})), ValueError, "lr must have a rate for k, .*got q. Add 'k', or"),
    (lambda: SGD({"w_in": 0.1, "default": 1}).require_units([LAYOUT]), ValueError, "got w_in. Co"),
    (lambda: AdamW(Nan()).numbers(1), TypeError, "lr must be a number .*rule.at.step, layout"),
    (lambda: SGD(Nan()).numbers(1), TypeError, "lr must be a number where a rule updates"),
    (lambda: run(SGD({"x": 0.1, "default": 1})), ValueError, "lr must name matrices.*; got x"),
    (lambda: run(SGD(Nan())), ValueError, "lr must be finite .*; got nan at step 3"),
    (lambda: limit_of(Rebalance(SGD({"q": 1, "o": 2}))), ValueError, "lr must have a rate for k"),
]


def at(rule, step=1):
    return rule.at(step, LAYOUT, 0.5)


def run(rule):
    return train(small_problem(), rule, steps=3)


def limit_of(rule):
    return solve_limit(small_problem(), rule, 1, 0.1, device="cpu")


@pytest.mark.parametrize("call, kind, said", REFUSED, ids=[said for *_, said in REFUSED])
def test_what_is_no_rate_is_refused_in_one_line(call, kind, said):
    with pytest.raises(kind) as refused:
        call()
    message = str(refused.value)
    assert re.search(said, message), message
    assert "\n" not in message and message.endswith(".")


def test_one_dict_may_serve_all_families_of_a_layer():
    tanh = Tanh.make_layout(d=3, n=2)
    rule = Rebalance(SGD({"w_in": 0.1, "w_out": 0.2, "default": 0.3}))
    rule.require_units([tanh, LAYOUT])
    with pytest.raises(ValueError, match=r"lr must name matrices or biases of w_in, w_out; got"):
        Rebalance(SGD({"q": 0.1, "default": 0.3})).require_units([tanh])


def test_documented_schedules_and_all_kinds_take_a_rate_of_zero_on_the_way():
    """A schedule may end at 0, where nothing moves."""
    heads = random_heads()
    for kind in KINDS.values():
        rule = make(kind, lr=warmup_cosine(0.1, 0, 1), weight_decay=0.1)
        g = next(gradients(heads))
        assert torch.equal(updated(rule, heads, rule.init(heads), g, 1)[0].packed, heads.packed)
