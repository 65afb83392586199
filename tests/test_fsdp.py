"""What FSDP2 shards is trained, balanced, centred, measured and resumed as by one process."""

import re

import pytest
import torch
import torch.multiprocessing as multiprocessing
from resumed_training import FORMS, resumed
from sharded_training import SCENES, tensor_parallel, two_processes

RESUMED = [(optimizer, form) for optimizer in ("SBO, ema", "SAGGS") for form in FORMS]


def _run(rank, folder):
    with two_processes(rank, folder):
        found = {name: scene(True) for name, scene in SCENES.items()}
        found["resumed"] = [resumed(*case, True) for case in RESUMED]
        through_files = resumed("SAGGS of SBO, fixed", "as it is", True, f"{folder}/checkpoint")
        found["resumed"].append(through_files)
        found["refused"] = tensor_parallel()
        torch.save(found, f"{folder}/{rank}")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    multiprocessing.spawn(_run, (str(folder),), nprocs=2)
    return [torch.load(folder / str(rank), weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("name", SCENES)
def test_sharded_models_go_as_whole_ones(sharded, name):
    expected = SCENES[name](False)
    for found in sharded:
        assert found[name].keys() == expected.keys()
        for what, value in expected.items():
            torch.testing.assert_close(found[name][what], value, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("case", range(len(RESUMED) + 1))
def test_sharded_runs_that_are_saved_and_loaded_go_on_to_the_bit(sharded, case):
    for found in sharded:
        undisturbed, continued = found["resumed"][case]
        for name, value in undisturbed.items():
            assert torch.equal(continued[name], value), name


@pytest.mark.parametrize("who", ["pairs", "SBO", "probe", "Recentring", "input", "conversion"])
def test_other_placements_are_refused_by_name(sharded, who):
    rule = {
        "input": r"0 must be given whole inputs; got DTensors, as of tensor parallelism.* exclude",
        "conversion": r"layers must be converted before they are sharded; .* a Linear in fully_sh",
    }.get(
        who, r"must be whole or sharded by rows alone.*Shard\(dim=1\).*tensor parallelism\. Shard"
    )
    for found in sharded:
        assert re.search(rule, found["refused"][who]), found["refused"][who]
