"""BoundaryProbe: its numbers by hand, what it leaves out, and what it leaves alone."""

import copy

import numpy as np
import pytest
import torch
from builders import normal
from torch import nn

import ipslimit
from ipslimit import BoundaryProbe
from ipslimit.nn import Recentring, center_linears
from ipslimit.optim import SBOAdamW

F64 = torch.float64
RATIOS = ("R1", "R2", "R3")


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, middle, last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        return nn.Sequential(first, nn.Tanh(), middle, nn.Tanh(), last).to(F64)


def batch(k):
    return 1.0 + normal(8, 4, seed=k)


def train(model, optimizer, steps, first=0):
    for k in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(k)).square().sum(-1).mean().backward()
        optimizer.step()


def adam(model, lr=1e-2):
    return torch.optim.AdamW(model.parameters(), lr=lr)


@pytest.mark.parametrize("kind", ["adam", "sbo"])
def test_numbers_are_the_definitions(kind):
    model = network()
    optimizer = adam(model) if kind == "adam" else SBOAdamW(model, lr=1e-2)
    probe = BoundaryProbe(model, optimizer)
    assert probe.layers == ["0", "2", "4"]
    inputs = {}
    for i in (0, 2, 4):
        model[i].register_forward_pre_hook(lambda m, a: inputs.update({m: a[0].detach()}))
    first, expected = {}, []
    for k in range(3):
        before = copy.deepcopy(model)
        train(model, optimizer, 1, first=k)
        row = []
        for i in (0, 2, 4):
            new, old, mu = model[i], before[i], inputs[model[i]].mean(0)
            W, b = new.weight.detach(), new.bias.detach()
            dW, db = W - old.weight.detach(), b - old.bias.detach()
            c, start = first.setdefault(i, (mu, old.bias.detach() + old.weight.detach() @ mu))
            g_W, g_b = new.weight.grad, new.bias.grad
            row.append(
                {
                    "R1": torch.outer(g_b, mu).norm() / g_W.norm(),
                    "R2": (dW @ mu).norm() / db.norm(),
                    "R3": (dW @ mu).norm() / (db + dW @ mu).norm(),
                    "energy": (db + dW @ mu).square().sum(),
                    "bias": b.norm(),
                    "effective_bias": (b + W @ mu).norm(),
                    "drift": (b + W @ c - start).norm(),
                }
            )
        expected.append(row)
    history = probe.history()
    for name in expected[0][0]:
        wanted = np.array([[float(layer[name]) for layer in row] for row in expected])
        np.testing.assert_allclose(history[name], wanted, rtol=1e-9, err_msg=name)
    np.testing.assert_array_equal(probe.steps, [1, 2, 3])


def test_watching_changes_nothing():
    a, b = network(), network()
    train(a, adam(a), 3)
    optimizer = adam(b)
    probe = BoundaryProbe(b, optimizer)
    train(b, optimizer, 3)
    for p, q in zip(a.parameters(), b.parameters()):
        assert torch.equal(p, q)
    probe.remove()
    train(b, optimizer, 1)
    assert len(probe.steps) == 3 and not b[0]._forward_hooks


def test_sbo_moves_the_boundary_less_and_the_bias_more():
    """Its boundary step is -lr u_b: at the first step of Adam lr for every unit, exactly."""
    found = {}
    for kind in ("adam", "sbo"):
        model = network()
        optimizer = adam(model) if kind == "adam" else SBOAdamW(model, lr=1e-2)
        probe = BoundaryProbe(model, optimizer)
        train(model, optimizer, 1)
        found[kind] = probe.history()
    np.testing.assert_allclose(found["sbo"]["energy"], 1e-4 * np.array([[6, 6, 2]]), rtol=1e-4)
    assert (found["adam"]["energy"] > found["sbo"]["energy"]).all()
    # AdamW's bias steps by lr a unit as well; all else is the weights' doing
    np.testing.assert_allclose(found["adam"]["db"] ** 2, found["sbo"]["energy"], rtol=0.01)


