"""SAGGS around an optimizer that looks at what feeds its layers."""

import pytest
import torch
from test_saggs import TARGET, X, block, same, train
from torch import nn

from ipslimit.optim import SAGGS, SBOAdamW, find_pairs, rescale_pair


def test_what_the_wrapped_optimizer_has_is_reached():
    model = block()
    inner = SBOAdamW(model, centre="fixed")
    optimizer = SAGGS(inner, find_pairs(model))
    mask = torch.ones(4, 5, dtype=torch.bool)
    optimizer.row_mask = mask
    assert inner.row_mask is mask and optimizer.row_mask is mask
    assert "row_mask" not in vars(optimizer)
    assert optimizer.maps is inner.maps
    with optimizer.calibrate(), torch.no_grad():
        model(X)
    assert all("centre" in inner.state[m.weight] for m in inner.maps)
    optimizer.every = 7  # its own stay its own
    assert optimizer.every == 7 and not hasattr(inner, "every")
    extra = nn.MultiheadAttention(4, 2)
    optimizer.add_param_group({"modules": extra}, exclude="*out_proj")
    assert len(optimizer.param_groups) == 2
    with pytest.raises(TypeError, match="row_mask must be a bool tensor"):
        optimizer.row_mask = 3


def test_padding_does_not_count_through_the_wrapper():
    mask = torch.arange(5) < torch.tensor([[5], [3], [2], [4]])
    models = [block(), block()]
    for model, padding in zip(models, (0.0, 100.0), strict=True):
        optimizer = SAGGS(SBOAdamW(model.mlp), find_pairs(model.mlp))
        optimizer.row_mask = mask
        x = torch.where(mask.unsqueeze(-1), X, padding)
        (model.mlp(x) - TARGET)[mask].square().mean().backward()
        optimizer.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=1e-6)  # a step is 1e-3


@pytest.mark.parametrize("per", ["matrix", "head"])
@pytest.mark.parametrize("centre", ["batch", "ema", "fixed"])
def test_centres_of_sbo_follow_what_feeds_them(centre, per):
    """Twins by powers of two stay twins: means of inputs, seen or stored, go along."""

    def start():
        model = block()
        return model, SBOAdamW(model, lr=1e-3, eps=1e-30, centre=centre)

    runs = [start(), start()]
    for model, inner in runs:
        train(model, inner, 3)
    for i, pair in enumerate(find_pairs(runs[1][0], per)):
        rescale_pair(pair, 2.0 ** (i + 1), runs[1][1])
    if centre != "batch":  # the input of down_proj is that of the last pair, of all others the same
        for name, factor in (("down_proj", 2.0 ** (i + 1)), ("up_proj", 1.0)):
            kept, scaled = (
                inner.state[getattr(model.mlp, name).weight]["centre"] for model, inner in runs
            )
            assert torch.equal(scaled, factor * kept)
    losses = []
    for model, inner in runs:
        optimizer = SAGGS(inner, find_pairs(model, per), every=2)
        losses.append(train(model, optimizer, 5, start=3))
    assert losses[0] == losses[1]
    assert same(runs[0][0], runs[1][0])


class SeesInputs(torch.optim.AdamW):
    """Remembers which inputs it was told about."""

    def rescale_input(self, weight, columns, factor):
        self.told = [*getattr(self, "told", []), (weight, columns, factor)]


def test_an_optimizer_that_looks_at_inputs_is_told_of_their_scale():
    model = block()
    inner = SeesInputs(model.parameters())
    pairs = find_pairs(model, "head")
    scales = {b.name: b.scale for b in SAGGS(inner, pairs).balance()}
    fed = [pair for pair in pairs if pair.feeds]
    assert len(inner.told) == len(fed) == 3  # two value heads and the MLP; no query or key
    for pair, (weight, _, factor) in zip(fed, inner.told, strict=True):
        assert weight is pair.second.matrix.parameter and factor == scales[pair.name]
    assert [columns for _, columns, _ in inner.told] == [slice(0, 8), slice(8, 16), slice(None)]
    by_hand = [((model.mlp.up_proj.weight, None), (model.mlp.down_proj.weight, None))]
    with pytest.raises(ValueError, match=r"feeds must be told; SeesInputs .*pairs\[0\]"):
        SAGGS(inner, by_hand)
