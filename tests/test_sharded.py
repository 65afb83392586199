"""Heads shared out to processes: the same training as in one process."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from builders import random_heads, small_problem
from perceptron_units import random_perceptrons

from ipslimit import (
    AdamW,
    Atoms,
    Block,
    Perceptrons,
    Problem,
    SBOAdamW,
    TokenProblem,
    XavierUniform,
    train_particles,
)
from ipslimit.cpu import dispatch
from ipslimit.model.sharded import shard

PROCESSES = 2
BIASED = Atoms(random_heads((), H=5, m=2, d=3, biases=("bq", "bk", "bv", "bo"), seed=1))
UNITS = random_perceptrons(H=5, n=2, names=("w_gate", "b_in"), seed=3)
PERCEPTRONS = Atoms(Perceptrons(**UNITS.parts(), activation="silu"))
BLOCK = Block(BIASED, PERCEPTRONS, norm="rms", norm_eps=0.1)
IN_TURN = Block(BIASED, PERCEPTRONS, norm="layer", norm_eps=0.1, sequential=True)
CASES = {
    "atoms": (Atoms(random_heads((), H=5, m=2, d=3, seed=1)), AdamW(lr=0.02, eps=0.01), 7),
    "sampled": (XavierUniform(3, 2), AdamW(lr=0.02, eps=0.01), 6),
    "sbo": (BIASED, SBOAdamW(lr=0.02, eps=0.01), 3),
    "whole law": (BIASED, AdamW(lr=0.02, eps=0.01), None),
    "eager": (BIASED, SBOAdamW(lr=0.02, eps=0.01), 4),
    "block": (BLOCK, AdamW(lr=0.02, eps=0.1), {"attention": 4, "perceptron": 9}),
    "sequential": (IN_TURN, AdamW(lr=0.02, eps=0.1), 6),
    "tied": (BLOCK, AdamW(lr=0.02, eps=0.1), 6),
    "tied whole law": (IN_TURN, AdamW(lr=0.02, eps=0.1), None),
    "tokens": (BLOCK, AdamW(lr=0.02, eps=0.1), {"attention": 4, "perceptron": 9}),
}
MORE = {"sequential": {"batch": 2}, "tied": {"tied": True, "batch": 2}}
MORE |= {"tied whole law": {"tied": True}}


def run(case, group=None, more=(), **options):
    law, rule, heads = CASES[case]
    of = small_problem(law=law, probes=2)
    more = MORE.get(case, {}) | dict(more)
    if case == "tokens":
        ids = torch.arange(24).view(4, 6) % 7
        problem = TokenProblem(ids, 7, law, 3, batch=3, probes=ids[:2])
    else:
        problem = Problem(of.contexts, of.targets, law, probes=of.probes, **more)
    options = {"steps": 3, "seeds": 2, "record": [0, 3], "nodes": 8} | options
    return train_particles(problem, rule, 4, heads, device="cpu", group=group, **options)


def work(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    results = {}
    for case in CASES:
        os.environ[dispatch.VARIABLE] = "eager" if case == "eager" else "auto"
        shared = run(case, dist.group.WORLD)
        results[case] = {"x": shared.x[3], "p": shared.p[3], "loss": shared.loss}
        packed = {name: units.packed for name, units in shared.units[3].items()}
        results[case] |= {"probe_x": shared.probe_x[3], "packed": packed}
    for name, options in {"seeds": {"seeds": 2 + rank}, "root_seed": {"root_seed": rank}}.items():
        with pytest.raises(ValueError, match=f"{name} must be the same in all processes"):
            run("atoms", dist.group.WORLD, **options)
    for name, value in {"batch_seed": rank, "tied": bool(rank), "causal": bool(rank)}.items():
        with pytest.raises(ValueError, match=f"{name} must be the same in all processes"):
            run("block", dist.group.WORLD, {"batch": 2, name: value})
    whole = run("block", dist.group.WORLD)
    first = run("block", dist.group.WORLD, steps=1, record=[0, 1], keep_state=True)
    on = run("block", dist.group.WORLD, start=first)
    assert torch.equal(on.x[3], whole.x[3]) and torch.equal(on.p[3], whole.p[3])
    with pytest.raises(ValueError, match=f"start must have the group .* none; got process {rank}"):
        run("block", start=first)
    alone = run("block", steps=1, record=[0, 1], keep_state=True)
    with pytest.raises(ValueError, match=r"start must have the group .*; got none"):
        run("block", dist.group.WORLD, start=alone)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    mp.spawn(work, args=(str(folder),), nprocs=PROCESSES)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(PROCESSES)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one_does(shared, case):
    alone = run(case)
    expected = {"x": alone.x[3], "p": alone.p[3], "loss": alone.loss, "probe_x": alone.probe_x[3]}
    for rank in range(PROCESSES):
        for name, value in expected.items():
            # rounding of another order of summation, carried through 4 layers and 3 steps
            torch.testing.assert_close(shared[rank][case][name], value, rtol=1e-11, atol=1e-12)
            assert torch.equal(shared[rank][case][name], shared[0][case][name])
    for name, units in alone.units[3].items():
        packed = torch.cat([part[case]["packed"][name] for part in shared], dim=-1)
        torch.testing.assert_close(packed, units.packed, rtol=1e-11, atol=1e-12)
        assert shared[0][case]["packed"][name].shape[-1] < packed.shape[-1]


def test_shares_cover_all_heads_once_and_evenly():
    for count, processes in ((7, 3), (8, 2), (5, 5)):
        parts = [range(count)[shard(count, rank, processes)] for rank in range(processes)]
        assert [head for part in parts for head in part] == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(ValueError, match="at most as many processes"):
        shard(2, 0, 3)


def test_a_group_must_be_initialised():
    with pytest.raises(ValueError, match="initialised process group"):
        run("atoms", group=object())
