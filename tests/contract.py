"""What every optimizer rule is held to, on every path and in both models: rules, paths, checks.

A rule of ipslimit is in as soon as it is registered, any other by a word in KINDS.
"""

import dataclasses
import functools
import inspect
import math
import random
import textwrap

import numpy as np
import pytest
import torch
from builders import BIASES, F64, normal, random_heads, random_parts, same_bits, small_atoms

import ipslimit
from ipslimit import (
    Atoms,
    Clip,
    Heads,
    Problem,
    Rebalance,
    Rule,
    by_depth,
    train_particles,
    warmup_cosine,
)
from ipslimit.cpu.dispatch import VARIABLE
from ipslimit.model.particles import train_from
from ipslimit.model.rules import RULES as BUILT_IN
from ipslimit.model.rules import ElementwiseRule
from ipslimit.model.runs import empty_run


def documented(kind, name):
    """The class `name` that the documentation of a base class of rules shows, complete."""
    example = kind.__doc__.split("complete")[1].partition(":")[2].split("Attributes")[0]
    made = {"torch": torch, "ipslimit": ipslimit, "dataclasses": dataclasses}
    made["__name__"] = "documentation"
    exec(textwrap.dedent(example), made)
    return made[name]


OWN = {
    "own": documented(Rule, "Normalised"),
    "own elementwise": documented(ElementwiseRule, "Signum"),
}
KINDS = BUILT_IN | OWN


@dataclasses.dataclass
class Steeper:
    """A profile over depth."""

    slope: float = 0.5

    def __call__(self, s):
        return 1.0 + self.slope * s


# Options as most tests want them: Adam divides by sqrt(v) + eps, which multiplies rounding by 10.
PLAIN = {"lr": 0.05, "eps": 0.1}
# And whatever else a rule has, away from its default.
SCHEDULED = by_depth(Steeper(), warmup_cosine(0.05, 2, 5, 0.01))
MORE = {
    "lr": {"q": SCHEDULED, "o": 0.03, "bo": warmup_cosine(0.04, 0, 2), "default": 0.05},
    "betas": (0.9, 0.99),
    "weight_decay": 0.1,
    "momentum": 0.5,
    "mean": True,
    "centre": "ema",
    "centre_decay": 0.7,
    "transport": True,
    "nesterov": False,
    "ns_steps": None,
}


# Of some gradients, the most that is left by a clip.
NORM = 0.2


def takes(kind):
    """Names of the options of a rule."""
    return list(inspect.signature(kind).parameters)


def make(kind, **options):
    """A rule of this kind, given those of these options that it has."""
    return kind(**{name: value for name, value in options.items() if name in takes(kind)})


def rebalanced(rule, **options):
    """Clipped, with its pairs balanced on the way; None where its state cannot follow."""
    heads = random_heads()
    try:
        rule.rescaled(heads.layout, rule.init(heads), torch.ones_like(heads.packed))
    except TypeError:
        return None
    return None if rule.rescaling_refusal() else Rebalance(Clip(rule, NORM), **options)


def every_rule():
    """Each kind with few options, with all, and rebalanced, by name."""
    rules = {}
    for name, kind in KINDS.items():
        rules[name] = make(kind, **PLAIN)
        more = {option: value for option, value in MORE.items() if option in takes(kind)}
        rules[f"{name} with {' '.join(more)}"] = make(kind, **PLAIN | more)
        inner = make(kind, **MORE | PLAIN | {"weight_decay": 0.0})
        rules[f"{name} rebalanced"] = rebalanced(inner, every=2, damping=0.5)
    return {name: rule for name, rule in rules.items() if rule is not None}


RULES = every_rule()
# All options away from their defaults are held by the rebalanced too: those alone are slow.
EVERY_RULE = pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, id=name, marks=[pytest.mark.slow] * (" with " in name))
        for name, rule in RULES.items()
    ],
)
# Rules whose step moves by rounding where their gradient does, and is linear in nothing smaller.
SMOOTH_KINDS = {
    name: kind for name, kind in KINDS.items() if name not in ("own elementwise", "lion", "muon")
}