def test_a_centered_layer_is_measured_as_the_linear_it_equals():
    """Adam about a centre of 0 is Adam; and moving the centre is no motion."""
    linear = network()
    centred = center_linears(copy.deepcopy(linear))
    probes = []
    for model in (linear, centred):
        optimizer = adam(model)
        probes.append(BoundaryProbe(model, optimizer))
        train(model, optimizer, 2)
    for name, values in probes[0].history().items():
        np.testing.assert_allclose(probes[1].history()[name], values, rtol=1e-9, err_msg=name)
    optimizer = torch.optim.SGD(centred.parameters(), lr=0.0)
    probe = BoundaryProbe(centred, optimizer)
    Recentring(centred, optimizer)
    train(centred, optimizer, 3)
    assert centred[0].centre.any()
    # R1 is the gradient's as a Linear, wherever the centre is
    for p in linear.parameters():
        p.requires_grad_(True)
    with torch.no_grad():
        for i in (0, 2, 4):
            linear[i].weight.copy_(centred[i].weight)
            linear[i].bias.copy_(centred[i].bias)
    plain = torch.optim.SGD(linear.parameters(), lr=0.0)
    other = BoundaryProbe(linear, plain)
    train(linear, plain, 1, first=2)
    np.testing.assert_allclose(probe.history()["R1"][-1], other.history()["R1"][-1], rtol=1e-9)
    assert probe.summary()["energy"] < 1e-25


