"""The naive model that blocks are held against is itself right: by differences, and by torch."""

import dataclasses

import pytest
import torch
from naive_blocks import (
    ACTIVATIONS,
    F64,
    NaiveAdamW,
    NaiveBlock,
    NaiveSGD,
    at_layer,
    backward,
    by_costate,
    naive_training,
    random_units,
    unit_at,
)

BIASES = ("bq", "bk", "bv", "bo", "b_in", "b_out")
BOTH = {"attention": 2, "perceptron": 3}
BLOCKS = {
    "parallel": NaiveBlock(depth=2, norm="rms", activation="tanh", causal=True),
    "sequential": NaiveBlock(depth=2, norm="layer", sequential=True, activation="silu"),
    "tied": NaiveBlock(depth=3, sequential=True, activation="gelu_tanh", tied=True),
}


def data(B=3, N=3, d=3):
    gen = torch.Generator().manual_seed(8)
    contexts = torch.randn(B, N, d, generator=gen, dtype=F64)
    return contexts, torch.randn(B, d, generator=gen, dtype=F64)


def loss(block, units, contexts, targets):
    ends = [block.layers(units, x)[0][-1] for x in contexts]
    return float(sum(block.loss(x, y) for x, y in zip(ends, targets)) / len(contexts))


@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_and_costates_are_difference_quotients_of_the_loss(name):
    block = BLOCKS[name]
    contexts, targets = data()
    units = random_units(block, BOTH, 3, seed=1, biases=BIASES, gated=name == "sequential")
    found = backward(block, units, contexts, targets)
    h = 1e-5

    def slope(changed):
        return (loss(block, *changed(h)) - loss(block, *changed(-h))) / (2 * h)

    for family, parts in units.items():
        scale = (1 if block.tied else block.depth) * parts["weights"].shape[1]
        for part, tensor in parts.items():
            if part == "weights":
                continue
            entries = torch.randint(
                tensor.numel(), (4,), generator=torch.Generator().manual_seed(3)
            )
            for entry in entries.tolist():

                def changed(t, family=family, part=part, tensor=tensor, entry=entry):
                    moved = tensor.flatten().clone()
                    moved[entry] += t
                    own = units[family] | {part: moved.reshape(tensor.shape)}
                    return units | {family: own}, contexts, targets

                g = float(found.g[family][part].flatten()[entry])
                assert abs(scale * slope(changed) - g) < 1e-8, (family, part, entry)
    for b, i, j in ((0, 0, 0), (2, 1, 2)):

        def moved(t, b=b, i=i, j=j):
            x = contexts.clone()
            x[b, i, j] += t
            return units, x, targets

        assert abs(9 * slope(moved) - float(found.p[0, b, i, j])) < 1e-8


@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_are_what_costates_behind_each_half_give(name):
    block = BLOCKS[name]
    contexts, targets = data()
    units = random_units(block, BOTH, 3, seed=2, biases=BIASES)
    found = backward(block, units, contexts, targets)
    for family in BOTH:
        for r in range(len(units[family]["weights"])):
            parts = at_layer(units[family], r)
            for part, g in by_costate(block, family, parts, 1, r, found).items():
                assert torch.allclose(g, found.g[family][part][r, 1], atol=1e-13, rtol=0)


def test_a_unit_of_weight_zero_has_the_gradient_of_one_of_the_same_parameters():
    block = BLOCKS["sequential"]
    contexts, targets = data()
    units = random_units(block, BOTH, 3, seed=4, zero=True)
    for parts in units.values():
        for name, tensor in parts.items():
            if name != "weights":
                tensor[:, 0] = tensor[:, 1]
    for parts in backward(block, units, contexts, targets).g.values():
        for g in parts.values():
            assert torch.allclose(g[:, 0], g[:, 1], atol=1e-13, rtol=0)
            assert float(g.abs().max()) > 1e-3


def test_the_activations_are_those_of_torch():
    z = torch.linspace(-4, 4, 81, dtype=F64)
    theirs = {
        "gelu": torch.nn.functional.gelu(z),
        "gelu_tanh": torch.nn.functional.gelu(z, approximate="tanh"),
        "relu": z.clamp(min=0),
        "silu": torch.nn.functional.silu(z),
        "tanh": z.tanh(),
    }
    assert set(theirs) == set(ACTIVATIONS)
    for name, value in theirs.items():
        assert torch.allclose(ACTIVATIONS[name](z), value, atol=1e-14, rtol=0), name


def test_the_norms_are_those_of_torch():
    (x, *_), _ = data(d=5)
    block = NaiveBlock(depth=1, norm="rms", norm_eps=0.1)
    theirs = torch.nn.functional.rms_norm(x, (5,), eps=0.1)
    assert torch.allclose(block.normed(x), theirs, atol=1e-14, rtol=0)
    block = dataclasses.replace(block, norm="layer")
    theirs = torch.nn.functional.layer_norm(x, (5,), eps=0.1)
    assert torch.allclose(block.normed(x), theirs, atol=1e-14, rtol=0)


def test_a_head_is_torchs_attention():
    (x, *_), _ = data()
    for causal in (False, True):
        block = NaiveBlock(depth=1, causal=causal)
        unit = unit_at(at_layer(random_units(block, BOTH, 3, 5, BIASES)["attention"], 0), 1)
        q, k, v = (x @ unit[name].T + unit["b" + name] for name in "qkv")
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        expected = seen @ unit["o"].T + unit["bo"]
        assert torch.allclose(block.head(unit, x), expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize(
    "rule, optimizer",
    [
        (NaiveSGD(0.9, 0.1), lambda p: torch.optim.SGD(p, 1.0, momentum=0.9, weight_decay=0.1)),
        (
            NaiveAdamW((0.8, 0.9), 0.01, 0.1),
            lambda p: torch.optim.AdamW(p, 1.0, betas=(0.8, 0.9), eps=0.01, weight_decay=0.1),
        ),
    ],
    ids=["sgd", "adamw"],
)
def test_the_rules_are_torchs_optimizers_on_scaled_gradients_and_batches(rule, optimizer):
    block = BLOCKS["parallel"]
    contexts, targets = data()
    units = random_units(block, BOTH, 3, seed=6, biases=BIASES)
    batches = [[0, 2], [1, 0], [2, 1], [0, 1]]
    rates = [0.1, 0.05, 0.02]
    done = naive_training(
        block, units, contexts, targets, rule, lambda t, *_: rates[t - 1], 3, batches
    )
    leaves = {
        f: {n: t.clone().requires_grad_(n != "weights") for n, t in parts.items()}
        for f, parts in units.items()
    }
    params = [t for parts in leaves.values() for n, t in parts.items() if n != "weights"]
    opt = optimizer(params)
    for k in range(3):
        opt.param_groups[0]["lr"] = rates[k]
        opt.zero_grad()
        total = 0.0
        for b in batches[k]:
            total = total + block.loss(block.layers(leaves, contexts[b])[0][-1], targets[b]) / 2
        assert abs(float(total.detach()) - done[k].pass_.loss) < 1e-13
        total.backward()
        for parts in leaves.values():
            for n, t in parts.items():
                if n != "weights":
                    t.grad *= block.depth * t.shape[1]
        opt.step()
        for f, parts in leaves.items():
            for n, t in parts.items():
                assert torch.allclose(t, done[k + 1].units[f][n], atol=1e-12, rtol=0), (k, f, n)
