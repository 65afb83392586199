"""A training step on a card: the host never waits for it, and asks for few launches.

On a stand-in for a card, see `card_stand_in`: nothing here has run on one.
"""

import pytest
import torch
from builders import normal, small_atoms, small_problem
from card_stand_in import card, on_card, watched
from small_blocks import block, problem

from ipslimit import (
    SGD,
    AdamW,
    BlockAdamW,
    Clip,
    GaugeAdamW,
    Heads,
    Lion,
    Muon,
    Perceptrons,
    Problem,
    Rebalance,
    SBOAdamW,
    TokenProblem,
    by_depth,
    train_particles,
    warmup_cosine,
)
from ipslimit.model import eager, perceptrons_eager
from ipslimit.model.feed import MOST_STEPS
from ipslimit.model.sight import Sight

ADAMW = AdamW(0.02, eps=0.01)
RATES = {"q": 0.01, "o": warmup_cosine(0.02, 1, 9), "default": by_depth(lambda s: 0.01 + s)}
RULES = {
    "sgd": SGD(0.1),
    "momentum": SGD(0.1, momentum=0.9),
    "adamw": ADAMW,
    "block": BlockAdamW(0.02, eps=0.01),
    "sbo": SBOAdamW(0.02, eps=0.01),
    "sbo ema": SBOAdamW(0.02, eps=0.01, centre="ema", transport=True),
    "rebalance": Rebalance(ADAMW, every=1),
    "rebalance soft": Rebalance(SBOAdamW(0.02, eps=0.01), every=1, damping=0.5),
    "gauge": GaugeAdamW(0.02, eps=0.01),
    "lion": Lion(0.01),
    "muon": Muon(0.02),
    "clip": Clip(ADAMW, 1.0),
    "by matrix": AdamW(RATES, eps=0.01),
}
ALL_BIASES = small_atoms(biases=("bq", "bk", "bv", "bo"))


@pytest.fixture(autouse=True)
def a_card(monkeypatch):
    with card(monkeypatch):
        yield


def trained(of, rule, steps, depth=2, **options):
    return train_particles(of, rule, depth, 4, steps, seeds=3, device="cuda", **options)


def waits_of_steps(of, rule, **options):
    """What the host waits for in two more steps, none of which is recorded."""
    logs = []
    for steps in (1, 3):
        with watched() as log:
            trained(of, rule, steps, **options)
        logs.append(log)
    return logs[1].waits - logs[0].waits


@pytest.mark.parametrize("name", RULES)
def test_no_rule_makes_the_host_wait(name):
    assert not waits_of_steps(small_problem(ALL_BIASES, probes=2), RULES[name])


def weighted(**options):
    weights = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    return problem(causal=True, token_weights=weights, positions=[2, 0, 1], **options)


def text(**options):
    ids = torch.randint(0, 7, (6, 5), generator=torch.Generator().manual_seed(0))
    return TokenProblem(ids, 7, small_atoms(), 3, probes=ids[:2], **options)


PROBLEMS = {
    "perceptrons": lambda: problem(block(norm=None, sequential=True)),
    "norm": lambda: problem(block(norm="layer")),
    "batches": lambda: problem(batch=2),
    "tied": lambda: problem(tied=True),
    "weighted": weighted,
    "weighted batches": lambda: weighted(batch=2),
    "text": text,
    "text in batches": lambda: text(batch=3, tied_ends=True),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_problem_makes_the_host_wait(name):
    assert not waits_of_steps(PROBLEMS[name](), ADAMW)


@pytest.mark.parametrize("options", [{}, {"batch": 2}])
def test_dead_seeds_make_nobody_wait_and_stay_what_they_were(options):
    contexts, targets = normal(3, 4, 3, seed=2), normal(3, 3, seed=3)
    of = Problem(contexts, targets, small_atoms(), **options)
    # a step so large that seeds with a gradient die of it
    assert not waits_of_steps(of, SGD(1e155))
    run = trained(of, SGD(1e155), 3)
    on_cpu = train_particles(of, SGD(1e155), 3, 4, 3, seeds=3, device="cpu")
    assert run.diverged.any() and torch.equal(run.diverged.cpu(), on_cpu.diverged)
    assert torch.equal(run.diverged_at.cpu(), on_cpu.diverged_at)


def test_a_run_waits_a_number_of_times_that_steps_and_depth_do_not_change():
    counts = []
    for depth, steps in ((2, 2), (5, 4)):
        with watched() as log:
            trained(small_problem(probes=2), ADAMW, steps, depth, record=[0])
        counts.append(log.waits.total())
    assert counts[0] == counts[1] <= 16, log


def test_batches_go_to_the_card_many_steps_at_a_time():
    of = problem(batch=2)
    with watched() as log:
        trained(of, ADAMW, 12, depth=1)
    copies = sum(n for what, n in log.waits.items() if "batch.py" in what)
    assert copies == 2 and MOST_STEPS > 12, log  # inputs and targets


# ---------------------------------------------------------------------- launches


def launches(path, layout, R, B, N, H):
    """Of a field, and of its transpose, of so many units; nothing is computed."""

    def room(*shape):
        return on_card(torch.empty(*shape, dtype=torch.float32, device="meta"))

    x, packed, weights = room(R, B, N, layout.d), room(R, layout.size, H), room(R, H)
    with watched() as field:
        path.field(x, packed, weights, layout, Sight())
    with watched() as vjp:
        path.vjp(x, packed, weights, x, layout, Sight(), True)
    assert not field.waits and not vjp.waits
    return field.launches.total(), vjp.launches.total()


@pytest.mark.parametrize("sizes", [(16, 4, 8, 4, 4, 16), (16, 8, 256, 64, 16, 64)])
def test_a_layer_of_any_size_is_tens_of_launches(sizes):
    """With the CPU's blocks the larger takes 16,161 and 50,115."""
    R, B, N, d, m, H = sizes
    heads = Heads.make_layout(m=m, d=d)
    assert launches(eager, heads, R, B, N, H) == (12, 34)
    units = Perceptrons.make_layout(n=m, d=d)
    assert launches(perceptrons_eager, units, R, B, N, H) == (9, 32)


def test_what_the_memory_of_the_card_does_not_hold_is_cut():
    heads = Heads.make_layout(m=16, d=64)
    small, large = (launches(eager, heads, R, 32, 1024, 64) for R in (1, 16))
    # attention matrices of 8 and 128 GiB, of which 5 GiB are made at a time; a row is a block
    assert all(12 < few < many <= 20 * few for few, many in zip(small, large))
