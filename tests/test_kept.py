"""What a layer's field keeps for its transpose: the same bits as computed again, in its budget."""

import pytest
import torch
from builders import F64, assert_to_rounding, random_heads, small_atoms
from perceptron_units import random_perceptrons

from ipslimit import AdamW, Atoms, Block, Problem, SBOAdamW, train_particles
from ipslimit.cpu.dispatch import VARIABLE
from ipslimit.model import eager, layers
from ipslimit.model.branch import Branch
from ipslimit.model.layers import Layers, kept_bytes
from ipslimit.model.sight import Sight

DEPTH, SEEDS, B, N, D, M, H = 3, 2, 2, 5, 3, 2, 4


@pytest.fixture(autouse=True)
def eager_path(monkeypatch):
    monkeypatch.setenv(VARIABLE, "eager")


def tokens(*lead, seed=0, dtype=F64):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*lead, B, N, D, generator=gen, dtype=dtype)


def branch(sequential=False, lead=(DEPTH, SEEDS), dtype=F64):
    attention = random_heads(lead, H, M, D).to(dtype)
    perceptron = random_perceptrons(lead, H=H, n=M, d=D).to(dtype)
    return Branch({"attention": attention, "perceptron": perceptron}, None, sequential)


def both_ways(made, sight, keep, tied=None, changed=None):
    """Hidden states and costates; how many families' stages found something kept."""
    passes = Layers(made, 1 / DEPTH, {"field": 0, "vjp": 0}, None, tied)
    x = passes.forward(tokens(seed=1), sight, keep)
    found = sum(bool(part) for each in _kept(passes) for part in each.values())
    end = tokens(SEEDS, seed=2)
    p = passes.backward(x if changed is None else changed(x), end, True, sight)
    return x, p, found, passes


def _kept(passes):
    return [] if passes._kept is None else passes._kept.stages


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("matrices", [True, False])
@pytest.mark.parametrize("sight", [Sight(), Sight(causal=True)])
def test_kept_and_computed_again_are_the_same_bits(monkeypatch, sight, matrices, dtype):
    monkeypatch.setattr(eager, "keeps_matrices", lambda tokens, m: matrices)
    units = random_heads((SEEDS,), H, M, D).to(dtype)
    x, c = tokens(SEEDS, dtype=dtype), tokens(SEEDS, seed=1, dtype=dtype)
    kept = []
    assert torch.equal(units.field(x, sight, kept=kept), units.field(x, sight))
    (block,) = kept
    assert (block.attention is not None) == matrices
    for _ in range(2):  # what is kept is not used up
        ours = units.vjp(x, c, sight, with_outputs=True, kept=kept)
        again = units.vjp(x, c, sight, with_outputs=True)
        flat = [[dx, dunits.packed, dunits.weights, z] for dx, dunits, z in (ours, again)]
        assert all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("tied", [None, DEPTH])
def test_layers_that_keep_and_that_do_not_are_the_same(sequential, tied):
    made = branch(sequential, (1, SEEDS) if tied else (DEPTH, SEEDS))
    kept = both_ways(made, Sight(causal=True), True, tied)
    again = both_ways(made, Sight(causal=True), False, tied)
    assert (kept[2], again[2]) == (DEPTH, 0)  # of attention alone
    assert torch.equal(kept[0], again[0])
    assert torch.equal(kept[1], again[1])
    assert kept[3]._kept is None  # nothing is held beyond the way back


def test_what_is_kept_of_other_states_is_not_used():
    made = branch()
    _, expected, _, _ = both_ways(made, Sight(), False, changed=lambda x: 2 * x)
    _, p, found, passes = both_ways(made, Sight(), True, changed=lambda x: 2 * x)
    assert found == DEPTH and passes._kept is not None
    assert torch.equal(p, expected)


