"""Models of transformers that FSDP2 shards, beside the same ones in one process."""

import copy
import re

import pytest
import torch
import torch.multiprocessing as multiprocessing
from builders import normal
from modules import seeded
from operators import declare_operators
from sharded_training import OPTIONS, adam, parameters, recorded, two_processes
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from ipslimit import BoundaryProbe
from ipslimit.optim import SAGGS, SBOAdamW, find_pairs

transformers = pytest.importorskip("transformers")


def vit():
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_labels=3,
        hidden_act="relu",
    )
    return transformers.ViTForImageClassification(config).double()


def llama():
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        attention_bias=True,
    )
    return transformers.LlamaForCausalLM(config).double()


def inputs(name, k, rank=None):
    """Those of step k: of both processes, or of one."""
    if name == "vit":
        x = normal(4, 3, 8, 8, seed=k)
    else:
        x = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(k))
    return x if rank is None else x.chunk(2)[rank]


MODELS = {"vit": vit, "llama": llama}


def make(name, sharded):
    model = seeded(0, MODELS[name])
    with torch.no_grad():  # out of balance
        for part, parameter in model.named_parameters():
            if re.search(r"(query|q_proj|v_proj|value)\.weight", part):
                parameter.mul_(2.0)
    if sharded:
        for module in model.modules():
            if isinstance(module, transformers.modeling_layers.GradientCheckpointingLayer):
                fully_shard(module)
        fully_shard(model)
    return model


def train(model, optimizer, name, rank, steps):
    for k in steps:
        optimizer.zero_grad()
        model(inputs(name, k, rank)).logits.square().mean().backward()
        optimizer.step()


def run(name, kind, rank):
    """Values and records of a run; with a rank, of a sharded one."""
    model = make(name, rank is not None)
    pairs = find_pairs(model, refused="skip")
    inner = SBOAdamW(model, centre="ema", **OPTIONS) if "SBO" in kind else adam(model)
    optimizer = SAGGS(inner, pairs, every=2) if "SAGGS" in kind else inner
    probe = BoundaryProbe(model, optimizer)
    train(model, optimizer, name, rank, range(4))
    names = {"pairs": torch.tensor([len(pair.name) for pair in pairs])}
    return parameters(model) | recorded(probe) | names


def resumed(name, rank):
    """(undisturbed, resumed) values."""

    def optimizer_of(model):
        pairs = find_pairs(model, refused="skip")
        return SAGGS(SBOAdamW(model, centre="ema", **OPTIONS), pairs, every=3)

    models = [make(name, True) for _ in range(2)]
    first, second = map(optimizer_of, models)
    train(models[0], first, name, rank, range(3))
    model, optimizer = copy.deepcopy(get_state_dict(models[0], first))
    set_state_dict(models[1], second, model_state_dict=model, optim_state_dict=optimizer)
    for model, optimizer in zip(models, (first, second)):
        train(model, optimizer, name, rank, range(3, 6))
    return tuple(map(parameters, models))


KINDS = ("SAGGS of AdamW", "SBO", "SAGGS of SBO")
CASES = [(name, kind) for name in MODELS for kind in KINDS]


def _run(rank, folder):
    declare_operators()
    with two_processes(rank, folder):
        found = {case: run(*case, rank) for case in CASES}
        found |= {name: resumed(name, rank) for name in MODELS}
        torch.save(found, f"{folder}/{rank}")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    multiprocessing.spawn(_run, (str(folder),), nprocs=2)
    return [torch.load(folder / str(rank), weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_sharded_models_go_as_whole_ones(sharded, case):
    expected = run(*case, None)
    for found in sharded:
        assert found[case].keys() == expected.keys()
        for what, value in expected.items():
            torch.testing.assert_close(found[case][what], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_sharded_models_are_resumed_to_the_bit(sharded, name):
    for found in sharded:
        undisturbed, continued = found[name]
        assert all(torch.equal(continued[what], value) for what, value in undisturbed.items())
