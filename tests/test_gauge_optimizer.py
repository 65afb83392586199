"""GaugeAdamW for any torch model: the rule's numbers, twins, and a citizen of torch."""

import copy
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from builders import F64, assert_to_rounding, normal, random_heads
from test_rule_gauge import deep
from test_rules import gradients
from test_saggs import TARGET, X, adamw, block, same, same_state, train
from torch import nn

import ipslimit
from ipslimit.optim import GaugeAdamW, Pair, Part, find_pairs, rescale_pair

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}

# (query, bias | key, bias) and (value, bias | output) by their names in heads
PAIRS = (("q", "k", "bk"), ("v", "o", "none"))


def gauge(model, per="matrix", **options):
    return GaugeAdamW(model.parameters(), find_pairs(model, per), **OPTIONS | options)


def rescaled(model, *factors, per="matrix"):
    """The same function in another gauge; by the factors in turn."""
    for i, pair in enumerate(find_pairs(model, per)):
        rescale_pair(pair, factors[i % len(factors)])
    return model


def double(seed=0):
    return block().double()


# ------------------------------------------------------------------ the rule's numbers


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", ["heads", "chain"])
def test_it_is_the_rule_on_the_same_numbers(kind, foreach):
    units = random_heads(H=1) if kind == "heads" else deep(H=1)
    rule = ipslimit.GaugeAdamW(0.05, (0.8, 0.95), 1e-3, 0.3)
    parts = {name: nn.Parameter(part[0].clone()) for name, part in units.parts().items()}
    pairs = [
        tuple((parts[a], tuple(parts[name] for name in others)) for a, *others in pair)
        for pair in units.layout.pairs
    ]
    optimizer = GaugeAdamW(parts.values(), pairs, 0.05, (0.8, 0.95), 1e-3, 0.3, foreach=foreach)
    state = rule.init(units)
    for k, g in enumerate(gradients(units, 10), start=1):
        units, state = rule.update(units, state, g, k)
        for name, part in g.parts().items():
            parts[name].grad = part[0].clone()
        optimizer.step()
    for name, part in units.parts().items():
        assert_to_rounding(parts[name].detach(), part[0], 1000, name)
        for slot, moment in (("exp_avg", "m"), ("exp_avg_sq", "v")):
            there = units.with_packed(state[moment]).parts()[name][0]
            assert_to_rounding(optimizer.state[parts[name]][slot], there, 1000, name)
    assert all(not p.is_leaf or p.grad_fn is None for p in parts.values())


def test_rates_by_matrix_are_param_groups_and_the_largest_is_that_of_the_guard():
    units = random_heads(H=1)
    units.o.mul_(1e-4)  # so that G is below lr |1|
    rates = {"q": 0.05, "v": 0.02, "default": 0.03}
    rule = ipslimit.GaugeAdamW(rates, eps=1e-3)
    parts = {name: nn.Parameter(part[0].clone()) for name, part in units.parts().items()}
    matrices = {"bq": "q", "bv": "v"}
    groups = [
        {"params": [p], "lr": rates.get(matrices.get(name, name), rates["default"])}
        for name, p in parts.items()
    ]
    pairs = [((parts[a], parts[f"b{a}"]), (parts[b], parts.get(bias))) for a, b, bias in PAIRS]
    optimizer, state = GaugeAdamW(groups, pairs, eps=1e-3), rule.init(units)
    for k, g in enumerate(gradients(units, 5), start=1):
        units, state = rule.at(k, units.layout, 0.5).update(units, state, g, k)
        for name, part in g.parts().items():
            parts[name].grad = part[0].clone()
        optimizer.step()
    for name, part in units.parts().items():
        assert_to_rounding(parts[name].detach(), part[0], 1000, name)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("foreach", [None, False])
