"""Optimizer rules: equal to torch.optim, pure, one map for all leading dimensions."""

import ast
import dataclasses
import inspect
import itertools
import textwrap

import pytest
import torch
from builders import BIASES, F64, assert_to_rounding, normal, parts_of, random_heads
from contract import EVERY_RULE

from ipslimit import SGD, AdamW, BlockAdamW, Clip, Rebalance
from ipslimit.model.rules import RULES as KINDS

STEPS = 20


def gradients(heads, steps=STEPS, scale=1.0):
    """A fixed sequence of gradients, of sizes that vary by entry and by step."""
    shape = heads.packed.shape
    spread = torch.exp(2 * normal(*shape, seed=50))
    for step in range(steps):
        g = scale * spread * (normal(*shape, seed=100 + step) + 0.3)
        yield heads.with_packed(g.to(heads.dtype))


def updated(rule, heads, state, g, step):
    """`rule.update`, with means for a rule that wants them: some that go with the gradient."""
    means = (0.1 * g.packed[..., : heads.d + heads.m, :],) if rule.uses_means else ()
    return rule.at(step, heads.layout, 0.5, heads.packed).update(heads, state, g, step, *means)


def train(rule, heads, scale=1.0, steps=STEPS):
    state = rule.init(heads)
    for k, g in enumerate(gradients(heads, steps, scale)):
        heads, state = updated(rule, heads, state, g, k + 1)
    return heads, state


def train_with_torch(make_optimizer, heads, scale=1.0):
    theta = heads.packed.clone().requires_grad_()
    optimizer = make_optimizer([theta])
    for g in gradients(heads, scale=scale):
        theta.grad = g.packed
        optimizer.step()
    return theta.detach()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