@pytest.mark.parametrize("contexts,n,m", [(2, 5, 2), (3, 8, 2), (2, 9, 2)])
def test_the_bytes_told_are_those_kept(contexts, n, m):
    """N = 4 m is the last that keeps its matrices."""
    heads = random_heads((1,), H, m, D, biases=())
    kept = []
    heads.field(torch.randn(1, contexts, n, D, dtype=F64), kept=kept)
    (block,) = kept
    tensors = [block.q, block.z, block.attention, block.w, block.o]  # k and v lie beside q
    storages = {t.untyped_storage().data_ptr(): t for t in tensors if t is not None}
    assert (block.attention is not None) == (n <= 4 * m)
    held = sum(t.untyped_storage().nbytes() for t in storages.values())
    assert heads.kept_bytes(contexts, n) == held


def test_beyond_the_budget_nothing_is_kept(monkeypatch):
    made, sizes = branch(), (DEPTH, SEEDS, B, N)
    total = kept_bytes(made, *sizes)
    assert total == DEPTH * SEEDS * made.families["attention"].kept_bytes(B, N) > 0
    expected = both_ways(made, Sight(), True)
    monkeypatch.setattr(layers, "KEPT_BYTES", total)
    assert both_ways(made, Sight(), True)[2] == DEPTH
    monkeypatch.setattr(layers, "KEPT_BYTES", total - 1)
    refused = both_ways(made, Sight(), True)
    assert kept_bytes(made, *sizes) == refused[2] == 0
    assert torch.equal(refused[1], expected[1])


def test_no_other_path_keeps_anything(monkeypatch):
    monkeypatch.setenv(VARIABLE, "auto")
    assert random_heads((1,), H, M, D).kept_bytes(B, N) == 0


@pytest.mark.parametrize("rule", [AdamW(0.05, eps=0.01), SBOAdamW(0.05, eps=0.01)])
@pytest.mark.parametrize("tied,sequential", [(False, False), (True, False), (False, True)])
def test_training_that_keeps_is_training_that_does_not(monkeypatch, rule, tied, sequential):
    perceptrons = random_perceptrons((), H=H, n=M, d=D)
    perceptrons.weights.div_(perceptrons.weights.sum())
    law = Block(small_atoms(H), Atoms(perceptrons), sequential=sequential)
    options = {"probes": (tokens(seed=4), tokens(seed=5)[:, 0]), "tied": tied, "causal": True}
    problem = Problem(tokens(seed=1), tokens(seed=2)[:, 0], law, **options)

    found, vjp = [], eager.vjp

    def watched(*arguments, kept=None):
        found.append(bool(kept))
        return vjp(*arguments, **({"kept": kept} if kept else {}))

    monkeypatch.setattr(eager, "vjp", watched)

    def trained():
        found.clear()
        return train_particles(problem, rule, DEPTH, H, 2, SEEDS, record=(0, 2))

    kept = trained()
    assert found and all(found)
    monkeypatch.setattr(layers, "KEPT_BYTES", 0)
    again = trained()
    assert found and not any(found)
    for name in ("x", "p", "probe_x", "probe_p"):
        for step in (0, 2):
            assert torch.equal(getattr(kept, name)[step], getattr(again, name)[step]), (name, step)
    assert torch.equal(kept.loss, again.loss)


@pytest.mark.parametrize("large", [1.0, 1e3])
def test_torch_own_transpose_of_softmax_is_the_formula(large):
    """In place; exactly zero where all attention is on one token."""
    gen = torch.Generator().manual_seed(0)
    logits, c = (torch.randn(3, 7, 9, generator=gen, dtype=F64) for _ in range(2))
    a = torch.softmax(large * logits, -1)
    expected = a * (c - (a * c).sum(-1, keepdim=True))
    found = c.clone()
    eager.pull_back_softmax(found, a, -1, F64, grad_input=found)
    assert_to_rounding(found, expected, 4, "softmax")
    alone = found[a == 1.0]
    assert (len(alone) > 0) == (large > 1)
    assert torch.equal(alone, torch.zeros_like(alone))


def test_kept_must_be_a_list():
    heads, x = random_heads((), H, M, D), tokens()
    with pytest.raises(TypeError, match=r"kept must be a list or None; got .*kept=\[\]"):
        heads.field(x, kept={})
    with pytest.raises(TypeError, match="kept must be a list"):
        heads.vjp(x, x, kept=True)
