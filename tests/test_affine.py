"""Which modules are affine maps, and that it does not matter which way round a weight lies."""

import numpy as np
import pytest
import torch
from architectures import WIDTH, Bert, Conv1D, Fused, Plain
from modules import seeded
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from ipslimit import BoundaryProbe
from ipslimit.optim import SAGGS, GaugeAdamW, SBOAdamW, find_pairs, rescale_pair
from ipslimit.torchmodels.affine import affine_form
from ipslimit.torchmodels.maps import find_maps

X = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Renamed(nn.Linear):
    """Another forward, to the same effect."""

    def forward(self, x):
        z = x @ self.weight.T
        return z if self.bias is None else z + self.bias


class Noisy(nn.Linear):
    def forward(self, input):
        return super().forward(input + torch.randn_like(input) if self.training else input)


class Rounded(nn.Linear):
    def forward(self, input):
        return super().forward((input * 16).round() / 16)


class Wrapper(nn.Module):
    def __init__(self, function=None):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 6), function or nn.Identity()

    def forward(self, x):
        return self.function(self.linear(x))


class Stateful(nn.Module):
    """x W + b with a buffer besides, which may make it another map."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.eye(4)), nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return (x @ self.weight + self.bias) * self.scale


# (module, where its weight is, whether the outputs come last) or None
FORMS = {
    "Linear": (nn.Linear(4, 6), ("", False)),
    "Conv1D": (Conv1D(6, 4), ("", True)),
    "Conv1D without a bias": (Conv1D(6, 4, bias=False), ("", True)),
    "a square Conv1D": (Conv1D(5, 5), ("", True)),
    "a forward of its own": (Renamed(5, 5), ("", False)),
    "a wrapper": (Wrapper(), ("linear", False)),
    "a Linear and its dropout": (nn.Sequential(nn.Linear(4, 6), nn.Identity()), ("0", False)),
    "noise in training": (Noisy(4, 6), None),
    "dropout in training": (Wrapper(nn.Dropout()), None),
    "rounded inputs": (Rounded(4, 6), None),
    "a function behind": (Wrapper(nn.Tanh()), None),
    "a buffer": (Stateful(), None),
    "an embedding": (nn.Embedding(4, 6), None),
    "a table that is looked up": (type("Table", (nn.Embedding,), {})(4, 6), None),
    "a bilinear map": (nn.Bilinear(2, 2, 3), None),
    "no weight": (nn.ReLU(), None),
    "weight norm": (parametrizations.weight_norm(nn.Linear(4, 6)), None),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_module_is_affine_by_what_it_computes(name):
    module, expected = FORMS[name]
    state = torch.get_rng_state()
    form = affine_form(module)
    assert torch.equal(state, torch.get_rng_state())
    assert (form and (form.path, form.transposed)) == expected


def test_maps_are_found_whatever_the_class():
    model = nn.ModuleDict({"a": Conv1D(6, 4), "b": Renamed(4, 6), "c": Conv1D(6, 4, bias=False)})
    maps, unseen = find_maps(model.named_modules())
    assert [(m.name, m.outputs, m.transposed) for m in maps] == [("a", 6, True), ("b", 6, False)]
    assert unseen == []
    assert find_maps(nn.ModuleDict({"a": Noisy(4, 6)}).named_modules()) == ([], ["a"])


def twins(seed=0):
    """The same function of Conv1D and of Linear: attention in one matrix, and an MLP."""

    def make(linear):
        return nn.Sequential(
            Fused("behind", linear=linear, names=("c_attn", "c_proj")),
            Plain(linear=linear),
            Plain(linear=linear),
        )

    ours, theirs = seeded(seed, lambda: make(Conv1D)).double(), make(nn.Linear).double()
    with torch.no_grad():
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            b.copy_(a.T if a.dim() == 2 else a)
    return ours, theirs


def train(model, optimizer, steps=4):
    for k in range(steps):
        optimizer.zero_grad()
        (model(X + 0.1 * k) - 1.0).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("centre", ["batch", "ema", "fixed"])
@pytest.mark.parametrize("balanced", [False, True])
def test_a_transposed_weight_is_trained_and_watched_as_a_linear_one(centre, balanced):
    histories, keys = [], []
    models = twins()
    for model in models:
        optimizer = SBOAdamW(model, lr=1e-2, centre=centre)
        assert len(optimizer.maps) == 6
        probe = BoundaryProbe(model, optimizer, packed=("*.c_attn",))
        wrapped = SAGGS(optimizer, find_pairs(model, "head"), every=2) if balanced else optimizer
        train(model, wrapped)
        histories.append(probe.history())
        keys.append(probe.is_key)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a.T if a.dim() == 2 else a, b, rtol=1e-9, atol=1e-11)
    assert keys[0].tolist() == keys[1].tolist() and sum(keys[0]) == 1
    for name, values in histories[0].items():  # the bias of a key has rounding for a gradient
        a, b = (values[:, ~keys[0]] for values in (values, histories[1][name]))
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-10)
    assert np.isfinite(histories[0]["energy"]).all()


def test_the_formula_of_sbo_holds_for_a_transposed_weight():
    """The boundary moves as its own Adam says, whatever the weight does."""
    layer = seeded(0, lambda: Conv1D(3, WIDTH)).double()
    optimizer = SBOAdamW(layer, lr=1e-2, weight_decay=0.0)
    mean = X.reshape(-1, WIDTH).mean(0)
    before = (mean @ layer.weight + layer.bias).detach()
    F.softplus(layer(x=X)).sum().backward()
    g_b, g_w = layer.bias.grad.clone(), layer.weight.grad.clone()
    optimizer.step()
    moved = (mean @ layer.weight + layer.bias).detach() - before
    torch.testing.assert_close(moved, -1e-2 * g_b / (g_b.abs() + 1e-8), rtol=1e-10, atol=1e-13)
    assert optimizer.state[layer.weight]["exp_avg"].shape == layer.weight.shape
    expected = 0.1 * (g_w - torch.outer(mean, g_b))
    torch.testing.assert_close(optimizer.state[layer.weight]["exp_avg"], expected)


def test_a_model_without_an_affine_layer_is_told_that_it_gets_plain_adamw():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.LayerNorm(3))
    with pytest.warns(UserWarning, match="has found no affine layer with a bias.*plain AdamW"):
        SBOAdamW(model)
    with pytest.warns(UserWarning, match="plain AdamW"):
        SBOAdamW(Bert(), exclude="*")
    with pytest.warns(UserWarning, match="plain AdamW"):
        SBOAdamW([{"modules": model[0]}, {"modules": model[1]}])


@pytest.mark.parametrize("linear", [Conv1D, nn.Linear])
def test_twins_are_so_whichever_way_weights_lie(linear):
    """GaugeAdamW with one pair a head, of a packed projection, and the two of an MLP."""
    make = lambda: nn.Sequential(Fused("apart", linear=linear), Plain(linear=linear))  # noqa: E731
    one, two = seeded(0, make).double(), seeded(0, make).double()
    pairs = find_pairs(two, "head")
    assert len(pairs) == 2 * 4 + 1
    for k, pair in enumerate(pairs):
        rescale_pair(pair, 2.0 ** (k - 4))
    optimizers = [GaugeAdamW(net.parameters(), find_pairs(net, "head")) for net in (one, two)]
    for k in range(4):
        outputs = [net(X + k) for net in (one, two)]
        assert torch.equal(*outputs)
        for z, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            z.square().mean().backward()
            optimizer.step()
    assert not torch.equal(one[1].c_fc.weight, two[1].c_fc.weight)
