"""Means of inputs over the processes of a group."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from test_input_means import OPTIONS, Net, batch, plain, step
from torch.nn.parallel import DistributedDataParallel

from ipslimit.nn import CenteredLinear, Recentring, center_linears
from ipslimit.optim import SBOAdamW
from ipslimit.torchmodels.inputs import InputMeans
from ipslimit.torchmodels.maps import find_maps
from ipslimit.torchmodels.wrappers import named_modules


def _train_distributed(rank, folder):
    """One of two processes: each sees its half of the rows, unevenly split."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = Net()
    parallel = DistributedDataParallel(model)
    optimizer = SBOAdamW(parallel, **OPTIONS)
    for k in range(3):
        x = batch(k)[:3] if rank == 0 else batch(k)[3:]
        optimizer.zero_grad()
        # gradients are averaged over two processes; the loss is the mean over 8 rows
        (parallel(x).square().sum() * 2 / 8).backward()
        optimizer.step()
    centred = center_linears(Net())
    parallel = DistributedDataParallel(centred)
    adamw = torch.optim.AdamW(centred.parameters(), **OPTIONS)
    Recentring(parallel, adamw, every=2, decay=0.5)
    for k in range(4):
        adamw.zero_grad()
        x = batch(k)[:3] if rank == 0 else batch(k)[3:]
        (parallel(x).square().sum() * 2 / 8).backward()
        adamw.step()
    found = {"sbo": model.state_dict(), "centred": centred.state_dict()}
    torch.save(found, f"{folder}/rank{rank}")
    dist.destroy_process_group()


def test_distributed_processes_add_their_rows_up(tmp_path):
    multiprocessing.spawn(_train_distributed, (str(tmp_path),), nprocs=2)
    found = [torch.load(tmp_path / f"rank{rank}", weights_only=True) for rank in (0, 1)]
    expected = {"sbo": plain()[0]}
    centred = expected["centred"] = center_linears(Net())
    adamw = torch.optim.AdamW(centred.parameters(), **OPTIONS)
    Recentring(centred, adamw, every=2, decay=0.5)
    for k in range(4):
        step(centred, adamw, k)
    assert isinstance(centred.first, CenteredLinear) and centred.first.centre.any()
    for kind, model in expected.items():
        for name, value in model.state_dict().items():
            for rank in (0, 1):
                torch.testing.assert_close(found[rank][kind][name], value, rtol=0, atol=1e-12)
            assert torch.equal(found[0][kind][name], found[1][kind][name])


def test_owners_of_a_process_group_are_not_copied():
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        copy.deepcopy(InputMeans(find_maps(named_modules(Net()))[0], process_group=object()))
