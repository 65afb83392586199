"""verify_pairs: what it certifies, whatever the values of the branch, and what it leaves alone."""

import math

import pytest
import torch
from modules import GroupedAttention, SwiGLU, seeded
from torch import nn

from ipslimit.optim import Pair, find_pairs, verify_pairs

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def encoder():
    return nn.TransformerEncoderLayer(16, 4, 24, dropout=0.1, batch_first=True)


class Branch(nn.Module):
    """A residual branch that says of itself that it is homogeneous."""

    def __init__(self, function, size=1.0):
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(16, 24), nn.Linear(24, 16), nn.ReLU()
        self.function, self.gain = function, 1.0
        with torch.no_grad():
            self.fc2.weight.mul_(size)
            self.fc2.bias.zero_()

    def symmetry_pairs(self, name, per):
        first, second = (self.fc1.weight, self.fc1.bias), (self.fc2.weight, None)
        return {"mlp": [Pair(first, second, f"{name}.fc1/fc2", feeds=True)]}

    def forward(self, x):
        return x + self.gain * self.fc2(self.function(self.fc1(x)))


def test_a_symmetry_is_told_from_a_similar_network():
    """Pairs that a module declares are believed; what they do is seen in the outputs."""

    class Hidden(GroupedAttention):
        def symmetry_pairs(self, name, per):
            query, key, value, output = (
                (getattr(self, f"{part}_proj").weight, None) for part in "qkvo"
            )
            return {
                "qk": [Pair(query, key, f"{name} query/key", feeds=False)],
                "vo": [Pair(value, output, f"{name} value/output", feeds=True)],
            }

        def forward(self, x):
            q = nn.functional.rms_norm(self.q_proj(x), (16,))
            k = nn.functional.rms_norm(self.k_proj(x), (8,)).repeat(1, 1, 2)
            v = self.v_proj(x).repeat(1, 1, 2)
            return self.o_proj(torch.softmax(q @ k.mT, -1) @ torch.tanh(v))

    model = seeded(0, Hidden)
    pairs = find_pairs(model)
    # the norm hides the scale but for its eps; tanh does not let it through at all
    with pytest.raises(ValueError, match="Hidden value/output changes an output by"):
        verify_pairs(model, pairs, X)
    honest = seeded(0, GroupedAttention)
    assert verify_pairs(honest, find_pairs(honest), X) <= 1e-6


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_small_branch_hides_nothing(size, dtype):
    false = seeded(0, lambda: Branch(torch.tanh, size)).to(dtype)
    true = seeded(0, lambda: Branch(torch.relu, size)).to(dtype)
    with pytest.raises(ValueError, match="fc1/fc2 changes an output by"):
        verify_pairs(false, find_pairs(false), X.to(dtype))
    assert verify_pairs(true, find_pairs(true), X.to(dtype)) == 0.0


def test_large_values_show_what_those_of_order_one_do_not():
    model = seeded(0, lambda: Branch(lambda z: z.clamp(-100.0, 100.0)))
    assert verify_pairs(model, find_pairs(model), X) == 0.0
    with torch.no_grad():
        model.fc1.weight.mul_(1e3)
    with pytest.raises(ValueError, match="fc1/fc2 changes an output by"):
        verify_pairs(model, find_pairs(model), X)


def test_values_that_are_not_finite_are_a_change():
    model = seeded(0, lambda: Branch(lambda z: torch.where(z.abs() > 1e3, torch.nan, z.relu())))
    with pytest.raises(ValueError, match="changes an output by nan"):
        verify_pairs(model, find_pairs(model), X, scale=2.0**20)


def test_pairs_that_the_outputs_do_not_depend_on_are_not_certified():
    message = r"pairs must each have a part in the outputs; .* in place of {} change none"
    model = seeded(0, lambda: Branch(torch.tanh))
    model.gain = 0.0
    with pytest.raises(ValueError, match=message.format("Branch.fc1/fc2")):
        verify_pairs(model, find_pairs(model), X)
    attention = seeded(0, GroupedAttention)
    with pytest.raises(ValueError, match=message.format("GroupedAttention query/key")):
        verify_pairs(attention, find_pairs(attention), X[:, :1])  # one token attends to itself
    with pytest.raises(ValueError, match=message.format("SwiGLU.up_proj/down_proj")):
        verify_pairs(attention, find_pairs(SwiGLU()), X)
    # a gain that float32 cannot see behind, and float64 can
    model.gain = 1e-8
    with pytest.raises(ValueError, match=r"nothing is shown .*torch.float32.*in float64"):
        verify_pairs(model, find_pairs(model), X)
    with pytest.raises(ValueError, match="changes an output by"):
        verify_pairs(model.double(), find_pairs(model), X.double())


def test_everything_is_put_back():
    model = seeded(0, encoder)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    verify_pairs(model, find_pairs(model, "head"), X, scale=3.0)

    def fails_at(call):
        calls = []

        def hook(*_):
            calls.append(1)
            if len(calls) == call:
                raise RuntimeError("no more")

        return model.register_forward_hook(hook)

    for call in (2, 3, 4):
        handle = fails_at(call)
        with pytest.raises(RuntimeError, match="no more"):
            verify_pairs(model, find_pairs(model), X)
        handle.remove()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert torch.equal(random, torch.get_rng_state())
    with pytest.raises(ValueError, match="inputs must give finite outputs"):
        verify_pairs(model, find_pairs(model), X * torch.nan)
    assert all(module.training for module in model.modules())
    with pytest.raises(TypeError, match="must return floating tensors"):
        verify_pairs(nn.Identity(), find_pairs(model), torch.ones(2, dtype=torch.long))


@pytest.mark.parametrize("scale", [1.0, 1.001, 0.75, 0.0, -2.0, math.inf, math.nan, "4"])
def test_scales_that_show_nothing_are_refused(scale):
    model = seeded(0, SwiGLU)
    with pytest.raises((TypeError, ValueError), match="scale must be a"):
        verify_pairs(model, find_pairs(model), X, scale=scale)