def test_what_is_in_no_pair_is_trained_by_torch_to_the_bit(foreach, maximize):
    models = [double(), double()]
    options = OPTIONS | {"maximize": maximize}
    pairs, way = find_pairs(models[0], kinds=["qk"]), {"foreach": foreach}
    one = GaugeAdamW(models[0].parameters(), pairs, **options, **way)
    way = way if foreach is not None else {"fused": True}  # on a CPU
    two = torch.optim.AdamW(models[1].parameters(), **options, **way)
    for model, optimizer in zip(models, (one, two), strict=True):
        train(model, optimizer, 1)
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        paired = "q_proj" in name or "k_proj" in name
        assert torch.equal(p, q) != paired, name


def test_maximising_is_minimising_the_negative():
    models = [double(), double()]
    for model, sign in zip(models, (1.0, -1.0), strict=True):
        optimizer = gauge(model, maximize=sign < 0)
        for _ in range(3):
            optimizer.zero_grad()
            (sign * model(X.double()).square().mean()).backward()
            optimizer.step()
    assert same(*models)


# ------------------------------------------------------------------ twins


@pytest.mark.parametrize("per", ["matrix", "head"])
@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_twins_train_alike(per, eps):
    """With grouped queries, biases and a gated MLP, in one gauge and in another."""
    model = double()
    losses = train(model, gauge(model, per, eps=eps), 10)
    for factors in ((2.0, 0.25, 8.0), (0.25,)):
        other = rescaled(double(), *factors, per=per)
        assert train(other, gauge(other, per, eps=eps), 10) == losses
        assert not same(model, other)  # nothing is balanced
    for factor in (3.7, 100.0):
        other = rescaled(double(), factor, per=per)
        found = train(other, gauge(other, per, eps=eps), 10)
        assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) < 1e-14
    other = rescaled(double(), 4.0, per=per)
    plain = [train(m, adamw(m, eps=eps), 10) for m in (double(), other)]
    assert abs(plain[0][-1] - plain[1][-1]) > 1e-2


def test_so_do_the_layers_of_a_deep_relu_network_which_are_one_chain():
    def network():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = [nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 16)]
            return nn.Sequential(*layers).double()

    runs = {}
    for factors in ((1.0,), (4.0, 0.5), (3.7, 100.0)):
        model = rescaled(network(), *factors)
        runs[factors] = train(model, gauge(model), 20)
    assert len(gauge(network())._plan.names) == 1
    assert runs[4.0, 0.5] == runs[1.0,]
    difference = zip(runs[3.7, 100.0], runs[1.0,], strict=True)
    assert max(abs(a - b) for a, b in difference) < 1e-14


@pytest.mark.parametrize("width", [16, 128])
@pytest.mark.parametrize("per", ["matrix", "head"])
def test_so_do_packed_projections_small_and_large(width, per):
    """Whose rows are scaled entry by entry, or taken by themselves."""

    def layer():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            options = {"activation": "relu", "dropout": 0.0, "batch_first": True, "dtype": F64}
            return nn.TransformerEncoderLayer(width, 4, 2 * width, **options)

    x, wanted = normal(2, 3, width, seed=1), normal(2, 3, width, seed=2)
    runs = {}
    for factors in ((1.0,), (4.0, 0.5), (3.7, 100.0)):
        model, losses = rescaled(layer(), *factors, per=per), []
        optimizer = gauge(model, per)
        for _ in range(8):
            optimizer.zero_grad()
            loss = (model(x) - wanted).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        runs[factors] = losses
    pieces = optimizer._plan.places[model.self_attn.in_proj_weight]
    assert len(pieces) == (3 if width > 16 and per == "matrix" else 1)
    assert runs[4.0, 0.5] == runs[1.0,]
    difference = zip(runs[3.7, 100.0], runs[1.0,], strict=True)
    assert max(abs(a - b) for a, b in difference) < 1e-14


def test_low_precision_and_float32_are_as_exact_for_powers_of_two():
    for dtype in (torch.float32, torch.bfloat16):
        models = [block().to(dtype), rescaled(block().to(dtype), 4.0, 0.5)]
        losses = [train(model, gauge(model), 5) for model in models]
        assert losses[0] == losses[1]


