"""Blocks of a few units on a few tokens, what they train to, and how they refuse."""

import pytest
import torch
from builders import F64, normal, same_bits, small_atoms
from perceptron_units import random_perceptrons

from ipslimit import AdamW, Atoms, Block, Problem, train_particles
from ipslimit.solvers import solve_limit

RULE = AdamW(0.05, eps=0.1)
X, Y = normal(4, 3, 3, seed=2), normal(4, 3, seed=5)


def perceptrons(activation="gelu"):
    units = random_perceptrons(H=4, n=2, names=("b_in", "b_out"), activation=activation)
    return Atoms(units.from_packed(units.packed, torch.full((4,), 0.25, dtype=F64), units.layout))


def block(attention=None, perceptron=None, **options):
    laws = attention or small_atoms(biases=()), perceptron or perceptrons()
    return Block(*laws, **{"norm": "rms", "norm_eps": 0.1} | options)


def problem(law=None, contexts=X, targets=Y, **options):
    return Problem(contexts, targets, law or block(), **options)


def train(of=None, rule=RULE, depth=3, heads=4, steps=2, **options):
    of = problem() if of is None else of
    return train_particles(of, rule, depth, heads, steps, device="cpu", **options)


def limit(of=None, steps=2, **options):
    return solve_limit(problem() if of is None else of, RULE, steps, 1e-2, device="cpu", **options)


def same(one, other):
    units = [
        (u.packed, other.units[k][n].packed) for k, f in one.units.items() for n, u in f.items()
    ]
    pairs = [(one.loss, other.loss), *((t, other.p[k]) for k, t in one.p.items()), *units]
    return all(same_bits(a, b) for a, b in pairs)


def refused(make, kind, words):
    with pytest.raises(kind, match=words) as caught:
        make()
    assert caught.type is kind and "\n" not in str(caught.value)


PROBES = (normal(2, 3, 3, seed=8), normal(2, 3, seed=9))
