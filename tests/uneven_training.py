"""Training by DistributedDataParallel with unlike many batches, or with a state in shares."""

import torch
import torch.distributed as dist
from sharded_training import OPTIONS, adam, loss, make, parameters, recorded, rows, train
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ipslimit import BoundaryProbe
from ipslimit.nn import Recentring
from ipslimit.optim import SAGGS, SBOAdamW, find_pairs

BATCHES = (2, 4)  # of the processes, an epoch
EPOCHS = 2


def sbo(model):
    return SBOAdamW(model, centre="ema", exclude="*.out_proj", **OPTIONS)


def uneven(centred):
    """Values, and the state of what follows the inputs, after two epochs."""
    model = make(False, centred)
    parallel = DistributedDataParallel(model)
    # without a state of its own, which torch leaves behind on a process that has run out
    optimizer = torch.optim.SGD(model.parameters(), 1e-2) if centred else sbo(parallel)
    joined = Recentring(parallel, optimizer, every=3, decay=0.5) if centred else optimizer
    for _ in range(EPOCHS):
        with Join([parallel, joined]):
            train(parallel, optimizer, range(BATCHES[dist.get_rank()]))
    return parameters(model) | (joined.state_dict()["averages"] if centred else {})


def one_process(centred):
    """The same, where all rows of a step are in one process."""
    model = make(False, centred)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2) if centred else sbo(model)
    policy = Recentring(model, optimizer, every=3, decay=0.5) if centred else None
    for _ in range(EPOCHS):
        for k in range(max(BATCHES)):
            optimizer.zero_grad()
            there = [rank for rank, batches in enumerate(BATCHES) if k < batches]
            x = torch.cat([rows(k).chunk(2)[rank] for rank in there])
            (loss(model, x) * len(there) / 2).backward()  # the mean over both processes
            optimizer.step()
    return parameters(model) | (policy.state_dict()["averages"] if centred else {})


def shared_state(kind):
    """(plain, ZeRO) values of a run that something follows."""
    found = []
    for zero in (False, True):
        model = make(False, kind == "Recentring")
        parallel = DistributedDataParallel(model)
        made = adam(model)
        if zero:
            made = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **OPTIONS)
        watcher = {"probe": BoundaryProbe, "Recentring": Recentring}[kind](parallel, made, every=2)
        train(parallel, made)
        found.append(parameters(model) | (recorded(watcher) if kind == "probe" else {}))
    return found


def refused():
    """What is said of what cannot be right."""

    def join_of_the_model_alone(watch):
        model = make(False)
        parallel = DistributedDataParallel(model)
        optimizer = watch(parallel)
        with parallel.join():
            train(parallel, optimizer, range(BATCHES[dist.get_rank()]))

    def watched(model):
        optimizer = adam(model)
        model.probe = BoundaryProbe(model, optimizer)
        return optimizer

    def beside(model):
        optimizer = sbo(model)
        model.probe = BoundaryProbe(model, optimizer)
        return optimizer

    def zero(kind, **options):
        model = make(False)
        return model, ZeroRedundancyOptimizer(model.parameters(), kind, **OPTIONS | options)

    def saggs():
        model, optimizer = zero(torch.optim.AdamW)
        exponents = {"exp_avg": -1, "exp_avg_sq": -2, "step": 0}
        SAGGS(optimizer, find_pairs(model), state_exponents=exponents)

    attempts = {
        "join, SBO": lambda: join_of_the_model_alone(sbo),
        "join, probe": lambda: join_of_the_model_alone(watched),
        "join, SBO and probe": lambda: join_of_the_model_alone(beside),
        "join, optimizer first": lambda: Join([sbo(make(False))]),
        "ZeRO, SBO": lambda: zero(SBOAdamW),
        "ZeRO, SAGGS": saggs,
        "ZeRO, overlap": lambda: BoundaryProbe(*zero(torch.optim.AdamW, overlap_with_ddp=True)),
    }
    said = {}
    for who, attempt in attempts.items():
        try:
            attempt()
        except (TypeError, ValueError, RuntimeError) as error:
            said[who] = str(error)
    return said
