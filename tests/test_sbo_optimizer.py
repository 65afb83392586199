"""ipslimit.optim.SBOAdamW: the rule, its conventions, and the kinds of layers it knows."""

import copy
import itertools

import pytest
import torch
from builders import generator, normal
from torch import nn

from ipslimit.nn import calibrate_centres, center_linears, decay_groups
from ipslimit.optim import SBOAdamW

F64 = torch.float64
OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def network(seed=0, sizes=(5, 7, 6, 3)):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = []
        for shape in itertools.pairwise(sizes):
            layers += [nn.Linear(*shape, dtype=F64), nn.Tanh()]
        return nn.Sequential(*layers[:-1])


def batch(step, rows=11, width=5):
    return 1.0 + normal(rows, width, seed=100 + step)


def train(model, optimizer, steps, first=0, inputs=batch):
    for k in range(first, first + steps):
        optimizer.zero_grad()
        model(inputs(k)).square().sum(-1).mean().backward()
        optimizer.step()
    return model


def distance(a, b):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def adam_step(optimizer, p, step):
    """-lr u of a parameter, from its state after the step."""
    state, (b1, b2) = optimizer.state[p], OPTIONS["betas"]
    first, second = state["exp_avg"] / (1 - b1**step), state["exp_avg_sq"] / (1 - b2**step)
    return -OPTIONS["lr"] * first / (second.sqrt() + OPTIONS["eps"])


def test_one_step_is_the_formula():
    model, x = nn.Linear(4, 3, dtype=F64), normal(9, 4)
    optimizer = SBOAdamW(model, lr=0.1, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.2)
    model(x).square().sum().backward()
    W, b = model.weight.detach().clone(), model.bias.detach().clone()
    mu, g_b = x.mean(0), model.bias.grad.clone()
    g_S = model.weight.grad - torch.outer(g_b, mu)
    optimizer.step()
    dW = -0.1 * (g_S / (g_S.abs() + 1e-3) + 0.2 * W)  # the first step of Adam
    db = -0.1 * g_b / (g_b.abs() + 1e-3) - dW @ mu
    torch.testing.assert_close(model.weight.detach(), W + dW, rtol=0, atol=1e-14)
    torch.testing.assert_close(model.bias.detach(), b + db, rtol=0, atol=1e-14)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_boundary_moves_by_the_bias_step_alone(foreach, maximize):
    model = network()
    optimizer = SBOAdamW(model, **OPTIONS, foreach=foreach, maximize=maximize)
    train(model, optimizer, 3)
    before = copy.deepcopy(model)
    inputs = []
    handle = model[2].register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    train(model, optimizer, 1, first=3)
    handle.remove()
    mu = inputs[0].mean(0)
    moved = (model[2].bias + model[2].weight @ mu) - (before[2].bias + before[2].weight @ mu)
    expected = adam_step(optimizer, model[2].bias, 4)
    torch.testing.assert_close(moved.detach(), expected, rtol=0, atol=1e-14)


def test_recentred_to_every_batch_a_centered_layer_under_adamw_is_sbo():
    model = network()
    centred = center_linears(copy.deepcopy(model))
    optimizer = SBOAdamW(model, **OPTIONS)
    options = {k: v for k, v in OPTIONS.items() if k != "weight_decay"}
    adamw = torch.optim.AdamW(decay_groups(centred, OPTIONS["weight_decay"]), **options)
    for k in range(20):
        train(model, optimizer, 1, first=k)
        with calibrate_centres(centred), torch.no_grad():
            centred(batch(k))
        train(centred, adamw, 1, first=k)
    for a, b in zip(model[::2], centred[::2]):
        torch.testing.assert_close(a.weight, b.weight, rtol=0, atol=1e-10)
        torch.testing.assert_close(a.bias, b.bias, rtol=0, atol=1e-10)
    start = network()
    assert distance(model, start) > 0.1  # it did go somewhere


def test_foreach_and_single_tensor_paths_agree():
    a, b = network(), network()
    train(a, SBOAdamW(a, **OPTIONS, foreach=True), 10)
    train(b, SBOAdamW(b, **OPTIONS, foreach=False), 10)
    assert distance(a, b) < 1e-13


