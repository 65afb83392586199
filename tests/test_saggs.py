"""SAGGS: exact transport of every state, an optimizer like any other, refusals by name."""

import copy
import io
import math
import pickle
import warnings

import pytest
import torch
from modules import GroupedAttention, SwiGLU, seeded
from slow_cases import slow_but
from torch import nn

from ipslimit.optim import SAGGS, balance, find_pairs, rescale_pair

X = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(0))
TARGET = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(1))

# eps breaks the symmetry by its own size; here it is below the rounding of float32
TINY = {"eps": 1e-30}
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {**TINY, "weight_decay": 0.1}),
    "AdamW amsgrad": (torch.optim.AdamW, {**TINY, "amsgrad": True}),
    "AdamW foreach": (torch.optim.AdamW, {**TINY, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {**TINY, "fused": True}),
    "AdamW maximize": (torch.optim.AdamW, {**TINY, "maximize": True}),
    "Adam": (torch.optim.Adam, TINY),
    "NAdam": (torch.optim.NAdam, {**TINY, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, TINY),
    "Adamax": (torch.optim.Adamax, TINY),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "RMSprop": (torch.optim.RMSprop, {**TINY, "momentum": 0.9, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, TINY),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = (torch.optim.Muon, {})


class Block(nn.Module):
    """One layer of a modern decoder: grouped attention and a gated MLP."""

    def __init__(self, bias=False):
        super().__init__()
        self.attention, self.mlp = GroupedAttention(bias=bias), SwiGLU(bias=bias)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


def block(bias=True):
    return seeded(3, lambda: Block(bias))


def train(model, optimizer, steps, start=0):
    losses, dtype = [], next(model.parameters()).dtype
    for k in range(start, start + steps):
        optimizer.zero_grad()
        loss = (model((X + 0.1 * k).to(dtype)) - TARGET).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **({"lr": 1e-2} | options))


def saggs(model, **options):
    return SAGGS(adamw(model), find_pairs(model), **({"every": 2} | options))


def same(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def same_state(a, b):
    """Equal to the bit, through nested dicts and lists."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_state, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_scale_as_declared(name):
    """Fed c g, an optimizer keeps the very states that transport makes of those fed g."""
    kind, options = OPTIMIZERS[name]
    gradients = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    a, b = (nn.Parameter(torch.ones(4, 4) * (1 + torch.arange(4.0))) for _ in range(2))
    c, d = (nn.Parameter(p.detach().clone()) for p in (a, b))
    plain, scaled = kind([a, b], lr=1e-3, **options), kind([c, d], lr=1e-3, **options)
    for g in gradients:
        a.grad, b.grad = g[0].clone(), g[1].clone()
        c.grad, d.grad = g[0] / 4, g[1] * 4
        plain.step()
        scaled.step()
    rescale_pair(((a, None), (b, None)), 4.0, plain)
    for p, q in ((a, c), (b, d)):
        for state, value in plain.state[p].items():
            assert same_state(value, scaled.state[q][state]), state
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("name", slow_but(OPTIMIZERS, "AdamW", "SGD", "Muon"))
def test_twins_follow_one_trajectory(name):
    """Networks that differ by powers of two stay the same to the bit once both are balanced."""
    kind, options = OPTIMIZERS[name]
    models, optimizers = [], []
    for _ in range(2):
        model = block(bias=name != "Muon")  # Muon takes matrices alone
        optimizer = kind(model.parameters(), lr=1e-3, **options)
        train(model, optimizer, 3)
        models.append(model)
        optimizers.append(optimizer)
    for i, pair in enumerate(find_pairs(models[1], "head")):
        rescale_pair(pair, 2.0 ** (i + 1), optimizers[1])
    assert not same(*models)
    wrapped = [
        SAGGS(o, find_pairs(m, "head"), every=2) for o, m in zip(optimizers, models, strict=True)
    ]
    losses = [train(m, o, 5, start=3) for m, o in zip(models, wrapped, strict=True)]
    assert losses[0] == losses[1]
    assert same(*models)


def test_without_it_twins_part():
    models = [block(), block()]
    for pair in find_pairs(models[1]):
        rescale_pair(pair, 16.0)
    losses = [train(model, adamw(model), 5) for model in models]
    assert abs(losses[0][0] - losses[1][0]) <= 1e-5
    assert abs(losses[0][-1] - losses[1][-1]) > 1e-2


@pytest.mark.parametrize("scale", [16.0, 1 / 7, 1e3])
def test_rescaling_leaves_the_loss(scale):
    model = block()
    optimizer = adamw(model)
    train(model, optimizer, 3)
    with torch.no_grad():
        before = (model(X) - TARGET).square().mean().item()
        for pair in find_pairs(model):
            rescale_pair(pair, scale, optimizer)
        after = (model(X) - TARGET).square().mean().item()
    assert abs(after - before) <= 1e-5  # float32, as the issue of checkpoints asks


def test_balancing_equalises_norms_and_is_done_then():
    model = block()
    pairs = find_pairs(model)
    first, second = balance(pairs), balance(pairs)
    for pair, a, b in zip(pairs, first, second, strict=True):
        assert a.name == pair.name and not a.skipped
        assert a.scale == pytest.approx(math.sqrt(a.ratio), rel=1e-15)
        assert b.ratio == pytest.approx(1.0, abs=1e-5)  # the rounding of float32 entries
    assert max(abs(math.log(a.ratio)) for a in first) > 0.05
    optimizer = saggs(model)
    assert [a.skipped for a in balance(pairs, optimizer)] == [""] * len(pairs)


def test_soft_balancing_moves_the_log_ratio_by_the_damping():
    model = block().double()
    pairs = find_pairs(model)
    for before, after in zip(
        balance(pairs, damping=0.25), balance(pairs, damping=1.0), strict=True
    ):
        assert math.log(after.ratio) == pytest.approx(0.75 * math.log(before.ratio), rel=1e-9)


def test_a_matrix_of_two_pairs_is_balanced_in_sweeps():
    """In a deep ReLU network the second pair moves what the first balanced; sweeps converge."""
    model = nn.Sequential(
        nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 2)
    ).double()
    with torch.no_grad():
        model[0].weight.mul_(50)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = model(x)
    pairs = find_pairs(model)
    for _ in range(40):
        last = balance(pairs)
    assert max(abs(math.log(b.ratio)) for b in last) < 1e-8
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)


def test_gradients_go_along():
    """Balancing between backward and step is balancing before the forward pass."""
    early, late = block(bias=False).double(), block(bias=False).double()
    optimizers = [adamw(model, eps=1e-30) for model in (early, late)]
    balance(find_pairs(early), optimizers[0])
    train(early, optimizers[0], 1)
    train(late, SAGGS(optimizers[1], find_pairs(late)), 1)
    for a, b in zip(early.parameters(), late.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"every": 2}, [True, False, True, False, True]),
        ({"every": 2, "at_start": False}, [False, False, True, False, True]),
        ({"every": None}, [True, False, False, False, False]),
    ],
)
def test_when_it_balances(options, expected):
    model = block()
    optimizer = saggs(model, **options)
    found = []
    for k in range(5):
        found.append(optimizer.due())
        optimizer.balanced = []
        train(model, optimizer, 1, start=k)
        assert bool(optimizer.balanced) == found[-1]
    assert found == expected


def test_resume_is_exact_to_the_bit():
    model = block()
    optimizer = saggs(model, every=3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for k in range(4):
        train(model, optimizer, 1, start=k)
        schedule.step()
    file = io.BytesIO()
    kept = {"model": model, "optimizer": optimizer, "schedule": schedule}
    torch.save({name: thing.state_dict() for name, thing in kept.items()}, file)
    train(model, optimizer, 4, start=4)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = block()
    resumed = saggs(other, every=3)
    schedule = torch.optim.lr_scheduler.StepLR(resumed, 2, gamma=0.5)
    for name, thing in {"model": other, "optimizer": resumed, "schedule": schedule}.items():
        thing.load_state_dict(saved[name])
    assert resumed.steps == 4
    train(other, resumed, 4, start=4)
    assert same(model, other)
    assert same_state(optimizer.state_dict(), resumed.state_dict())


def test_state_of_the_plain_optimizer_is_loaded_and_balanced_first():
    model = block()
    plain = adamw(model)
    train(model, plain, 2)
    optimizer = saggs(model)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.due()
    adamw(model).load_state_dict(optimizer.state_dict())  # and the other way round


def test_copies_are_whole_and_apart():
    model = block()
    optimizer = saggs(model)
    train(model, optimizer, 3)
    for copier in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        other_model, other = copier((model, optimizer))
        assert other.steps == 3 and other.pairs[0].parts[0].parameter is not model.mlp
        reference, wrapped = copy.deepcopy((model, optimizer))
        train(other_model, other, 3, start=3)
        train(reference, wrapped, 3, start=3)
        assert same(other_model, reference)
    assert optimizer.steps == 3


def test_schedulers_closures_groups_and_hooks_work():
    model = block()
    inner = torch.optim.AdamW([{"params": model.attention.parameters(), "lr": 1e-2}], lr=1e-3)
    with pytest.raises(ValueError, match=r"mlp.up_proj.weight .* is not among its parameters"):
        SAGGS(inner, find_pairs(model))
    optimizer = SAGGS(inner, find_pairs(model.attention))
    optimizer.add_param_group({"params": model.mlp.parameters()})
    assert optimizer.param_groups is inner.param_groups and len(optimizer.param_groups) == 2
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_post_hook(lambda _, state: state | {"mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(state.pop("mine")))

    def closure():
        optimizer.zero_grad()
        loss = (model(X) - TARGET).square().mean()
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 1e-3], total_steps=4)
        losses = []
        for _ in range(3):
            losses.append(optimizer.step(closure).item())
            schedule.step()
    assert losses[-1] < losses[0]
    assert calls == ["before", "after"] * 3
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls[-1] == 1 and "SAGGS(2 pairs, every=100" in repr(optimizer)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_grad_scaler_skips_count_for_nothing(fused):
    model = block()
    optimizer = SAGGS(adamw(model, fused=fused), find_pairs(model), every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    reference = block()
    plain = SAGGS(adamw(reference, fused=fused), find_pairs(reference), every=2)
    for k in range(4):
        optimizer.zero_grad()
        loss = (model(X + 0.1 * k) - TARGET).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        before = [p.clone() for p in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(loss.detach() * sum(p.sum() for p in model.parameters())).backward()
        next(model.parameters()).grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update(4.0)
        assert all(map(torch.equal, before, model.parameters()))
    assert optimizer.steps == 4
    train(reference, plain, 4)
    # scaling by powers of two is exact
    assert same(model, reference)


def test_frozen_halves_are_left_alone_and_told():
    model = block()
    model.mlp.down_proj.requires_grad_(False)
    kept = model.mlp.up_proj.weight.clone(), model.mlp.down_proj.weight.clone()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = SAGGS(torch.optim.AdamW(trainable), find_pairs(model))
    told = {b.name: b.skipped for b in optimizer.balance()}
    assert told.pop("mlp.up_proj/down_proj") == "mlp.down_proj.weight is frozen"
    assert set(told.values()) == {""}
    assert torch.equal(kept[0], model.mlp.up_proj.weight)
    model.mlp.up_proj.requires_grad_(False)
    train(model, optimizer, 1)
    assert torch.equal(kept[1], model.mlp.down_proj.weight)


@pytest.mark.parametrize("value, reason", [(0.0, "a norm is zero"), (math.nan, "not finite")])
def test_pairs_without_a_ratio_are_skipped_and_told(value, reason):
    model = block()
    with torch.no_grad():
        model.mlp.down_proj.weight.fill_(value)
    told = balance(find_pairs(model))
    assert [reason in b.skipped for b in told] == [False, False, True]
    assert told[-1].scale == 1.0


def test_tied_embeddings_are_no_matter():
    model = nn.ModuleDict({"block": Block(), "in": nn.Embedding(7, 16), "out": nn.Linear(16, 7)})
    model["out"].weight = model["in"].weight
    optimizer = SAGGS(adamw(model), find_pairs(model))
    before = model["in"].weight.clone()
    optimizer.balance()
    assert torch.equal(before, model["in"].weight)


def test_half_precision_is_balanced_in_full():
    model = block().to(torch.bfloat16)
    optimizer = saggs(model)
    optimizer.balance()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    # bfloat16 keeps 8 bits, and the rounding of many entries averages out in the norm
    assert all(b.ratio == pytest.approx(1.0, abs=1e-2) for b in optimizer.balance())


def group(model, **options):
    return [{"params": model.parameters(), **options}]


def test_moments_too_small_for_their_dtype_do_no_harm():
    """Squares of gradients underflow long before the gradients do."""
    a, b = parameters = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters)
    a.grad, b.grad = torch.full((2, 2), 1e-20), torch.ones(2, 2)
    optimizer.step()
    assert 0 < float(optimizer.state[a]["exp_avg_sq"].max()) < torch.finfo(torch.float32).tiny
    rescale_pair(((a, None), (b, None)), 16.0, optimizer)
