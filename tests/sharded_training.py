"""Training of one small model, whole or sharded by FSDP2; both see the same rows in a step."""

import contextlib

import numpy as np
import torch
import torch.distributed as dist
from architectures import WIDTH, Conv1D, Fused, Plain
from builders import normal
from modules import seeded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from ipslimit import BoundaryProbe
from ipslimit.nn import Recentring, center_linears
from ipslimit.optim import SAGGS, SBOAdamW, find_pairs

# keys have a bias whose gradient is rounding, which a small eps would make a step of
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
F64 = torch.float64


class Net(nn.Module):
    """Every kind of affine map, one with as many groups as processes cut, one with one row."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, dtype=F64)
        self.conv = nn.Conv1d(4, 6, 2, groups=2, dtype=F64)
        self.mlp = nn.Sequential(nn.Linear(6, 7, dtype=F64), nn.ReLU(), nn.Linear(7, 3, dtype=F64))
        self.head = nn.Linear(3, 1, dtype=F64)
        self.checkpointed = False
        with torch.no_grad():  # a network out of balance
            self.mlp[0].weight.mul_(3.0)
            self.attention.in_proj_weight[:4].mul_(2.0)

    def forward(self, x):
        x = self.attention(x, x, x)[0]
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = checkpoint(self.mlp, x, use_reentrant=False) if self.checkpointed else self.mlp(x)
        return self.head(x)


def make(sharded, centred=False, mesh=(2,)):
    model = seeded(3, Net)
    if centred:
        center_linears(model)
    if sharded:
        names = ("replicas", "shards")[-len(mesh) :]
        mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        for part in (model.attention, model.mlp[0], model.mlp, model):
            fully_shard(part, mesh=mesh)
    return model


def adam(model):
    return torch.optim.AdamW(model.parameters(), **OPTIONS)


def rows(k):
    """This process's part of the rows of step k."""
    x = 1.0 + normal(4, 5, 4, seed=k)
    return x.chunk(2)[dist.get_rank()] if dist.is_initialized() else x


def loss(model, x):
    return model(x).square().mean()


def train(model, optimizer, steps=range(5)):
    for k in steps:
        optimizer.zero_grad()
        loss(model, rows(k)).backward()
        optimizer.step()