# Everything in torch; everything compiled where it can be; a compiled kernel and the rule in torch,
# layer by layer, as rules of one's own run.
PATHS = ("eager", "fused", "layers")
EVERY_PATH = pytest.mark.parametrize("path", PATHS)
DTYPES = (F64, torch.float32)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)

# Some tens of roundings per layer and step, in sums of O(1) terms, multiplied by Adam's 1 / eps.
ROUNDING = 10_000


@functools.cache
def _overriding(kind):
    def update(self, *arguments):
        return kind.update(self, *arguments)

    return type(f"Own{kind.__name__}", (kind,), {"update": update, "__module__": __name__})


def on_path(patch, path, rule):
    """The rule by which this path is taken, with the kernel chosen."""
    patch.setenv(VARIABLE, {"layers": "fused"}.get(path, path))
    if path != "layers":
        return rule
    own = object.__new__(_overriding(type(rule)))
    vars(own).update(vars(rule))
    return own


def train(problem, rule, heads=3, seeds=2, steps=3, depth=3, path="auto", **options):
    """Particles on this path, all steps recorded unless told otherwise."""
    options = {"record": range(steps + 1), "device": "cpu", "nodes": 4} | options
    with pytest.MonkeyPatch.context() as patch:
        rule = on_path(patch, path, rule)
        return train_particles(problem, rule, depth, heads, steps, seeds, **options)


# --- problems ----------------------------------------------------------------------------------


def biased_atoms(M=5, m=2, d=3, scale=0.7, equal=False):
    """Atoms with all biases, which every rule can train."""
    return small_atoms(M, m, d, BIASES, scale=scale, equal=equal)


def plain_heads(depth, H, seed=0, biases=BIASES, lead=(1,), d=3, m=2):
    """H heads of weight 1/H in every layer, leading dimensions (L, seeds)."""
    parts = random_parts((depth, *lead), H, m, d, biases, seed, scale=0.7)
    parts.pop("weights")
    return Heads(**parts)


def spread_out(law, counts):
    """The plain H-head model of these draws: atom a repeated counts[r, a] times, weights 1/H."""
    H = int(counts[0].sum())
    return Heads.from_packed(
        torch.stack([law.heads.packed.repeat_interleave(n, dim=1) for n in counts]).unsqueeze(1),
        torch.full((len(counts), 1, H), 1 / H, dtype=F64),
        law.layout,
    )


def run_from(start, problem, rule, steps, record=None, exponent=1.0):
    record = tuple(range(steps + 1)) if record is None else record
    run = empty_run(start.lead[0], start.count, range(start.lead[1]), steps, problem, "cpu")
    return train_from(start, problem, rule, steps, record, run, exponent)


# Times as large an atom as overflows at once.
BOMB = {torch.float32: 1e30, F64: 1e200}


def law_with_a_bomb(size, weight=0.08):
    """The last of five atoms is so many times as large, and rarely drawn."""
    heads = random_heads((), 5, 2, 3, BIASES, seed=1, scale=0.7)
    packed, weights = heads.packed.clone(), torch.full((5,), (1 - weight) / 4, dtype=F64)
    packed[:, -1] *= size
    weights[-1] = weight
    return Atoms(Heads.from_packed(packed, weights, heads.layout))


# --- checks ------------------------------------------------------------------------------------


def recorded(run, seeds=None):
    """Everything a run says of these seeds, by name."""
    rows = [run.seeds.index(seed) for seed in (run.seeds if seeds is None else seeds)]
    said = {name: getattr(run, name)[rows] for name in ("loss", "diverged", "diverged_at")}
    if run.counts is not None:
        said |= {"counts": run.counts[rows], "atoms": run.atoms[rows]}
    for k in run.x:
        said |= {f"x of step {k}": run.x[k][rows], f"p of step {k}": run.p[k][rows]}
        said[f"heads of step {k}"] = run.heads[k].packed[rows]
        for name in ("probe_x", "probe_p", "probe_loss"):
            if k in getattr(run, name):
                said[f"{name} of step {k}"] = getattr(run, name)[k][rows]
    return said