def test_rescaling_on_the_way_leaves_the_averages_and_the_run_as_they_are():
    models = [double(), double()]
    optimizers = [gauge(model) for model in models]
    losses = [train(m, o, 3) for m, o in zip(models, optimizers, strict=True)]
    for pair in find_pairs(models[1]):
        rescale_pair(pair, 8.0, optimizers[1])
    losses = [train(m, o, 3, start=3) for m, o in zip(models, optimizers, strict=True)]
    assert losses[0] == losses[1] and not same(*models)


# ------------------------------------------------------------------ what guards it


class LowRank(nn.Module):
    """What is added to a frozen layer: zero at first, as B is."""

    def __init__(self, scale=1.0, b=0.0):
        super().__init__()
        self.A, self.B = (nn.Linear(n, k, bias=False, dtype=F64) for n, k in ((16, 4), (4, 16)))
        with torch.no_grad():
            self.A.weight.copy_(X[:, 0].double() * scale)
            self.B.weight.fill_(b / scale)

    def forward(self, x):
        return x + self.B(self.A(x))

    def optimizer(self, **options):
        return GaugeAdamW(
            self.parameters(), [((self.A.weight, None), (self.B.weight, None))], **options
        )


def test_a_matrix_that_starts_at_zero_leaves_it_in_every_gauge_alike():
    models = [LowRank(), LowRank(64.0)]
    losses = [train(model, model.optimizer(lr=1e-2), 30) for model in models]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0] - 0.1


def test_a_nearly_zero_matrix_does_not_throw_its_partner_away():
    model = LowRank(b=1e-8)
    before = model.A.weight.detach().clone()
    train(model, model.optimizer(lr=1e-3, weight_decay=0.0), 1)
    assert 0 < float((model.A.weight.detach() - before).norm()) <= float(before.norm())


def test_two_zeros_are_left_to_the_decay_and_counted():
    model = LowRank()
    with torch.no_grad():
        model.A.weight.zero_()
    optimizer = model.optimizer(lr=1e-2)
    train(model, optimizer, 3)
    assert optimizer.skipped == {"pairs[0]": 3}
    assert not model.A.weight.any() and not model.B.weight.any()


def test_a_frozen_half_counts_and_stays():
    models = [double(), rescaled(double(), 4.0)]
    losses = []
    for model in models:
        frozen = model.attention.k_proj.weight.requires_grad_(False).clone()
        losses.append(train(model, gauge(model), 4))
        assert torch.equal(model.attention.k_proj.weight, frozen)
    assert losses[0] == losses[1]


# ------------------------------------------------------------------ an optimizer like any other


