"""Averages of models whose centres move and whose pairs are balanced are averages of functions."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from builders import normal
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ipslimit.nn import Recentring, calibrate_centres, center_linears, restore_linears
from ipslimit.optim import SAGGS, balance, carry_moves, find_pairs, rescale_pair

F64 = torch.float64
DECAY = 0.8


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).to(F64)


def batch(k):
    return 3.0 + normal(8, 4, seed=k)


def outputs(model):
    return model(batch(99)).detach()


def train(model, optimizer, steps, each=lambda: None, first=0):
    for k in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(k)).square().sum(-1).mean().backward()
        optimizer.step()
        each()


class Ema:
    """An average in a module of its own, updated by hand."""

    def __init__(self, model):
        self.module = copy.deepcopy(model).requires_grad_(False)

    def update_parameters(self, model):
        for average, p in zip(self.module.parameters(), model.parameters()):
            average.lerp_(p.detach(), 1.0 - DECAY)

    def function(self, _):
        return outputs(self.module)

    def carried_by(self, model):
        return carry_moves(model, self.module)


class Shadow(Ema):
    """Tensors, as some libraries keep them, which put new ones in their place."""

    def __init__(self, model):
        self.shadow = [p.detach().clone() for p in model.parameters()]

    def update_parameters(self, model):
        pairs = zip(self.shadow, model.parameters())
        self.shadow = [a.lerp(p.detach(), 1.0 - DECAY) for a, p in pairs]

    def function(self, model):
        twin = copy.deepcopy(model)
        for p, average in zip(twin.parameters(), self.shadow):
            p.data.copy_(average)
        return outputs(twin)

    def carried_by(self, model):
        return carry_moves(model, lambda: self.shadow)


class Averaged(AveragedModel):
    """torch's, with its first update made, which copies."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.update_parameters(model)

    def function(self, _):
        return outputs(self)

    def carried_by(self, model):
        return carry_moves(model, self)