def assert_same_seeds(run, seeds, other):
    """What a run says of these seeds is, bit by bit, what another says that has them too."""
    found, expected = recorded(run, seeds), recorded(other, seeds)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert same_bits(value, expected[name]), name


def assert_flagged_or_finite(run):
    """What is not finite belongs to a seed that is flagged, from the step it was seen at."""
    for i, at in enumerate(run.diverged_at.tolist()):
        last = math.inf if at < 0 else at
        assert bool(run.diverged[i]) == (at >= 0)
        assert torch.isfinite(run.loss[i, : None if at < 0 else at]).all()
        for step in run.x:
            if step < last:
                for values in (run.x[step], run.p[step], run.heads[step].packed):
                    assert torch.isfinite(values[i]).all(), (i, step, at)


def check_alone(problem, rule, path, heads, **options):
    """A seed is the same alone, among others, and in another order beside yet others."""
    options |= {"path": path}
    run = train(problem, rule, heads, seeds=[5, 2, 7], **options)
    assert_flagged_or_finite(run)
    for seed in (5, 7):
        assert_same_seeds(run, [seed], train(problem, rule, heads, seeds=[seed], **options))
    turned = train(problem, rule, heads, seeds=[20, 7, 5, 2], **options)
    assert_same_seeds(run, run.seeds, turned)


def check_bomb(problem, rule, seeds=12, steps=2, **options):
    """Seeds that draw the bomb are flagged and frozen; the others do not feel them."""
    run = train(problem, rule, 2, seeds, steps, **options)
    hit = (run.counts[:, :, -1] > 0).any(dim=1)
    assert 1 <= int(hit.sum()) < seeds
    assert torch.equal(run.diverged, hit)
    assert torch.equal(run.diverged_at, torch.where(hit, 0, -1))
    assert run.status == f"{int(hit.sum())} of {seeds} seeds diverged"
    assert_flagged_or_finite(run)
    assert not torch.isfinite(run.loss[hit]).any()
    assert not torch.isfinite(run.x[steps][hit]).flatten(1).all(dim=1).any()
    for k in range(1, steps + 1):  # frozen: still the heads they were drawn with
        assert torch.equal(run.heads[k].packed[hit], run.heads[0].packed[hit])
    assert_alive_alone(run, problem, rule, 2, **options)


def assert_alive_alone(run, problem, rule, heads, **options):
    """The seeds that did not diverge are, bit by bit, those of a batch in which none does."""
    alive = [seed for seed, bad in zip(run.seeds, run.diverged.tolist()) if not bad]
    steps, depth = run.loss.shape[1] - 1, run.depth
    again = train(problem, rule, heads, alive, steps, depth, record=list(run.x), **options)
    assert not again.diverged.any()
    assert_same_seeds(run, alive, again)


def global_random_states():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def tensors_of(problem):
    """Copies of all that a problem holds."""
    heads = getattr(problem.law, "heads", None)
    held = [problem.contexts, problem.targets, *(problem.probes or ())]
    held += [] if heads is None else [heads.packed, heads.weights]
    return [tensor.clone() for tensor in held]


def problem_of(law, sizes=(3, 4), probes=0, causal=False, dtype=F64, seed=2):
    """B contexts of N tokens, with so many probes."""
    B, N = sizes
    given = [normal(n, N, law.d, seed=seed + i, dtype=dtype) for i, n in enumerate((B, probes))]
    wanted = [normal(n, law.d, seed=seed + 2 + i, dtype=dtype) for i, n in enumerate((B, probes))]
    pair = (given[1], wanted[1]) if probes else None
    return Problem(given[0], wanted[0], law, causal, probes=pair)