def test_maximize_is_minimizing_the_negative():
    a, b = network(), network()
    train(a, SBOAdamW(a, **OPTIONS, maximize=True), 3)
    optimizer = SBOAdamW(b, **OPTIONS)
    for k in range(3):
        optimizer.zero_grad()
        (-b(batch(k)).square().sum(-1).mean()).backward()
        optimizer.step()
    assert distance(a, b) == 0.0


def test_without_affine_layers_it_is_adamw():
    """Excluded layers, layers without bias, other modules and frozen biases."""
    model = nn.Sequential(
        nn.Linear(5, 4, dtype=F64),
        nn.LayerNorm(4, dtype=F64),
        nn.Linear(4, 4, bias=False, dtype=F64),
        nn.Linear(4, 2, dtype=F64),
    )
    model[3].bias.requires_grad_(False)
    other = copy.deepcopy(model)
    optimizer = SBOAdamW(model, **OPTIONS, exclude="0")
    assert [m.name for m in optimizer.maps] == ["3"]
    train(model, optimizer, 5)
    train(other, torch.optim.AdamW(other.parameters(), **OPTIONS), 5)
    assert distance(model, other) < 1e-14


def test_frozen_weight_leaves_an_undecayed_adam_for_the_bias():
    model = network()
    model[0].weight.requires_grad_(False)
    other = copy.deepcopy(model)
    train(model, SBOAdamW(model, **OPTIONS), 1)
    options = {k: v for k, v in OPTIONS.items() if k != "weight_decay"}
    train(other, torch.optim.AdamW(other.parameters(), **options, weight_decay=0.0), 1)
    assert torch.equal(model[0].weight, other[0].weight)
    torch.testing.assert_close(model[0].bias, other[0].bias, rtol=0, atol=1e-15)


class Windows(nn.Module):
    """A Conv1d as a Linear on unfolded windows."""

    def __init__(self, conv):
        super().__init__()
        self.conv_options = conv.kernel_size[0], conv.stride[0], conv.padding[0]
        self.linear = nn.Linear(conv.weight[0].numel(), conv.out_channels, dtype=F64)
        with torch.no_grad():
            self.linear.weight.copy_(conv.weight.flatten(1))
            self.linear.bias.copy_(conv.bias)

    def forward(self, x):
        size, stride, padding = self.conv_options
        windows = nn.functional.pad(x, (padding, padding)).unfold(-1, size, stride)
        return self.linear(windows.permute(0, 2, 1, 3).flatten(2)).transpose(1, 2)


def test_a_convolution_is_a_linear_on_its_windows():
    conv = nn.Conv1d(3, 4, 3, stride=2, padding=2, dtype=F64)
    windows = Windows(conv)

    def inputs(k):
        return 1.0 + normal(2, 3, 9, seed=k)

    train(conv, SBOAdamW(conv, **OPTIONS), 5, inputs=inputs)
    train(windows, SBOAdamW(windows, **OPTIONS), 5, inputs=inputs)
    difference = conv.weight.flatten(1) - windows.linear.weight
    assert difference.abs().max() < 1e-13
    assert (conv.bias - windows.linear.bias).abs().max() < 1e-13


@pytest.mark.parametrize("mode", ["circular", "reflect"])
def test_groups_dilation_and_padding_modes_of_convolutions(mode):
    conv = nn.Conv1d(4, 6, 3, dilation=2, padding=2, groups=2, padding_mode=mode, dtype=F64)
    optimizer = SBOAdamW(conv, **OPTIONS)
    x = 1.0 + normal(2, 4, 7)
    conv(x).square().sum().backward()
    before = copy.deepcopy(conv)
    mean = optimizer.means.gather()[optimizer.maps[0]]
    optimizer.step()
    # the mean output of every channel is b + W mu
    of_channels = mean.repeat_interleave(3, 0)
    outputs = before.bias + (before.weight.flatten(1) * of_channels).sum(1)
    torch.testing.assert_close(outputs, before(x).mean((0, 2)), rtol=0, atol=1e-13)
    moved = conv(x).mean((0, 2)) - before(x).mean((0, 2))
    expected = adam_step(optimizer, conv.bias, 1)
    torch.testing.assert_close(moved.detach(), expected, rtol=0, atol=1e-14)


