"""Affine maps of public models, and that a model without any is told so."""

import warnings

import pytest
import torch
from zoo import LAYERS, inputs, seeded, transformer

from ipslimit import BoundaryProbe
from ipslimit.optim import SBOAdamW

pytest.importorskip("transformers")

# model type -> maps a layer
MAPS = {"gpt2": 4, "gpt_neox": 4, "bloom": 4, "opt": 6, "bert": 6, "phi": 6, "starcoder2": 6}
NONE = ("llama", "mistral", "qwen3", "gemma", "phi3", "olmo2", "falcon", "mixtral")


@pytest.mark.parametrize("kind", MAPS)
def test_the_boundary_of_every_map_moves_by_its_own_adam(kind):
    """Where a map has one row for all tokens, R3 of its weight is that of the formula: none."""
    model = seeded(transformer, kind)
    optimizer = SBOAdamW(model, lr=1e-3, weight_decay=0.0)
    found = [m for m in optimizer.maps if "pooler" not in m.name]
    assert len(found) == MAPS[kind] * LAYERS
    probe = BoundaryProbe(model, optimizer)
    model(**inputs("tokens"))[0].square().mean().backward()
    gradients = {m: m.own_bias(m.bias.grad).clone() for m in found}
    optimizer.step()
    history = probe.history()
    for m in found:
        step = 1e-3 * (gradients[m].abs() / (gradients[m].abs() + 1e-8)).norm()
        moved = history["db + dW mu"][0, probe.layers.index(m.name)]
        assert moved == pytest.approx(float(step), rel=1e-6), m.name


@pytest.mark.parametrize("kind", NONE)
def test_a_model_without_biases_is_told_that_it_gets_plain_adamw(kind):
    with pytest.warns(UserWarning, match="has found no affine layer with a bias"):
        SBOAdamW(seeded(transformer, kind))


def test_a_conv1d_of_transformers_is_a_linear_map():
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(6, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [m] = SBOAdamW(layer).maps
    assert m.transposed and m.outputs == 6
    x = torch.randn(5, 4)
    torch.testing.assert_close(layer(x), x @ m.matrix(m.weight).T + m.bias)