def parameters(model):
    """All values of a model, whole."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def recorded(probe):
    kept = {name: values[:, ~probe.is_key] for name, values in probe.history().items()}
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in kept.items()}


def saggs(sharded):
    model = make(sharded)
    optimizer = SAGGS(adam(model), find_pairs(model), every=2, damping=0.5)
    train(model, optimizer)
    scales = torch.tensor([found.scale for found in optimizer.balanced], dtype=F64)
    return parameters(model) | {"scales": scales}


def saggs_transposed(sharded):
    """Pairs, one for each head, of matrices whose rows are inputs."""
    model = seeded(4, lambda: nn.Sequential(Fused(linear=Conv1D), Plain(linear=Conv1D))).double()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = SAGGS(adam(model), find_pairs(model, "head"), every=2)
    for k in range(3):
        optimizer.zero_grad()
        x = normal(2, 5, WIDTH, seed=k)
        model(x).square().mean().backward()
        optimizer.step()
    return parameters(model)


def saggs_before_a_step(sharded):
    model = make(sharded)
    optimizer = SAGGS(adam(model), find_pairs(model))
    loss(model, rows(0)).backward()
    optimizer.balance()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    gradients = {k: g.full_tensor() if sharded else g for k, g in gradients.items()}
    return {"output": model(1.0 + normal(4, 5, 4, seed=9)).detach()} | gradients


def sbo(centre, **options):
    def run(sharded):
        model = make(sharded, **options)
        optimizer = SBOAdamW(model, centre=centre, exclude="*.out_proj", **OPTIONS)
        train(model, optimizer)
        return parameters(model)

    return run


def sbo_in_saggs_beside_a_probe(sharded):
    model = make(sharded)
    inner = SBOAdamW(model, centre="ema", exclude="*.out_proj", **OPTIONS)
    optimizer = SAGGS(inner, find_pairs(model), every=2)
    probe = BoundaryProbe(model, optimizer)
    train(model, optimizer)
    return parameters(model) | recorded(probe)


def probe(centred):
    def run(sharded):
        model = make(sharded, centred)
        optimizer = adam(model)
        policy = Recentring(model, optimizer, every=2) if centred else None
        # a packed projection whose parts the shards cut
        probe = BoundaryProbe(model, optimizer, every=2, packed="mlp.2")
        train(model, optimizer)
        averages = policy.state_dict()["averages"] if centred else {}
        return parameters(model) | recorded(probe) | averages

    return run


def accumulated(kind):
    """Passes of different sizes whose gradients are added up, each in its own way."""

    def run(sharded):
        model = make(sharded)
        optimizer = SBOAdamW(model, exclude="*.out_proj", **OPTIONS)
        model.checkpointed = kind == "checkpointed"
        for k in range(2):
            x, y = rows(k), rows(7 + k)[:, :4]
            optimizer.zero_grad()
            if kind == "in place":  # a step that was skipped takes its rows along
                loss(model, rows(5)).backward()
                model.zero_grad(set_to_none=False)
            if sharded and kind == "reduced once":
                model.set_requires_gradient_sync(False)
            with torch.no_grad():
                model(rows(6))
            loss(model, x).backward()
            if kind == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            if sharded:
                model.set_requires_gradient_sync(True)
            loss(model, y).backward()
            optimizer.step()
        return parameters(model)

    return run


SCENES = {
    "SAGGS": saggs,
    "SAGGS, transposed": saggs_transposed,
    "SAGGS, function and gradients": saggs_before_a_step,
    "SBO, batch": sbo("batch"),
    "SBO, fixed": sbo("fixed"),
    "SBO, replicas": sbo("ema", mesh=(2, 1)),
    "SBO, shards in a mesh": sbo("ema", mesh=(1, 2)),
    "SBO in SAGGS beside a probe": sbo_in_saggs_beside_a_probe,
    "probe": probe(False),
    "probe and Recentring": probe(True),
    **{
        f"accumulated, {kind}": accumulated(kind)
        for kind in ("plainly", "reduced once", "checkpointed", "in place", "clipped")
    },
}


def tensor_parallel():
    """What is said of a model whose matrices are split among processes, by who is given it."""
    mesh = init_device_mesh("cpu", (2,))

    def split(centred=False, styles=(ColwiseParallel, RowwiseParallel)):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        if centred:
            center_linears(model)
            model[2].weight = nn.Parameter(distribute_tensor(model[2].weight, mesh, [Shard(1)]))
            return model
        return parallelize_module(model, mesh, {"0": styles[0](), "2": styles[1]()})

    def run_by_columns():
        model = split(styles=(ColwiseParallel, ColwiseParallel))
        optimizer = SBOAdamW(model)
        model(torch.ones(2, 4))
        return optimizer

    def fully_sharded(model):
        fully_shard(model, mesh=mesh)
        return model

    def unseen_passes():
        model = fully_sharded(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        BoundaryProbe(model, optimizer, every=2)
        for _ in range(3):  # without zero_grad
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    def half_centred():
        model = nn.Sequential(nn.Linear(4, 4))
        model = fully_sharded(center_linears(model).bfloat16())
        Recentring(model, adam(model))

    attempts = {
        "pairs": lambda: find_pairs(split()),
        "SBO": lambda: SBOAdamW(split()),
        "probe": lambda: BoundaryProbe(model := split(), adam(model)),
        "Recentring": lambda: Recentring(model := split(True), adam(model)),
        "input": run_by_columns,
        "conversion": lambda: center_linears(make(True)),
        "Conv1D": lambda: SBOAdamW(fully_sharded(Conv1D(4, 4))),
        "probe, passes unseen": unseen_passes,
        "Recentring, bfloat16": half_centred,
    }
    said = {}
    for who, attempt in attempts.items():
        try:
            attempt()
        except (ValueError, RuntimeError) as error:
            said[who] = str(error)
    return said


@contextlib.contextmanager
def two_processes(rank, folder):
    """Inside, this process is one of two."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    yield
    dist.destroy_process_group()