def test_sgd_is_torch_sgd(momentum, weight_decay):
    heads = random_heads((2,))
    theta = train_with_torch(
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=momentum, weight_decay=weight_decay), heads
    )
    mine, _ = train(SGD(0.1, momentum, weight_decay), heads)
    assert_to_rounding(mine.packed, theta, 10 * STEPS)  # some roundings per step


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
@pytest.mark.parametrize("eps", [1e-8, 0.1])
def test_adamw_is_torch_adamw(eps, betas, weight_decay):
    heads = random_heads((2,))
    settings = {"lr": 0.05, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    theta = train_with_torch(lambda p: torch.optim.AdamW(p, **settings), heads)
    mine, _ = train(AdamW(**settings), heads)
    assert_to_rounding(mine.packed, theta, 10 * STEPS)  # some roundings per step


def test_default_settings_are_those_of_torch():
    heads = random_heads()
    theta = train_with_torch(lambda p: torch.optim.AdamW(p), heads)
    assert_to_rounding(train(AdamW(), heads)[0].packed, theta, 10 * STEPS)


def test_eps_in_units_of_g_is_torch_adamw_on_the_raw_gradient_with_eps_over_LH():
    heads, LH = random_heads((2,)), 48
    settings = {"lr": 0.05, "betas": (0.9, 0.99), "weight_decay": 0.1}
    theta = train_with_torch(
        lambda p: torch.optim.AdamW(p, eps=0.5 / LH, **settings), heads, scale=1 / LH
    )
    mine, _ = train(AdamW(eps=0.5, **settings), heads)
    assert_to_rounding(mine.packed, theta, 10 * STEPS)
    unscaled = train_with_torch(
        lambda p: torch.optim.AdamW(p, eps=0.5, **settings), heads, scale=1 / LH
    )
    assert float((mine.packed - unscaled).abs().max()) > 0.1  # the scale does matter


@pytest.mark.parametrize("mean", [False, True])
def test_block_adamw_is_its_definition_written_as_loops(mean):
    lr, (b1, b2), eps, wd = 0.05, (0.8, 0.95), 1e-3, 0.3
    heads = random_heads((2,))
    expected = parts_of(heads)
    expected.pop("weights")
    m = {name: torch.zeros_like(part) for name, part in expected.items()}
    v = {name: torch.zeros(2, 3, dtype=F64) for name in expected}
    for k, g in enumerate(gradients(heads), start=1):
        for name, part in expected.items():
            for r in range(2):
                for h in range(3):
                    G = getattr(g, name)[r, h]
                    size = G.square().mean() if mean else G.square().sum()
                    v[name][r, h] = b2 * v[name][r, h] + (1 - b2) * size
                    m[name][r, h] = b1 * m[name][r, h] + (1 - b1) * G
                    root = (v[name][r, h] / (1 - b2**k)).sqrt()
                    step = m[name][r, h] / (1 - b1**k) / (root + eps)
                    part[r, h] = (1 - lr * wd) * part[r, h] - lr * step
    mine, _ = train(BlockAdamW(lr, (b1, b2), eps, wd, mean=mean), heads)
    assert set(mine.parts()) == set(expected) == {"q", "k", "v", "o", *BIASES}
    for name, part in mine.parts().items():
        assert_to_rounding(part, expected[name], 10 * STEPS, name)  # some roundings per step


def test_block_adamw_moves_every_block_by_the_same_norm():
    """The first step has norm lr in every block, whatever the number of entries: free of d."""
    heads = random_heads(H=2, m=3, d=17)
    rule = BlockAdamW(0.1, eps=0.0, weight_decay=0.0)
    moved, _ = updated(rule, heads, rule.init(heads), next(gradients(heads)), 1)
    for name, part in heads.with_packed(moved.packed - heads.packed).parts().items():
        norm = part.flatten(1).norm(dim=1)
        # theta ~ 1 is rounded: 1e-16 per entry of a step of 0.1
        assert_to_rounding(norm, torch.full_like(norm, 0.1), 10, name)


def test_block_adamw_with_blocks_of_one_entry_is_adamw():
    heads = random_heads(m=1, d=1)
    settings = (0.05, (0.8, 0.95), 1e-3, 0.3)
    expected = train(AdamW(*settings), heads)[0].packed
    for mean in (False, True):
        actual = train(BlockAdamW(*settings, mean=mean), heads)[0].packed
        assert_to_rounding(actual, expected, 10 * STEPS)


@EVERY_RULE
def test_a_rule_leaves_weights_and_layout_alone_and_ignores_the_weights_of_g(rule):
    heads = random_heads((2,))
    g = next(gradients(heads))
    after, _ = updated(rule, heads, rule.init(heads), g, 1)
    assert torch.equal(after.weights, heads.weights)
    assert after.layout == heads.layout
    g.weights = torch.full_like(g.weights, torch.nan)
    other, _ = updated(rule, heads, rule.init(heads), g, 1)
    assert torch.equal(after.packed, other.packed)


@EVERY_RULE
def test_state_starts_at_zero_with_the_leading_dimensions_of_the_heads(rule):
    heads = random_heads((4, 2), dtype=torch.float32)
    for tensor in rule.init(heads).values():
        assert tensor.shape[:2] == (4, 2)
        assert tensor.dtype == torch.float32
        assert (tensor == 0).all()


@pytest.mark.parametrize("rule_type", [AdamW, BlockAdamW])
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_without_eps_a_zero_gradient_takes_no_step(rule_type, weight_decay):
    heads = random_heads()
    rule = rule_type(0.1, eps=0.0, weight_decay=weight_decay)
    zero = heads.with_packed(torch.zeros_like(heads.packed))
    state, moved = rule.init(heads), heads
    for k in range(3):
        moved, state = updated(rule, moved, state, zero, k + 1)
    # decay alone is left, and it is exact to a rounding per step
    assert_to_rounding(moved.packed, heads.packed * (1 - 0.1 * weight_decay) ** 3, 10)
    assert weight_decay or torch.equal(moved.packed, heads.packed)


def test_without_eps_only_the_entries_with_gradient_move_and_by_lr():
    heads = random_heads()
    rule = AdamW(0.1, eps=0.0, weight_decay=0.0)
    g = normal(*heads.packed.shape, seed=4)
    g[::2] = 0.0
    moved, _ = updated(rule, heads, rule.init(heads), heads.with_packed(g), 1)
    assert_to_rounding(moved.packed, heads.packed - 0.1 * g.sign(), 10)


def test_weight_decay_of_adamw_is_decoupled():
    """Without eps, its step does not change when all gradients are scaled; the decay stays."""
    heads = random_heads()
    rule = AdamW(0.05, eps=0.0, weight_decay=0.3)
    small, _ = train(rule, heads, scale=1e-3)
    large, _ = train(rule, heads, scale=1e3)
    assert_to_rounding(small.packed, large.packed, 10 * STEPS)


def test_rules_say_what_they_are():
    assert repr(SGD(0.1)) == "SGD(lr=0.1, momentum=0, weight_decay=0)"
    assert repr(AdamW()) == "AdamW(lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01)"


def test_rules_that_train_differently_do_not_look_the_same():
    assert repr(BlockAdamW(mean=True)) != repr(BlockAdamW(mean=False))


@pytest.mark.parametrize("kind", [*KINDS.values(), Rebalance, Clip], ids=lambda kind: kind.__name__)
def test_the_options_of_a_rule_are_fields_with_a_sentence_each(kind):
    """As command lines show them."""
    explained = set()
    for base in kind.__mro__[:-1]:
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for line, after in itertools.pairwise(body):
            if isinstance(line, ast.AnnAssign) and isinstance(after, ast.Expr):
                explained.add(line.target.id)
    assert explained == {field.name for field in dataclasses.fields(kind)}
