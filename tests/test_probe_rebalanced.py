"""A probe beside SAGGS: balancing is no motion, and what is kept follows the new units."""

import copy

import numpy as np
import pytest
import torch
from builders import normal
from modules import GroupedAttention, SwiGLU, seeded
from test_boundary_probe import adam, batch, network, train
from torch import nn

from ipslimit import BoundaryProbe
from ipslimit.optim import SAGGS, SBOAdamW, balance, find_pairs, rescale_pair


class Decoder(nn.Module):
    """All kinds of pairs: packed and separate projections, an MLP and a gated one."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 4, 24, 0.0, "relu", batch_first=True)
        self.attention, self.mlp = GroupedAttention(bias=True), SwiGLU(bias=True)

    def forward(self, x):
        x = self.encoder(x)
        x = x + self.attention(x)
        return x + self.mlp(x)


def decoder():
    return seeded(0, Decoder).double()


def gradients(model, k):
    for p in model.parameters():
        p.grad = None
    model(1.0 + normal(2, 5, 16, seed=k)).square().mean().backward()


INNER = {
    "AdamW": lambda m, lr: torch.optim.AdamW(m.parameters(), lr=lr, eps=1e-30, weight_decay=0.0),
    "SBO": lambda m, lr: SBOAdamW(m, lr=lr, eps=1e-30, weight_decay=0.0, exclude="*.out_proj"),
    "SBO for some": lambda m, lr: SBOAdamW(  # others are the probe's own
        m, lr=lr, eps=1e-30, weight_decay=0.0, exclude=("*.out_proj", "encoder.linear2", "*_proj")
    ),
}


@pytest.mark.parametrize("kind", INNER)
def test_balancing_is_no_motion_of_the_boundary(kind):
    """Twins that balancing makes one show the same numbers, however far apart they were."""
    histories = []
    for factor in (1.0, 8.0):
        model = decoder()
        pairs = find_pairs(model)
        for pair in pairs:
            rescale_pair(pair, factor)
        optimizer = SAGGS(INNER[kind](model, 1e-3), pairs, every=2)
        probe = BoundaryProbe(model, optimizer)
        for k in range(5):
            gradients(model, k)
            optimizer.step()
        histories.append(probe.history())
    for name, values in histories[0].items():
        np.testing.assert_array_equal(histories[1][name], values, err_msg=name)
    # a step of 1e-3 an entry; the balancing of the far twin moves some boundary by more than 1
    assert np.nanmax(histories[1]["energy"]) < 1e-2


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("per", ["matrix", "head"])
@pytest.mark.parametrize("kind", INNER)
def test_what_is_kept_follows_a_rescaled_pair(kind, per, wrapped):
    """Without a step nothing has moved since the first one, whatever the units now."""
    found = []
    for scales in ((1.0, 1.0), (3.0, 0.2)):
        model = decoder()
        inner = INNER[kind](model, 0.0)
        pairs = find_pairs(model, per)
        if wrapped:
            optimizer = SAGGS(inner, pairs, every=None, at_start=False)
            probe = BoundaryProbe(model, optimizer)
        else:  # watched before it was wrapped
            probe = BoundaryProbe(model, inner)
            optimizer = SAGGS(inner, pairs, every=None, at_start=False)
        for k in range(3):
            if k:
                rescale_pair(pairs[k], scales[0], optimizer)
            gradients(model, 0)
            for pair in pairs:  # the rows have been seen
                rescale_pair(pair, scales[1], inner)
            optimizer.step()
        history = probe.history()
        assert history["drift"].max() < 1e-12 and history["energy"].max() == 0.0
        found.append(history)
        probe.remove()
    if per == "matrix":  # all outputs of a part are scaled alike, so that its ratios stay
        ratios = [history["R1"][:, ~probe.is_key] for history in found]
        np.testing.assert_allclose(*ratios, rtol=1e-9)


def test_the_fixed_centre_is_that_of_the_first_step_in_the_units_of_now():
    model = network()
    model[1] = model[3] = nn.ReLU()
    start, inner = copy.deepcopy(model), adam(model)
    probe = BoundaryProbe(model, inner)
    optimizer = SAGGS(inner, find_pairs(model), every=1, at_start=False)
    outputs, inputs = np.ones(3), np.ones(3)  # how they have been scaled
    for k in range(4):
        optimizer.balanced = []
        train(model, optimizer, 1, first=k)
        for i, told in enumerate(optimizer.balanced):
            outputs[i] *= told.scale
            inputs[i + 1] *= told.scale
    assert abs(outputs - 1.0)[:2].min() > 1e-3
    x, drifts = batch(0), []
    for i, layer in enumerate((0, 2, 4)):
        c = start[:layer](x).mean(0)
        first, last = start[layer](c) * outputs[i], model[layer](c * inputs[i])
        drifts.append((last - first).norm().item())
    np.testing.assert_allclose(probe.history()["drift"][-1], drifts, rtol=1e-9)


def test_pairs_that_do_not_say_what_feeds_what_are_refused_beside_a_probe():
    model = network()
    by_hand = [((model[0].weight, model[0].bias), (model[2].weight, None))]
    with pytest.raises(ValueError, match="feeds must be told; BoundaryProbe keeps means"):
        BoundaryProbe(model, SAGGS(adam(model), by_hand))
    inner = adam(model)
    optimizer = SAGGS(inner, by_hand)
    probe = BoundaryProbe(model, inner)
    before = copy.deepcopy(model.state_dict())
    for call in (
        optimizer.balance,
        lambda: SAGGS(inner, by_hand),
        lambda: balance(by_hand, inner),
        lambda: rescale_pair(by_hand[0], 2.0, inner),
    ):
        with pytest.raises(ValueError, match="feeds must be told; what watches AdamW keeps means"):
            call()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    probe.remove()
    optimizer.balance()