class Attention(nn.Module):
    """nn.MultiheadAttention with its projections written as Linear layers."""

    def __init__(self, packed: nn.MultiheadAttention):
        super().__init__()
        self.heads = packed.num_heads
        weights = (
            packed.in_proj_weight.chunk(3)
            if packed.in_proj_weight is not None
            else (packed.q_proj_weight, packed.k_proj_weight, packed.v_proj_weight)
        )
        for name, weight, bias in zip("qkv", weights, packed.in_proj_bias.chunk(3)):
            linear = nn.Linear(*weight.shape[::-1], dtype=F64)
            with torch.no_grad():
                linear.weight.copy_(weight)
                linear.bias.copy_(bias)
            setattr(self, name, linear)
        self.out_proj = copy.deepcopy(packed.out_proj)

    def forward(self, query, key, value):
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, x in ((self.q, query), (self.k, key), (self.v, value))
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out_proj(mixed)


@pytest.mark.parametrize("kind", ["self", "cross", "separate"])
def test_packed_projections_are_three_affine_layers(kind):
    widths = {"kdim": 5, "vdim": 3} if kind == "separate" else {}
    packed = nn.MultiheadAttention(4, 2, batch_first=True, dtype=F64, **widths)
    with torch.no_grad():
        packed.in_proj_bias.normal_(generator=generator(3))
    apart = Attention(packed)
    optimizers = [
        # eps far above rounding: the key bias has no gradient but rounding, which Adam amplifies
        SBOAdamW(model, lr=1e-2, eps=1e-4, weight_decay=0.1, exclude="*out_proj")
        for model in (packed, apart)
    ]
    for k in range(4):
        query = 1.0 + normal(2, 3, 4, seed=k)
        key = query if kind == "self" else normal(2, 5, widths.get("kdim", 4), seed=10 + k) - 1.0
        value = key if kind != "separate" else 2.0 + normal(2, 5, 3, seed=20 + k)
        for model, optimizer in zip((packed, apart), optimizers):
            optimizer.zero_grad()
            output = model(query, key, value)
            output = output[0] if isinstance(output, tuple) else output
            output.square().sum().backward()
            optimizer.step()
    bias = torch.cat([apart.q.bias, apart.k.bias, apart.v.bias])
    torch.testing.assert_close(packed.in_proj_bias, bias, rtol=0, atol=1e-9)
    expected = Attention(packed)
    for name in "qkv":
        a, b = getattr(expected, name).weight, getattr(apart, name).weight
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_output_projection_of_attention_is_refused_by_name():
    model = nn.TransformerEncoderLayer(8, 2, 8)
    with pytest.raises(ValueError, match=r"self_attn\.out_proj.*exclude=\('\*out_proj',\)"):
        SBOAdamW(model)
    names = [m.name for m in SBOAdamW(model, exclude="*out_proj").maps]
    assert names == ["self_attn", "linear1", "linear2"]
    with pytest.warns(UserWarning, match="has found no affine layer with a bias"):
        SBOAdamW(nn.MultiheadAttention(8, 2, bias=False))  # nothing there to refuse


@pytest.mark.parametrize("centre", ["ema", "fixed"])
def test_stored_centres(centre):
    model = nn.Linear(5, 3, dtype=F64)
    optimizer = SBOAdamW(model, **OPTIONS, centre=centre, centre_decay=0.75)
    expected = batch(0).mean(0)
    for k in range(3):
        if centre == "ema" and k:
            expected = 0.75 * expected + 0.25 * batch(k).mean(0)
        before = copy.deepcopy(model)
        train(model, optimizer, 1, first=k)
        stored = optimizer.state[model.weight]["centre"]
        torch.testing.assert_close(stored, expected.unsqueeze(0), rtol=0, atol=1e-15)
        moved = (model.bias - before.bias) + (model.weight - before.weight) @ expected
        expected_move = adam_step(optimizer, model.bias, k + 1)
        torch.testing.assert_close(moved.detach(), expected_move, rtol=0, atol=1e-14)