class Block(nn.Module):
    def __init__(self, packed):
        super().__init__()
        self.packed = packed
        names = ["qkv"] if packed else ["q_proj", "k_proj", "v_proj"]
        for name in names:
            setattr(self, name, nn.Linear(4, 12 if packed else 4, dtype=F64))

    def forward(self, x):
        q, k, v = (
            self.qkv(x).chunk(3, -1)
            if self.packed
            else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_keys_are_apart_however_they_are_packed():
    apart, packed = Block(False), Block(True)
    attention = nn.MultiheadAttention(4, 1, batch_first=True, dtype=F64)
    with torch.no_grad():
        for weight in (packed.qkv.weight, attention.in_proj_weight):
            weight.copy_(torch.cat([apart.q_proj.weight, apart.k_proj.weight, apart.v_proj.weight]))
        for bias in (packed.qkv.bias, attention.in_proj_bias):
            bias.copy_(torch.cat([apart.q_proj.bias, apart.k_proj.bias, apart.v_proj.bias]))
        attention.out_proj.weight.copy_(torch.eye(4))
        attention.out_proj.bias.zero_()
    x, found = 1.0 + normal(3, 5, 4), []
    for model in (apart, packed, attention):
        # the step of SGD is proportional to the gradient, so rounding stays small
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        probe = BoundaryProbe(model, optimizer, packed=["qkv"] if model is packed else ())
        output = model(x, x, x)[0] if model is attention else model(x)
        output.square().sum().backward()
        optimizer.step()
        found.append(probe)
        np.testing.assert_array_equal(probe.is_key, [False, True, False])
    assert found[0].layers == ["q_proj", "k_proj", "v_proj"]
    assert found[1].layers == ["qkv[q]", "qkv[k]", "qkv[v]"]
    assert found[2].layers == [f"MultiheadAttention.in_proj[{p}]" for p in "qkv"]
    assert found[2].unseen == ["out_proj"]
    histories = [probe.history() for probe in found]
    for other in histories[1:]:
        for name in (*RATIOS, "energy", "bias", "drift"):
            np.testing.assert_allclose(
                other[name][:, [0, 2]], histories[0][name][:, [0, 2]], rtol=1e-8, err_msg=name
            )
    # the ratios of keys: nothing but rounding moves their bias
    assert histories[0]["R1"][0, 1] < 1e-12 and histories[0]["R2"][0, 1] > 1e10
    summary = found[0].summary()
    assert summary["R2"] == pytest.approx(np.median(histories[0]["R2"][0, [0, 2]]))


def test_packed_layers_of_two_kinds_are_measured_side_by_side():
    """One size, but one mean for all three parts, or three."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 1, batch_first=True, dtype=F64)
            self.block = Block(True)

        def forward(self, x, y, z):
            return self.block(self.attention(x, y, z)[0])

    x, y, z = normal(3, 5, 4), 1.0 + normal(3, 5, 4), 2.0 + normal(3, 5, 4)
    model = Both()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    together = BoundaryProbe(model, optimizer, packed=("*.qkv",))
    apart = [
        BoundaryProbe(model, optimizer, exclude="block"),
        BoundaryProbe(model, optimizer, packed=("*.qkv",), exclude="attention"),
    ]
    model(x, y, z).square().sum().backward()
    optimizer.step()
    assert together.layers == apart[0].layers + apart[1].layers and len(together.layers) == 6
    for name, values in together.history().items():
        expected = np.concatenate([probe.history()[name] for probe in apart], axis=1)
        np.testing.assert_allclose(values, expected, rtol=1e-12, err_msg=name)


def test_custom_key_names():
    model = nn.ModuleDict({"lookup": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    optimizer = adam(model)
    assert BoundaryProbe(model, optimizer, keys=["look*"]).is_key.tolist() == [True, False]
    assert not BoundaryProbe(model, optimizer).is_key.any()


def test_every_few_steps_and_long_runs():
    model = network()
    optimizer = adam(model)
    every, some = BoundaryProbe(model, optimizer), BoundaryProbe(model, optimizer, every=100)
    train(model, optimizer, 301)
    np.testing.assert_array_equal(some.steps, [1, 101, 201, 301])
    chosen = some.steps - 1
    for name, values in some.history().items():
        np.testing.assert_allclose(values, every.history()[name][chosen], rtol=1e-9, err_msg=name)


def test_layers_without_rows_or_gradient_are_nan():
    model = nn.ModuleList([network(), nn.Linear(2, 2, dtype=F64)])
    optimizer = adam(model)
    probe = BoundaryProbe(model, optimizer)
    train(model[0], optimizer, 1)
    model[1](normal(3, 2)).sum().backward()
    train_with = model[1](normal(3, 2)).sum()
    optimizer.zero_grad()
    train_with.backward()
    optimizer.step()
    history = probe.history()
    assert np.isnan(history["R2"]).tolist() == [[False] * 3 + [True], [True] * 3 + [False]]
    assert np.isfinite(list(probe.summary().values())).all()


def test_convolutions_with_groups_are_layers_apart():
    conv = nn.Conv1d(4, 6, 3, groups=2, dtype=F64)
    halves = nn.ModuleList([nn.Conv1d(2, 3, 3, dtype=F64) for _ in range(2)])
    with torch.no_grad():
        for i, half in enumerate(halves):
            half.weight.copy_(conv.weight[3 * i : 3 * i + 3])
            half.bias.copy_(conv.bias[3 * i : 3 * i + 3])
    x = 1.0 + normal(2, 4, 7)
    histories = []
    for model, outputs in (
        (conv, lambda: conv(x)),
        (halves, lambda: torch.cat([half(part) for half, part in zip(halves, x.chunk(2, 1))], 1)),
    ):
        optimizer = adam(model)
        probe = BoundaryProbe(model, optimizer)
        outputs().square().sum().backward()
        optimizer.step()
        histories.append(probe.history())
    for name in ("g_W", "g_b mu", "dW mu", "db", "db + dW mu", "bias", "effective_bias", "drift"):
        whole, parts = (history[name] for history in histories)
        np.testing.assert_allclose(whole[:, 0] ** 2, (parts**2).sum(1), rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("kind", ["adam", "sbo"])
def test_padding_does_not_count(kind):
    mask = torch.tensor([[True, True, False], [True, False, False]])
    histories = []
    for masked in (True, False):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Linear(4, 2, dtype=F64)
        optimizer = adam(model) if kind == "adam" else SBOAdamW(model, lr=1e-2)
        probe = BoundaryProbe(model, optimizer)
        x = 1.0 + normal(2, 3, 4)
        if masked:
            probe.row_mask = mask
            (model(x).square().sum(-1) * mask).sum().backward()
        else:
            model(x[mask]).square().sum().backward()
        optimizer.step()
        histories.append(probe.history())
    for name, values in histories[0].items():
        np.testing.assert_allclose(values, histories[1][name], rtol=1e-9, err_msg=name)


def test_beside_sbo_inputs_are_looked_at_once():
    model = network()
    optimizer = SBOAdamW(model, exclude="4")
    BoundaryProbe(model, optimizer)
    assert [len(model[i]._forward_hooks) for i in (0, 2, 4)] == [1, 1, 1]


def test_beside_groups_of_modules_layers_have_their_names_in_the_model():
    """In the groups both Linears are called "0"."""
    found = []
    for groups in (lambda m: m, lambda m: [{"modules": m["a"]}, {"modules": m["b"]}]):
        torch.manual_seed(0)
        model = nn.ModuleDict({k: nn.Sequential(nn.Linear(3, 3, dtype=F64)) for k in "ab"})
        optimizer = SBOAdamW(groups(model), lr=1e-2)
        probe = BoundaryProbe(model, optimizer, packed=("b.0",))
        for _ in range(2):
            model["b"](model["a"](1.0 + normal(4, 3))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert probe.layers == ["a.0", "b.0[q]", "b.0[k]", "b.0[v]"]
        assert not probe.means.maps  # the optimizer's are looked at
        found.append(probe.history())
    for name, values in found[0].items():
        np.testing.assert_array_equal(found[1][name], values, err_msg=name)


def test_a_step_that_amp_skips_is_not_recorded():
    model = network().float()
    optimizer = adam(model)
    probe = BoundaryProbe(model, optimizer)
    other = network().float()
    plain = adam(other)
    expected = BoundaryProbe(other, plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for k in range(3):
        optimizer.zero_grad()
        value = model(batch(k).float()).square().sum(-1).mean()
        scaler.scale(value * (torch.inf if k == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if k != 1:
            plain.zero_grad()
            other(batch(k).float()).square().sum(-1).mean().backward()
            plain.step()
    for name, values in expected.history().items():
        np.testing.assert_array_equal(probe.history()[name], values, err_msg=name)


def test_it_is_imported_when_it_is_asked_for():
    assert ipslimit.BoundaryProbe is BoundaryProbe
    assert "BoundaryProbe" in dir(ipslimit) and "BoundaryProbe" in ipslimit.__all__
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        ipslimit.Nothing  # noqa: B018


def test_bad_arguments_are_named():
    model = network()
    optimizer = adam(model)
    for call, error, message in (
        (lambda: BoundaryProbe(3, optimizer), TypeError, "model must be"),
        (lambda: BoundaryProbe(model, model), TypeError, "optimizer must be"),
        (lambda: BoundaryProbe(model, optimizer, every=0), ValueError, "every"),
        (lambda: BoundaryProbe(network(), optimizer), ValueError, "optimizer trains; got none"),
        (lambda: BoundaryProbe(model, optimizer, packed=["4"]), ValueError, "packed must name"),
        (
            lambda: BoundaryProbe(model, optimizer, packed="*qvk*"),
            ValueError,
            r"packed must name layers that are watched; '\*qvk\*' matches none of \['0', '2'",
        ),
        (lambda: BoundaryProbe(model, optimizer, exclude="9"), ValueError, "'9' matches none"),
    ):
        with pytest.raises(error, match=message):
            call()
    probe = BoundaryProbe(model, optimizer)
    assert np.isnan(probe.summary()["R1"])
