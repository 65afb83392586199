"""What two processes share is trained, balanced, centred, measured and resumed as by one."""

import re

import pytest
import torch
import torch.multiprocessing as multiprocessing
from resumed_training import FORMS, resumed
from sharded_training import SCENES, tensor_parallel, two_processes
from uneven_training import one_process, refused, shared_state, uneven

# Two processes are started and import torch, and train in some twenty scenes.
pytestmark = pytest.mark.slow

RESUMED = [
    (optimizer, form) for optimizer in ("SBO, ema", "SAGGS", "AdamW, centred") for form in FORMS
]


def _run(rank, folder):
    with two_processes(rank, folder):
        found = {name: scene(True) for name, scene in SCENES.items()}
        found["resumed"] = [resumed(*case, True) for case in RESUMED]
        through_files = resumed("SAGGS of SBO, fixed", "as it is", True, f"{folder}/checkpoint")
        found["resumed"].append(through_files)
        found["uneven"] = {centred: uneven(centred) for centred in (False, True)}
        found["shared"] = {kind: shared_state(kind) for kind in ("probe", "Recentring")}
        found["refused"] = tensor_parallel() | refused()
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


@pytest.mark.parametrize("centred", [False, True])
def test_a_process_may_run_out_of_batches_under_join(sharded, centred):
    expected = one_process(centred)
    for found in sharded:
        for name, value in found["uneven"][centred].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", ["probe", "Recentring"])
def test_zero_redundancy_optimizers_are_followed(sharded, kind):
    for found in sharded:
        plain, zero = found["shared"][kind]
        for name, value in plain.items():
            torch.testing.assert_close(zero[name], value, rtol=0, atol=0, equal_nan=True)


PLACED = r"must be whole or sharded by rows alone.*Shard\(dim=1\).*tensor parallelism\. Shard"
ALONE = r"rows of uneven batches cannot be .* Use torch.*Join\(\[model, optimizer\]\)"
REFUSED = {
    "pairs": PLACED,
    "SBO": PLACED,
    "probe": PLACED,
    "Recentring": PLACED,
    "input": r"0 must be given whole inputs; got DTensors, as of tensor parallelism.* exclude",
    "conversion": r"layers must be converted before they are sharded; .* a Linear in fully_shard",
    "Conv1D": r"Conv1D must have its outputs along the first dimension .*got \(4, 4\) of x W \+ b",
    "probe, passes unseen": r"gradients must be zeroed between steps where every > 1; got Linear",
    "Recentring, bfloat16": r"must have parameters in float32; got 0 in torch.bfloat16.* MixedPr",
    "join, SBO": ALONE,
    "join, probe": ALONE,
    "join, SBO and probe": ALONE,
    "join, optimizer first": r"Join must be given the parallel model first; got SBOAdamW\. Use",
    "ZeRO, SBO": r"model must be an nn.Module .*; .* as ZeroRedundancyOptimizer does, use fully",
    "ZeRO, SAGGS": r"optimizer must have the state .*; got ZeroRedundancyOptimizer.* fully_shard",
    "ZeRO, overlap": r"optimizer must step when step\(\) is called; got Zero.* Use overlap_with",
}


@pytest.mark.parametrize("who", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(sharded, who):
    for found in sharded:
        assert re.search(REFUSED[who], found["refused"][who]), found["refused"][who]
        assert "\n" not in found["refused"][who] or who == "pairs"
