"""Pairs in the layouts of public models, and what a trial of a module leaves untouched."""

import copy
import functools

import pytest
import torch
from architectures import (
    GLU,
    HEADS,
    HIDDEN,
    WIDTH,
    Bert,
    Biased,
    Conv1D,
    Crossed,
    Disentangled,
    Experts,
    Fused,
    FusedWithBiases,
    HalfGate,
    Opt,
    Plain,
)
from modules import GroupedAttention, seeded
from torch import nn

from ipslimit.optim import find_pairs, rescale_pair, verify_pairs
from ipslimit.torchmodels import bare

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(2, 5, WIDTH, generator=GENERATOR, dtype=torch.float64)
ROUTES = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2]]), torch.full((4, 2), 0.5).double()


def nested(*tail):
    return nn.Sequential(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU()), nn.Dropout(), *tail)


class Tower(nn.Sequential):
    """A class of its own, with the forward of Sequential."""


# (module, inputs, pairs per matrix, pairs per head)
SITES = {
    "qkv behind one another": (Fused, (X,), 2, 8),
    "qkv of grouped queries": (lambda: Fused(kv_heads=2), (X,), 2, 4),
    "qkv of one key head": (lambda: Fused(kv_heads=1), (X,), 2, 2),
    "qkv head by head": (lambda: Fused("apart", names=("query_key_value", "dense")), (X,), 8, 8),
    "qkv group by group": (lambda: Fused("apart", kv_heads=2), (X,), 4, 4),
    "qvk in two parts": (lambda: Fused("parts", names=("qkv_proj", "out_proj")), (X,), 4, 8),
    "c_attn of Conv1D": (lambda: Fused(linear=Conv1D, names=("c_attn", "c_proj")), (X,), 2, 8),
    "c_attn head by head": (
        lambda: Fused("apart", linear=Conv1D, names=("c_attn", "c_proj")),
        (X,),
        8,
        8,
    ),
    "qkv with biases beside it": (FusedWithBiases, (X,), 2, 8),
    "relative positions": (Biased, (X,), 2, 8),
    "a layer in parts": (Bert, (X,), 3, 9),
    "an MLP in a layer": (Opt, (X, None), 3, 9),
    "an MLP in a layer that may cross": (lambda: Opt(True), (X, None, X), 5, 17),
    "modules without weights": (Crossed, (X,), 2, 2),
    "an MLP of Conv1D": (lambda: Plain(linear=Conv1D), (X,), 1, 1),
    "an MLP by other names": (lambda: Plain("dense_h_to_4h", "dense_4h_to_h"), (X,), 1, 1),
    "a gate first": (lambda: HalfGate(True), (X,), 1, 1),
    "a gate last": (lambda: HalfGate(False), (X,), 1, 1),
    "a SiLU gate last": (lambda: HalfGate(False, nn.SiLU()), (X,), 1, 1),
    "a Sequential in another": (lambda: nested(nn.Linear(HIDDEN, WIDTH)), (X,), 1, 1),
    "a class made of Sequential": (
        lambda: Tower(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)),
        (X,),
        1,
        1,
    ),
    "a gate in a Sequential": (
        lambda: nn.Sequential(GLU(), nn.Dropout(), nn.Linear(HIDDEN, WIDTH)),
        (X,),
        1,
        1,
    ),
    "experts": (Experts, (X[0, :4], *ROUTES), 3, 3),
    "experts, transposed": (lambda: Experts(True), (X[0, :4], *ROUTES), 3, 3),
}


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("per", ["matrix", "head"])
def test_what_is_found_in_public_layouts_is_a_symmetry(name, per):
    make, inputs, matrices, heads = SITES[name]
    model = seeded(0, make).double().eval()
    pairs = find_pairs(model, per)
    assert len(pairs) == (matrices if per == "matrix" else heads)
    assert len({pair.name for pair in pairs}) == len(pairs) and pairs.unseen == []
    assert verify_pairs(model, pairs, *inputs) == 0.0  # powers of two do not round
    before = model(*inputs)
    for i, pair in enumerate(pairs):
        rescale_pair(pair, 3.0 + i)
    torch.testing.assert_close(model(*inputs), before, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", SITES)
def test_the_first_of_a_pair_feeds_the_second_where_it_says_so(name):
    """What enters the second matrix scales with the first, and does not for query and key."""
    make, inputs, *_ = SITES[name]
    model = seeded(0, make).double().eval()
    seen = {}
    for module in model.modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            module.register_forward_pre_hook(
                lambda m, args: seen.__setitem__(id(m.weight), args[0].clone())
            )
    for pair in find_pairs(model):
        matrix = pair.second.matrix
        model(*inputs)
        entered = seen.get(id(matrix.parameter))
        if entered is None:  # experts have no modules
            continue
        rescale_pair(pair, 4.0)
        model(*inputs)
        columns = matrix.along(1) if pair.feeds else slice(None)
        factor = 4.0 if pair.feeds else 1.0
        scaled = seen[id(matrix.parameter)][..., columns]
        torch.testing.assert_close(scaled, factor * entered[..., columns])


class Shuffled(Fused):
    """Values first: an order that is not tried."""

    def forward(self, x):
        v, q, k = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        z = nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.proj(z.transpose(1, 2).flatten(-2))


class Clamped(GroupedAttention):
    """Queries, keys and values that are clamped, far out."""

    def projected(self, x):
        return (z.clamp(-30.0, 30.0) for z in super().projected(x))


class ThroughATanh(Plain):
    def forward(self, x):
        return self.c_proj(torch.tanh(self.act(self.c_fc(x))))


class Asking(Fused):
    """It asks for something that nobody knows."""

    def forward(self, x, weather):
        return super().forward(x * weather["sun"])


class Optional(Plain):
    """A matrix that is used in some calls alone, between the two."""

    def __init__(self):
        super().__init__()
        self.between = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, thorough=False):
        z = self.act(self.c_fc(x))
        return self.c_proj(self.between(z) if thorough else z)