AVERAGES = {
    "ema": lambda m: Averaged(m, multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
    "ema with buffers": lambda m: Averaged(
        m, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True
    ),
    "swa": Averaged,
    "swa with buffers": lambda m: Averaged(m, use_buffers=True),
    "by hand": Ema,
    "tensors": Shadow,
}
every_average = pytest.mark.parametrize("kind", AVERAGES)


def linear(model):
    """The equal network of nn.Linears, whose parameters are invariant."""
    return restore_linears(copy.deepcopy(model))


@every_average
@pytest.mark.parametrize("every", [1, 3])
def test_averages_of_centred_layers_are_those_of_the_linears_they_equal(kind, every):
    model = center_linears(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    Recentring(model, optimizer, every=every, decay=0.5)
    average, plain = AVERAGES[kind](model), AVERAGES[kind](linear(model))
    average.carried_by(model)

    def update():
        average.update_parameters(model)
        plain.update_parameters(linear(model))

    train(model, optimizer, 12, update)
    expected = plain.function(linear(model))
    torch.testing.assert_close(average.function(model), expected, rtol=0, atol=1e-14)


def unbalanced():
    model = network()
    rescale_pair(find_pairs(model)[0], 16.0)
    return model


@pytest.mark.filterwarnings("ignore:a copy of the model")  # the average that is compared with
@every_average
def test_averages_of_balanced_pairs_are_those_in_one_balance(kind):
    """The parameters of every step are brought into the balance of the first, and averaged."""
    model = unbalanced()
    optimizer = SAGGS(torch.optim.AdamW(model.parameters(), lr=0.05), find_pairs(model), every=3)
    average, fixed = AVERAGES[kind](model), AVERAGES[kind](model)
    average.carried_by(model)
    carry_moves(network(1), fixed.module if hasattr(fixed, "module") else lambda: fixed.shadow)
    factors = [1.0]

    def update():
        if optimizer.balanced:
            factors.append(optimizer.balanced[0].scale)
            optimizer.balanced = []
        twin = copy.deepcopy(model)
        rescale_pair(find_pairs(twin)[0], float(1.0 / torch.tensor(factors, dtype=F64).prod()))
        average.update_parameters(model)
        fixed.update_parameters(twin)

    train(model, optimizer, 10, update)
    assert len(factors) == 5 and factors[1] < 0.1
    torch.testing.assert_close(average.function(model), fixed.function(model), rtol=1e-12, atol=0)


def test_every_way_to_move_a_model_is_carried():
    model = center_linears(network())
    ema = Ema(model)
    handle = ema.carried_by(model)
    with torch.no_grad():
        for p in ema.module.parameters():
            p.mul_(1.1)
    before = outputs(ema.module)
    model[0].recentre_(normal(4, seed=1))
    with calibrate_centres(model), torch.no_grad():
        model(batch(0))
    assert torch.equal(ema.module[2].centre, model[2].centre)
    pair = ((model[0].weight, model[0].beta), (model[2].weight, None))
    model[2].centre.zero_()
    ema.module[2].centre.zero_()
    other = outputs(ema.module)
    rescale_pair(pair, 3.0)
    balance([pair], damping=0.5)
    torch.testing.assert_close(outputs(ema.module), other, rtol=1e-13, atol=0)
    assert not torch.allclose(before, other)  # centres were zeroed in between
    handle.remove()
    handle.remove()
    weight = ema.module[0].weight.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rescale_pair(pair, 3.0)
        model[0].recentre_(normal(4, seed=2))
    assert torch.equal(ema.module[0].weight, weight)
    assert not torch.equal(ema.module[0].centre, model[0].centre)


def test_an_average_that_was_elsewhere_is_brought_to_the_centres_of_the_model():
    model = center_linears(network())
    ema = Ema(model)
    model[0].recentre_(normal(4, seed=1))
    before = outputs(ema.module)
    ema.carried_by(model)
    assert torch.equal(ema.module[0].centre, model[0].centre)
    torch.testing.assert_close(outputs(ema.module), before, rtol=0, atol=1e-14)


def test_to_carry_twice_is_to_carry_once():
    model = unbalanced()
    ema = Ema(model)
    first, _ = ema.carried_by(model), ema.carried_by(model)
    before = outputs(ema.module)
    balance(find_pairs(model))
    assert torch.equal(ema.module[0].weight, model[0].weight)
    torch.testing.assert_close(outputs(ema.module), before, rtol=1e-13, atol=0)
    first.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an average by hand, of pairs, is not seen
        rescale_pair(find_pairs(model)[0], 2.0)
    assert not torch.equal(ema.module[0].weight, model[0].weight)


def test_averages_are_not_kept_alive():
    model = center_linears(network())
    Ema(model).carried_by(model)
    gc.collect()
    model[0].recentre_(normal(4, seed=1))
    model = unbalanced()
    average = Ema(model)
    carry_moves(model, average.module)
    gone = weakref.ref(average.module)
    del average
    gc.collect()
    assert gone() is None
    balance(find_pairs(model))


def saggs(model):
    return SAGGS(torch.optim.AdamW(model.parameters(), lr=0.05), find_pairs(model), every=2)


def recentred(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model.policy = [Recentring(model, optimizer)]  # in a list: it is no module
    return optimizer


WARNED = {
    "AveragedModel of balanced pairs": (unbalanced, saggs, AVERAGES["ema"], "rescaling of pairs"),
    "average by hand of balanced pairs": (unbalanced, saggs, Ema, "rescaling of pairs"),
    "AveragedModel of centred layers": (
        lambda: center_linears(network()),
        recentred,
        AVERAGES["ema"],
        "motion of its centre",
    ),
    "average by hand of centred layers": (
        lambda: center_linears(network()),
        recentred,
        Ema,
        "motion of its centre",
    ),
}


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("kind", WARNED)
def test_averages_that_do_not_follow_are_warned_of_once(kind, carried):
    make, optimizer_of, averaged, message = WARNED[kind]
    model = make()
    average = averaged(model)
    optimizer = optimizer_of(model)
    if carried:
        average.carried_by(model)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(model, optimizer, 6, lambda: average.update_parameters(model))
    ours = [str(w.message) for w in found if "carry_moves" in str(w.message)]
    layers = 1 if "pairs" in kind else 2
    assert len(ours) == (0 if carried else layers)
    assert all(message in text and "carry_moves(model, average)" in text for text in ours)


def test_no_other_copies_are_warned_of():
    """Wrappers of the model itself, averages of another one, copies that are trained, snapshots."""
    model = center_linears(unbalanced())
    restored = unbalanced()
    holder = nn.DataParallel(restored)
    other = AveragedModel(nn.Sequential(nn.Linear(3, 3)))
    twin, snapshot, loaded = (copy.deepcopy(model) for _ in range(3))
    other_twin, frozen = copy.deepcopy(restored), copy.deepcopy(restored)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair = saggs(restored), saggs(other_twin)
        for k in range(6):
            for net, optimizer in zip((restored, other_twin), pair):
                train(net, optimizer, 1, lambda net=net: net.zero_grad(), first=k)
        parts = recentred(model), recentred(twin)
        for k in range(3):
            train(model, parts[0], 1, first=k)
            train(twin, parts[1], 1, first=k)
            loaded.load_state_dict(model.state_dict())
    assert (holder.module, len(list(other.parameters())), len(snapshot)) == (restored, 2, 3)
    assert len(frozen) == 3


def test_averages_of_state_dicts_are_averages_of_functions():
    models = [center_linears(network(seed)) for seed in range(3)]
    for k, model in enumerate(models):
        with calibrate_centres(model), torch.no_grad():
            model(batch(k) * (1.0 + k))
    states = [model.state_dict() for model in models]
    mean = {name: sum(state[name] for state in states) / 3 for name in states[0]}
    found = center_linears(network(7))
    found.load_state_dict(mean)
    plain = network(7)
    plain.load_state_dict(
        {
            name: sum(linear(model).state_dict()[name] for model in models) / 3
            for name in linear(models[0]).state_dict()
        }
    )
    torch.testing.assert_close(outputs(found), outputs(plain), rtol=0, atol=1e-13)
    again = center_linears(network(7))
    again.load_state_dict(states[0])
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), states[0].values()))


