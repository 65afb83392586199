"""Blocks of attention and perceptrons train as the naive model does, to rounding.

Random blocks: families, biases, gates, activations, norms, both orders, masks, rules, learning
rates by step, matrix and depth, minibatches, tied layers, and every kind of law.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from naive_blocks import F64, NaiveAdamW, NaiveBlock, NaiveSGD, naive_training
from naive_sbo import NaiveSBO, naive_sbo_training

import ipslimit
from ipslimit import (
    SGD,
    AdamW,
    Atoms,
    Block,
    Heads,
    Perceptrons,
    Problem,
    SBOAdamW,
    train_particles,
)

ROUNDING = 1e-10  # times the largest entry, at least 1
STEPS = 3
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh")


@dataclasses.dataclass
class Profile:
    """A factor of a learning rate, at depth s."""

    first: float = 0.5

    def __call__(self, s):
        return self.first + s


@dataclasses.dataclass
class Case:
    """A problem and its training, and the same for the naive model."""

    problem: Problem
    depth: int
    heads: object
    rule: object
    block: NaiveBlock
    naive_rule: object
    rate: object
    text: str


class Random:
    """Choices of one case, from its number alone."""

    def __init__(self, number):
        self.rng = np.random.default_rng((14, number))

    def one(self, *values):
        return values[int(self.rng.integers(len(values)))]

    def some(self, values):
        return tuple(value for value in values if self.rng.random() < 0.5)

    def normal(self, *shape, scale=1.0):
        return torch.from_numpy(scale * self.rng.standard_normal(shape))

    def atoms(self, kind, shapes, **options):
        """Atoms of the family; of unequal weights, half of the time."""
        M = self.one(1, 2, 4)
        parts = {name: self.normal(M, *shape, scale=0.7) for name, shape in shapes.items()}
        weights = None
        if self.one(True, False):
            weights = 0.2 + torch.from_numpy(self.rng.random(M))
            weights = weights / weights.sum()
        return Atoms(kind(**parts, weights=weights, **options))

    def attention(self, d):
        m = self.one(1, 2, 3)
        how = self.one("atoms", "atoms", "xavier", "truncated")
        if how == "xavier":
            return ipslimit.XavierUniform(d, m, biases=self.one(True, False))
        if how == "truncated":
            return ipslimit.TruncatedNormal(d, m, 0.6, 1.0, biases=self.one(True, False))
        shapes = {"q": (m, d), "k": (m, d), "v": (m, d), "o": (d, m)}
        rows = {"bq": m, "bk": m, "bv": m, "bo": d}
        return self.atoms(Heads, shapes | {name: (rows[name],) for name in self.some(rows)})

    def perceptron(self, d, activation):
        n, gated = self.one(1, 2, 3), self.one(True, False)
        how = self.one("atoms", "atoms", "xavier", "truncated")
        options = {"activation": activation, "gated": gated, "biases": self.one(True, False)}
        if how == "xavier":
            return ipslimit.XavierPerceptrons(d, n, **options)
        if how == "truncated":
            return ipslimit.TruncatedNormalPerceptrons(d, n, 0.6, 1.0, **options)
        shapes = {"w_in": (n, d), "w_out": (d, n)} | ({"w_gate": (n, d)} if gated else {})
        rows = {"b_in": n, "b_out": d}
        shapes |= {name: (rows[name],) for name in self.some(rows)}
        return self.atoms(Perceptrons, shapes, activation=activation)

    def one_rate(self, largest, by_depth):
        """A learning rate, and what it is as a function (step, r / L) -> number."""
        peak = float(largest * self.rng.uniform(0.3, 1.0))
        how = self.one("number", "cosine", *(["depth"] if by_depth else []))
        if how == "number":
            return peak, lambda t, s: peak
        warmup, total, floor = self.one(0, 1, 2), self.one(2, 3, 5), self.one(0.0, 0.1 * peak)

        def cosine(t, s):
            if t <= warmup:
                return peak * t / warmup
            if t >= total:
                return floor
            angle = math.pi * (t - warmup) / (total - warmup)
            return floor + (peak - floor) * (1 + math.cos(angle)) / 2

        schedule = ipslimit.warmup_cosine(peak, warmup, total, floor)
        if how == "cosine":
            return schedule, cosine
        return ipslimit.by_depth(Profile(), schedule), lambda t, s: (0.5 + s) * cosine(t, s)

    def rate(self, names, largest, by_depth, depth):
        """A learning rate of a rule, and rate(t, family, name, r) of the naive model."""
        if self.one(True, False):
            rate, f = self.one_rate(largest, by_depth)
            return rate, lambda t, family, name, r: f(t, r / depth)
        both = {name: self.one_rate(largest, by_depth) for name in sorted(names)}
        rates = {name: rate for name, (rate, _) in both.items()}
        return rates, lambda t, family, name, r: both[name][1](t, r / depth)


def make_case(number):
    draw = Random(number)
    d, N, B, depth = draw.one(3, 4, 5), draw.one(1, 2, 4), draw.one(1, 3, 4), draw.one(1, 2, 4)
    families = draw.one(("attention",), ("perceptron",), *[("attention", "perceptron")] * 3)
    activation, norm = draw.one(*ACTIVATIONS), draw.one(None, "rms", "layer")
    norm_eps = draw.one(1e-5, 0.1)
    sequential = draw.one(True, False)
    laws = {}
    if "attention" in families:
        laws["attention"] = draw.attention(d)
    if "perceptron" in families:
        laws["perceptron"] = draw.perceptron(d, activation)
    causal, tied = draw.one(True, False), draw.one(True, False, False)
    batch = draw.one(None, max(1, B - 1))
    law = Block(**laws, norm=norm, norm_eps=norm_eps, sequential=sequential)
    data = draw.normal(B, N, d), draw.normal(B, d)
    problem = Problem(*data, law, causal=causal, batch=batch, batch_seed=number, tied=tied)
    heads = draw.one(1, 3, {name: draw.one(2, 4) for name in families})
    if all(isinstance(law, Atoms) for law in laws.values()):
        heads = draw.one(heads, None)
    names = {name for law in laws.values() for name in law.layout.names}
    if draw.one(True, False):
        lr, rate = draw.rate(names, 0.1, not tied, depth)
        rule, naive = SGD(lr, 0.9, 0.1), NaiveSGD(0.9, 0.1)
    else:
        lr, rate = draw.rate(names, 0.1, not tied, depth)
        rule = AdamW(lr, betas=(0.8, 0.95), eps=0.01, weight_decay=0.1)
        naive = NaiveAdamW((0.8, 0.95), 0.01, 0.1)
    block = NaiveBlock(depth, norm, norm_eps, sequential and len(laws) == 2, activation)
    block = dataclasses.replace(block, causal=causal, tied=tied)
    text = f"{law!r}, causal={causal}, tied={tied}, batch={batch} of {B}, H={heads}, {rule!r}"
    return Case(problem, depth, heads, rule, block, naive, rate, text)


def assert_close(ours, theirs, what):
    ours, theirs = torch.as_tensor(ours, dtype=F64), torch.as_tensor(theirs, dtype=F64)
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)} != {tuple(theirs.shape)}"
    size = max(1.0, float(theirs.abs().max()))
    error = float((ours - theirs).abs().max())
    assert error <= ROUNDING * size, f"{what}: {error:.2g}"


def start_of(run, seed, tied):
    """Units of a run before training as the naive model wants them, of one seed."""
    layers = slice(1) if tied else slice(None)
    return {
        family: {
            name: tensor[seed, layers]
            for name, tensor in (units.parts() | {"weights": units.weights}).items()
        }
        for family, units in run.units[0].items()
    }


def trained(case, rule, seed):
    """A run at all steps, and what the naive model needs: its start and batches."""
    problem, steps = case.problem, range(STEPS + 1)
    run = train_particles(
        problem, rule, case.depth, case.heads, STEPS, seeds=2, record=steps, device="cpu"
    )
    assert run.status == "ok", case.text
    batches = [run.batches[k].tolist() for k in steps] if problem.batch else None
    return run, start_of(run, seed, case.block.tied), batches


def assert_same_steps(run, seed, done, text):
    for k, step in enumerate(done):
        at = f"at step {k} of {text}"
        assert_close(run.x[k][seed], step.pass_.x, f"x {at}")
        assert_close(run.p[k][seed], step.pass_.p, f"p {at}")
        assert_close(run.loss[seed, k], step.pass_.loss, f"loss {at}")
        assert set(run.units[k]) == set(step.units)
        for family, units in run.units[k].items():
            for name, ours in units.parts().items():
                theirs = step.units[family][name].expand_as(ours[seed])
                assert_close(ours[seed], theirs, f"{name} {at}")


def assert_same(run, seed, done, text):
    assert_same_steps(run, seed, done, text)
    for family, units in run.units[STEPS].items():
        moved = (units.packed - run.units[0][family].packed).abs().max()
        assert moved > 1e-3, f"{family} of {text}"


def assert_trains_as_the_naive_model(case, seed=1):
    run, start, batches = trained(case, case.rule, seed)
    data = case.problem.contexts, case.problem.targets
    done = naive_training(case.block, start, *data, case.naive_rule, case.rate, STEPS, batches)
    assert_same(run, seed, done, case.text)


KERNELS = ("eager", "auto")


@pytest.mark.parametrize("number", range(40))
def test_a_random_block_trains_as_the_naive_model(number, monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", KERNELS[number % 2])
    assert_trains_as_the_naive_model(make_case(number))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["eager", "fused"])
@pytest.mark.parametrize("number", range(40, 100))
def test_more_random_blocks_train_as_the_naive_model(number, kernel, monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", kernel)
    assert_trains_as_the_naive_model(make_case(number))


def is_biased(number):
    """Whether a random block has biases in every family, and layers that are not tied."""
    case = make_case(number)
    laws = case.problem.block.laws.values()
    return not case.block.tied and all({*law.units.biases} & {*law.layout.names} for law in laws)


@pytest.mark.parametrize("kernel", ["eager", "fused"])
@pytest.mark.parametrize("number", [n for n in range(40) if is_biased(n)][:4])
def test_shape_and_boundary_move_apart_at_the_means_of_normed_inputs(number, kernel, monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", kernel)
    case, numbers = make_case(number), (0.05, (0.8, 0.95), 0.01, 0.1)
    run, start, batches = trained(case, SBOAdamW(*numbers), seed=1)
    data = case.problem.contexts, case.problem.targets
    done = naive_sbo_training(case.block, start, *data, NaiveSBO(*numbers), STEPS, batches)
    assert_same(run, 1, done, case.text)


def test_drawn_atoms_are_as_many_plain_units_of_equal_weight():
    draw = Random(1000)
    laws = {
        "attention": Atoms(Heads(**{n: draw.normal(3, 3, 3, scale=0.7) for n in "qkvo"})),
        "perceptron": Atoms(
            Perceptrons(draw.normal(3, 2, 3), draw.normal(3, 3, 2), activation="silu")
        ),
    }
    law = Block(**laws, norm="rms", sequential=True)
    problem = Problem(draw.normal(3, 2, 3), draw.normal(3, 3), law)
    rule, naive = AdamW(0.05, eps=0.01), NaiveAdamW(eps=0.01)
    heads = {"attention": 4, "perceptron": 5}
    run = train_particles(problem, rule, 2, heads, 2, record=[2], seeds=1, device="cpu")
    plain = {}
    for family, law in laws.items():
        counts = run.unit_counts[family][0]
        assert (counts.sum(dim=-1) == heads[family]).all() and int(counts.max()) > 1
        each = [torch.repeat_interleave(torch.arange(3), row) for row in counts]
        parts = law.heads.parts()
        plain[family] = {n: torch.stack([t[atoms] for atoms in each]) for n, t in parts.items()}
        weights = torch.full((2, heads[family]), 1.0 / heads[family], dtype=F64)
        plain[family]["weights"] = weights
    block = NaiveBlock(2, "rms", sequential=True, activation="silu")
    data = problem.contexts, problem.targets
    done = naive_training(block, plain, *data, naive, lambda *_: 0.05, 2)[-1]
    assert_close(run.x[2][0], done.pass_.x, "x")
    assert_close(run.p[2][0], done.pass_.p, "p")
    for family in laws:
        atoms = run.unit_atoms[family][0]
        for r in range(2):
            each = torch.repeat_interleave(torch.arange(3), run.unit_counts[family][0, r])
            for name, ours in run.units[2][family].parts().items():
                for unit, theirs in zip(each, done.units[family][name][r]):
                    (stored,) = (atoms[r] == unit).nonzero()[0]
                    assert_close(ours[0, r, stored], theirs, name)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["eager", "fused"])
@pytest.mark.parametrize("number", range(0, 60, 3))
def test_seeds_alone_and_runs_in_two_parts_have_the_same_bits(number, kernel, monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", kernel)
    case = make_case(number)
    model = case.problem, case.rule, case.depth, case.heads
    options = {"seeds": 3, "keep_state": True, "device": "cpu"}
    run = train_particles(*model, STEPS, record=range(STEPS + 1), **options)
    alone = train_particles(*model, STEPS, seeds=[2], record=range(STEPS + 1), device="cpu")
    for k in range(STEPS + 1):
        assert torch.equal(alone.x[k][0], run.x[k][2]), case.text
        assert torch.equal(alone.p[k][0], run.p[k][2]), case.text
    for first in range(STEPS):
        part = train_particles(*model, first, **options)
        record = range(first, STEPS + 1)
        rest = train_particles(*model, STEPS, record=record, start=part, **options)
        assert torch.equal(rest.loss, run.loss), case.text
        for k in record:
            assert torch.equal(rest.x[k], run.x[k]) and torch.equal(rest.p[k], run.p[k]), case.text
            for family, units in rest.units[k].items():
                assert torch.equal(units.packed, run.units[k][family].packed), case.text