REFUSED = {
    "keys that meet a vector": (Disentangled, "qk", "changes what Disentangled computes"),
    "an order that is not tried": (Shuffled, "qk", "qkv.weight holds queries, keys and values"),
    "clamped": (Clamped, "qk", r"rescaling \S+ query/key changes what Clamped computes"),
    "clamped values": (Clamped, "vo", r"rescaling \S+ value/output changes what Clamped computes"),
    "a function between": (ThroughATanh, "mlp", "changes what ThroughATanh computes by"),
    "cannot be called": (Asking, "vo", "which are where cannot be told, and Asking could not be"),
    "not used in every call": (Optional, "mlp", r"it holds between \(Linear\).*could not be tried"),
    "GELU in parts": (lambda: Bert(nn.GELU()), "mlp", "activation GELU is not homogeneous"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_only_looks_like_a_symmetry_is_refused_with_the_reason(case):
    make, kind, reason = REFUSED[case]
    with pytest.raises(ValueError, match=rf"(?s)\({kind}\): .*(?:{reason})"):
        find_pairs(seeded(0, make), kinds=(kind,))


def test_what_was_not_looked_at_is_named():
    model = nn.ModuleDict(
        {
            "tokens": nn.Embedding(7, WIDTH),
            "layers": nn.ModuleList([Opt(), Opt()]),
            "mix": nn.ModuleList([nn.Bilinear(2, 2, 2), nn.Bilinear(2, 2, 2)]),
            "head": nn.Linear(WIDTH, 7),
        }
    )
    pairs = find_pairs(model)
    assert pairs.unseen == ["mix.* (Bilinear)", "head (Linear)"] and pairs.refused == []
    with pytest.raises(ValueError, match=r"Not looked at: \['0 \(Bilinear\)'\]|\* \(Bilinear\)"):
        find_pairs(nn.ModuleList([nn.Bilinear(2, 2, 2)]))


def test_a_trial_touches_nothing_of_the_model():
    model = seeded(0, lambda: nn.ModuleList([Bert(), Opt(True), Fused("apart"), Experts()]))
    model[0].eval()
    model[1].self_attn.qkv.weight.requires_grad_(False)
    calls = []
    for module in model.modules():
        module.register_forward_hook(lambda *a: calls.append(a))
        module.register_forward_pre_hook(lambda *a: calls.append(a))
    modes = [module.training for module in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert len(find_pairs(model)) == 3 + 5 + 8 + 3
    assert calls == [] and torch.equal(state, torch.get_rng_state())
    assert [module.training for module in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_trial_serves_all_layers_of_its_kind_and_no_others():
    """Layers that differ by a number only they look at are of two kinds."""

    class Layer(Plain):
        def __init__(self, layer_idx, bound):
            super().__init__()
            self.layer_idx, self.bound, self.calls = layer_idx, bound, CALLS

        def forward(self, x):
            self.calls.append(self.bound)
            return self.c_proj(self.act(self.c_fc(x)).clamp(max=self.bound))

    CALLS = []
    model = nn.ModuleList([Layer(i, float("inf")) for i in range(4)] + [Layer(4, 1.0)])
    pairs = find_pairs(model, refused="skip")
    assert len(pairs) == 4 and len(pairs.refused) == 1 and "4 (mlp)" in pairs.refused[0]
    assert CALLS.count(float("inf")) <= 6  # one of the four was called


@pytest.mark.parametrize("kind", ["bfloat16", "meta", "frozen"])
def test_a_trial_needs_nothing_of_the_parameters(kind):
    model = Fused("apart")
    model = (
        model.requires_grad_(False) if kind == "frozen" else model.to(getattr(torch, kind, kind))
    )
    assert len(find_pairs(model)) == 8


def test_large_experts_are_tried_with_one_for_all(monkeypatch):
    """So that a trial of hundreds needs the memory of one."""
    monkeypatch.setattr(bare, "LARGE", 0)
    copied = bare.Bare(Experts()).module
    assert copied.gate_up_proj.untyped_storage().nbytes() == 4 * copied.gate_up_proj[0].numel()
    for transposed in (False, True):
        model = seeded(0, functools.partial(Experts, transposed)).double()
        assert verify_pairs(model, find_pairs(model), X[0, :4], *ROUTES) == 0.0


def test_a_trial_is_on_the_cpu_in_float32_whatever_is_the_default():
    model = Fused("apart")
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert len(find_pairs(model)) == 8
    finally:
        torch.set_default_dtype(default)


def test_halves_in_which_both_gate_are_one_pair():
    """A ReLU gate lets a scale through too; one of the two halves is taken."""
    [pair] = find_pairs(HalfGate(True, nn.SiLU()))
    assert pair.first.matrix.index == (slice(HIDDEN, 2 * HIDDEN),)
    [pair] = find_pairs(HalfGate(False, nn.SiLU()))
    assert pair.first.matrix.index == (slice(0, HIDDEN),)
    assert len(find_pairs(HalfGate(True))) == len(find_pairs(HalfGate(False))) == 1