def test_a_linear_loads_the_state_of_a_centred_layer_but_for_what_it_lacks():
    """As transformers' from_pretrained does: entries that it does not know are left out."""
    model = center_linears(network())
    model[0].recentre_(normal(4, seed=1))
    plain = network(seed=1)
    missing, unexpected = plain.load_state_dict(model.state_dict(), strict=False)
    assert not missing and set(unexpected) == {
        f"{i}.{n}" for i in (0, 2) for n in ("beta", "centre")
    }
    assert torch.equal(outputs(plain), outputs(model))


CENTRED = center_linears(network())


@pytest.mark.parametrize(
    ("average", "error", "message"),
    [
        (3, TypeError, "average must be a module, or a function"),
        (CENTRED, ValueError, "average must be a copy of the model; got the model's own 0.weight"),
        (network(), ValueError, "average must have the parameters of the model.*without '0.beta'"),
        (
            center_linears(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))),
            ValueError,
            r"shapes of the model; got .*5, 4.* for 0.weight \(6, 4\)",
        ),
        (lambda: [torch.zeros(3)], ValueError, "as many tensors.*got 1 for 4"),
        (lambda: [torch.zeros(3)] * 4, ValueError, "shapes of the model"),
        (lambda: [3] * 4, ValueError, "shapes of the model"),
    ],
)
def test_bad_averages_are_named(average, error, message):
    with pytest.raises(error, match=message):
        carry_moves(CENTRED, average)