def test_calibrated_centres_are_means_over_all_rows():
    model = network()
    optimizer = SBOAdamW(model, **OPTIONS, centre="fixed")
    with optimizer.calibrate(), torch.no_grad():
        model(batch(0, rows=3))
        model(batch(1, rows=9))
    rows = torch.cat([batch(0, rows=3), batch(1, rows=9)])
    stored = optimizer.state[model[0].weight]["centre"][0].clone()
    torch.testing.assert_close(stored, rows.mean(0), rtol=0, atol=1e-14)
    train(model, optimizer, 2)
    assert torch.equal(stored, optimizer.state[model[0].weight]["centre"][0])
    with pytest.raises(ValueError, match="batch"), SBOAdamW(network()).calibrate():
        pass
    with pytest.raises(RuntimeError, match=r"calibrate.*saw no input"), optimizer.calibrate():
        pass


class Tied(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, dtype=F64), nn.Linear(4, 4, dtype=F64)
        self.b.weight = self.a.weight
        if bias:
            self.b.bias = self.a.bias

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)) + 1.0)


def test_layers_tied_in_weight_and_bias_are_one_layer_called_twice():
    once = nn.Linear(4, 4, dtype=F64)
    twice = Tied(bias=True)
    with torch.no_grad():
        twice.a.weight.copy_(once.weight)
        twice.a.bias.copy_(once.bias)
    optimizer = SBOAdamW(once, **OPTIONS)
    other = SBOAdamW(twice, **OPTIONS)
    for k in range(4):
        x = 1.0 + normal(6, 4, seed=k)
        optimizer.zero_grad()
        once(torch.tanh(once(x)) + 1.0).square().sum().backward()
        optimizer.step()
        other.zero_grad()
        twice(x).square().sum().backward()
        other.step()
    assert distance(once, twice) < 1e-14


@pytest.mark.parametrize("centre", ["batch", "ema"])
def test_a_weight_with_two_biases_keeps_both_boundaries(centre):
    """Exactly: dW moves b by -dW mu for each; so both mean outputs move by -lr u_b alone."""
    model = Tied(bias=False)
    optimizer = SBOAdamW(model, **OPTIONS, centre=centre)
    x = 1.0 + normal(6, 4)
    model(x).square().sum().backward()
    before = copy.deepcopy(model)
    optimizer.step()
    inputs = x, torch.tanh(before.a(x)) + 1.0
    for name, z in zip("ab", inputs):
        new, old = getattr(model, name), getattr(before, name)
        moved = (new(z) - old(z)).mean(0)
        expected = adam_step(optimizer, new.bias, 1)
        torch.testing.assert_close(moved.detach(), expected, rtol=0, atol=1e-14)
    stored = sorted(k for k in optimizer.state[model.a.weight] if k.startswith("centre"))
    assert stored == (["centre", "centre_1"] if centre == "ema" else [])


def test_a_weight_tied_to_an_embedding():
    """g_W holds the embedding's part too; b + W mu at fixed mu still moves by -lr u_b alone."""
    embedding, head = nn.Embedding(6, 4, dtype=F64), nn.Linear(4, 6, dtype=F64)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, nn.Tanh(), head)
    optimizer = SBOAdamW(model, **OPTIONS)
    tokens = torch.tensor([[0, 1, 2], [3, 3, 1]])
    model(tokens).square().sum().backward()
    before = copy.deepcopy(model)
    optimizer.step()
    mu = before[:2](tokens).flatten(0, 1).mean(0)
    moved = head.bias + head.weight @ mu - before[2].bias - before[2].weight @ mu
    expected = adam_step(optimizer, head.bias, 1)
    torch.testing.assert_close(moved.detach(), expected, rtol=0, atol=1e-14)


def test_float32_follows_float64():
    a, b = network(), network().float()
    train(a, SBOAdamW(a, **OPTIONS), 5)
    train(b, SBOAdamW(b, **OPTIONS), 5, inputs=lambda k: batch(k).float())
    # at most 0.01 moved a step; Adam divides rounding of 1e-7 by gradients of about 1e-2
    assert 0 < distance(a, b.double()) < 1e-4