def test_a_run_goes_on_from_its_state_dict_to_the_bit():
    model = block()
    optimizer = gauge(model, "head")
    train(model, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    other = block()
    again = gauge(other, "head", lr=1.0)
    other.load_state_dict(kept["model"])
    again.load_state_dict(kept["optimizer"])
    assert train(model, optimizer, 3, start=3) == train(other, again, 3, start=3)
    assert same(model, other)
    assert same_state(optimizer.state_dict(), again.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_train_their_own_parameters(copied):
    model = block()
    optimizer = gauge(model, "head")
    train(model, optimizer, 2)
    other, again = copied((model, optimizer))
    losses = train(model, optimizer, 2, start=2)
    assert train(other, again, 2, start=2) == losses and same(model, other)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_averages_of_adamw_are_brought_to_the_gauge(options):
    """Twins of one AdamW run, their averages rescaled along, go on alike."""
    losses = []
    for factor in (1.0, 4.0):
        model = double()
        before = adamw(model, **options)
        train(model, before, 3)
        for pair in find_pairs(model):
            rescale_pair(pair, factor, before)
        optimizer = gauge(model, lr=1.0)
        optimizer.load_state_dict(before.state_dict())
        assert optimizer.param_groups[0]["lr"] == 1e-2
        losses.append(train(model, optimizer, 3, start=3))
    assert losses[0] == losses[1]
    q = model.attention.q_proj.weight
    s = (q.norm() / model.attention.k_proj.weight.norm()).sqrt()
    assert not torch.equal(s, torch.ones_like(s))


def test_schedulers_closures_groups_and_tensor_rates_work():
    model = block()
    groups = [{"params": model.attention.parameters(), "lr": torch.tensor(1e-3)}]
    pairs = find_pairs(model)
    with pytest.raises(ValueError, match="optimizer must hold every parameter of the pairs"):
        GaugeAdamW(groups, pairs)
    optimizer = GaugeAdamW([*groups, {"params": model.mlp.parameters()}], pairs)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loss = optimizer.step(lambda: (model(X) - TARGET).square().mean())
    schedule.step()
    assert loss > 0 and float(optimizer.param_groups[0]["lr"]) == pytest.approx(5e-4)
    kept = copy.deepcopy(model.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 1)
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())


# ------------------------------------------------------------------ refusals


def shared_rows(model):
    w = model.mlp.down_proj.weight
    up, gate = model.mlp.up_proj.weight, model.mlp.gate_proj.weight
    top = Part(w, (slice(0, 8),), "top")
    return [Pair((up, None), (w, None), "all"), Pair((top, None), (gate, None), "some")]


REFUSED = {
    "lr": (lambda m: gauge(m, lr=-1.0), "lr must be"),
    "lr of two": (lambda m: gauge(m, lr=torch.ones(2)), r"lr must be.*a tensor \(2,\)"),
    "betas": (lambda m: gauge(m, betas=(0.9, 1.0)), r"betas\[1\] must be"),
    "eps": (lambda m: gauge(m, eps=-1.0), "eps must be"),
    "weight_decay": (lambda m: gauge(m, weight_decay=-0.1), "weight_decay must be"),
    "maximize": (lambda m: gauge(m, maximize=1), "maximize must be"),
    "pairs": (lambda m: GaugeAdamW(m.parameters(), []), "pairs must hold at least one pair"),
    "rows": (lambda m: GaugeAdamW(m.parameters(), shared_rows(m)), "meet in whole matrices"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_in_one_line(name):
    make, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        make(block())
    assert len(str(caught.value).splitlines()) == 1


def test_pairs_that_close_a_ring_are_named():
    a, b = (nn.Parameter(torch.ones(4, 4)) for _ in "ab")
    pairs = [Pair((Part(a, name="a"), None), (Part(b, name="b"), None), "one")]
    pairs += [Pair((Part(b, name="b"), None), (Part(a, name="a"), None), "two")]
    with pytest.raises(ValueError, match=r"pairs must not close a ring; got one through \(a \| b"):
        GaugeAdamW([a, b], pairs)


def test_sharded_parameters_are_refused_by_name():
    by_rows = SimpleNamespace(is_shard=lambda dim: dim == 0, is_replicate=lambda: False)
    sharded = type("DTensor", (nn.Parameter,), {"placements": (by_rows,)})(torch.ones(4, 4))
    other = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"pairs must have whole parameters; got pairs\[0\]\[1\]"):
        GaugeAdamW([other, sharded], [((other, None), (sharded, None))])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda m: torch.optim.SGD(m.parameters(), 0.1), "param group 0 is another optimizer's"),
        (lambda m: torch.optim.NAdam(m.parameters(), 0.1), "param group 0 is another optimizer's"),
        (lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), "without amsgrad=True"),
        (lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1), "decoupled_weight_decay=F"),
    ],
)
def test_states_of_other_optimizers_are_refused(make, message):
    model = block()
    other, optimizer = make(model), gauge(model)
    train(model, other, 1)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(other.state_dict())
    optimizer.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
