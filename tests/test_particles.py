"""The particle transformer against a network written naively, and its promises to the limit."""

import math
import random
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from builders import (
    BIASES,
    F64,
    assert_to_rounding,
    naive_field,
    normal,
    random_parts,
    small_atoms,
    small_problem,
)

from ipslimit import (
    SGD,
    AdamW,
    Atoms,
    BlockAdamW,
    Heads,
    TruncatedNormal,
    XavierUniform,
    train_particles,
)
from ipslimit.model.losses import ReadoutCrossEntropy
from ipslimit.model.particles import train_from
from ipslimit.model.problem import Problem
from ipslimit.model.runs import empty_run

# Some tens of roundings per layer and step, in sums of O(1) terms; Adam divides by sqrt(v) + eps
# with eps = 0.1, which multiplies them by 10 at most. Each test runs a few layers and steps.
ROUNDING = 10_000
ADAMW = AdamW(0.05, betas=(0.9, 0.99), eps=0.1, weight_decay=0.1)


def plain_heads(depth, H, seed=0, biases=BIASES, lead=(1,), d=3, m=2):
    """H heads of weight 1/H in every layer, leading dimensions (L, seeds)."""
    parts = random_parts((depth, *lead), H, m, d, biases, seed, scale=0.7)
    parts.pop("weights")
    return Heads(**parts)


def run_from(start, problem, rule, steps, record=None, exponent=1.0):
    record = tuple(range(steps + 1)) if record is None else record
    run = empty_run(start.lead[0], start.count, range(start.lead[1]), steps, problem, "cpu")
    return train_from(start, problem, rule, steps, record, run, exponent)


class NaiveNetwork:
    """L layers written out with autograd, one seed, trained by torch.optim on the plain J."""

    def __init__(self, start, problem, exponent=1.0):
        layers = [start[r, 0] for r in range(start.lead[0])]
        self.problem = problem
        self.scale = len(layers) ** -exponent
        self.factor = start.count / self.scale  # J's gradient times this is g
        self.weights = layers[0].weights
        self.layers = [
            {name: t.detach().clone().requires_grad_() for name, t in layer.parts().items()}
            for layer in layers
        ]

    def hidden(self, contexts):
        x = [contexts.clone().requires_grad_()]
        for layer in self.layers:
            field = naive_field(x[-1], layer | {"weights": self.weights}, self.problem.causal)
            x.append(x[-1] + self.scale * field)
        return x

    def losses(self):
        x = self.hidden(self.problem.contexts)
        return x, self.problem.loss(x[-1], self.problem.targets)

    def costates(self):
        """N dl_b/dx_r at every layer."""
        x, losses = self.losses()
        return [self.problem.N * g for g in torch.autograd.grad(losses.sum(), x)]

    def parameters(self):
        return [t for layer in self.layers for name, t in layer.items() if name != "bk"]

    def gradients(self):
        """g of every layer by name."""
        loss = self.losses()[1].mean()
        for t in self.parameters():
            t.grad = None
        loss.backward()
        return [
            {name: self.factor * t.grad for name, t in layer.items() if name != "bk"}
            for layer in self.layers
        ]

    def train(self, make_optimizer, steps):
        optimizer = make_optimizer(self.parameters())
        losses = [self.losses()[1].mean().detach()]
        for _ in range(steps):
            self.gradients()
            for t in self.parameters():
                t.grad *= self.factor
            optimizer.step()
            losses.append(self.losses()[1].mean().detach())
        return torch.stack(losses)


class WeightedSquares:
    """A loss of the user's, on all tokens, without a check of its own."""

    def __call__(self, x, y):
        weights = torch.linspace(0, 1, x.shape[-2])[:, None]
        return ((x - y[..., None, :]).square() * weights).sum(dim=(-1, -2))


def problem_with(loss, **options):
    if loss == "squares":
        return small_problem(**options)
    if loss == "user":
        return small_problem(loss=WeightedSquares(), **options)
    law = small_atoms()
    readout = ReadoutCrossEntropy(normal(4, law.d, seed=8))
    contexts, classes = normal(3, 4, law.d, seed=2), torch.tensor([3, 0, 1])
    return Problem(contexts, classes, law, loss=readout, **options)


LOSSES = pytest.mark.parametrize("loss", ["squares", "user", "entropy"])
CAUSAL = pytest.mark.parametrize("causal", [False, True])


# --- gradients ---------------------------------------------------------------------------------


@LOSSES
@CAUSAL
@pytest.mark.parametrize("depth,H,exponent", [(4, 3, 1.0), (3, 2, 0.5), (1, 1, 1.0)])
def test_hidden_states_and_costates_are_autograd_through_the_whole_network(
    depth, H, exponent, loss, causal
):
    problem = problem_with(loss, causal=causal)
    start = plain_heads(depth, H)
    run = run_from(start, problem, SGD(0.1), 0, exponent=exponent)
    naive = NaiveNetwork(start, problem, exponent)
    x, losses = naive.losses()
    assert run.x[0].shape == run.p[0].shape == (1, depth + 1, 3, 4, 3)
    assert_to_rounding(run.x[0][0], torch.stack(x).detach(), ROUNDING, "x")
    assert_to_rounding(run.p[0][0], torch.stack(naive.costates()), ROUNDING, "p")
    assert_to_rounding(run.loss[0, 0], losses.mean().detach(), ROUNDING, "loss")


@LOSSES
@CAUSAL
@pytest.mark.parametrize("depth,H,exponent", [(4, 3, 1.0), (3, 2, 0.5), (1, 1, 1.0)])
def test_an_sgd_step_is_minus_lr_L_H_times_the_gradient_of_J(depth, H, exponent, loss, causal):
    problem = problem_with(loss, causal=causal)
    start = plain_heads(depth, H)
    run = run_from(start, problem, SGD(0.5), 1, exponent=exponent)
    naive = NaiveNetwork(start, problem, exponent)
    moved = run.heads[1].with_packed(run.heads[1].packed - run.heads[0].packed)
    for r, gradients in enumerate(naive.gradients()):
        for name, g in gradients.items():
            assert_to_rounding(getattr(moved, name)[0, r], -0.5 * g, ROUNDING, f"{name} of {r}")
        assert (moved.bk[0, r] == 0).all()


def test_gradients_do_not_depend_on_the_scale_of_depth_and_width():
    """g = L H dJ/dtheta is O(1): an SGD step moves heads alike at L H = 4 and at L H = 256."""
    problem, sizes = small_problem(), []
    for depth, H in ((2, 2), (16, 16)):
        run = run_from(plain_heads(depth, H), problem, SGD(1.0), 1)
        sizes.append(float((run.heads[1].packed - run.heads[0].packed).square().mean().sqrt()))
    assert 0.5 < sizes[0] / sizes[1] < 2


OPTIMIZERS = {
    "sgd": (
        SGD(0.02, momentum=0.8, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.8, weight_decay=0.1),
    ),
    "adamw": (
        ADAMW,
        lambda p: torch.optim.AdamW(p, lr=0.05, betas=(0.9, 0.99), eps=0.1, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@LOSSES
@CAUSAL
def test_training_is_torch_optim_on_a_network_with_autograd(optimizer, loss, causal):
    rule, make_optimizer = OPTIMIZERS[optimizer]
    problem = problem_with(loss, causal=causal)
    start = plain_heads(3, 4, biases=("bq", "bv", "bo"))
    naive = NaiveNetwork(start, problem)
    run = run_from(start, problem, rule, 5)
    assert_to_rounding(run.loss[0], naive.train(make_optimizer, 5), ROUNDING)
    assert float(run.loss[0, 5]) < float(run.loss[0, 0])
    for r, layer in enumerate(naive.layers):
        for name, t in layer.items():
            assert_to_rounding(getattr(run.heads[5], name)[0, r], t.detach(), ROUNDING, name)


def test_a_layer_is_updated_after_its_costate_was_formed():
    """p_r uses theta before the update: one sweep on updated heads would give other gradients."""
    problem, start = small_problem(), plain_heads(3, 2)
    trained = run_from(start, problem, SGD(5.0), 1, record=(0,))
    assert torch.equal(trained.p[0], run_from(start, problem, SGD(5.0), 0).p[0])


# --- the atoms' shortcut and H = infinity -----------------------------------------------------


def spread_out(law, counts):
    """The plain H-head model of these draws: atom a repeated counts[r, a] times, weights 1/H."""
    return Heads.from_packed(
        torch.stack([law.heads.packed.repeat_interleave(n, dim=1) for n in counts]).unsqueeze(1),
        torch.full((len(counts), 1, int(counts[0].sum())), 1 / int(counts[0].sum()), dtype=F64),
        law.layout,
    )


@CAUSAL
@pytest.mark.parametrize("H", [1, 3, 5, 40])
@pytest.mark.parametrize("rule", [ADAMW, BlockAdamW(0.05, eps=0.1), SGD(0.02, 0.5)], ids=repr)
def test_atoms_shortcut_is_the_plain_model_of_H_heads(H, rule, causal):
    problem = small_problem(causal=causal, probes=2)
    short = train_particles(problem, rule, 4, H, 4, seeds=2, record=range(5), device="cpu")
    assert short.heads[0].count == min(H, 5)
    for s in range(2):
        plain = run_from(spread_out(problem.law, short.counts[s]), problem, rule, 4)
        assert plain.heads[0].count == H
        assert_to_rounding(short.loss[s], plain.loss[0], ROUNDING)
        for k in range(5):
            assert_to_rounding(short.x[k][s], plain.x[k][0], ROUNDING, f"x of step {k}")
            assert_to_rounding(short.p[k][s], plain.p[k][0], ROUNDING, f"p of step {k}")
            assert_to_rounding(short.probe_x[k][s], plain.probe_x[k][0], ROUNDING, f"probes, {k}")
        for r in range(4):  # every copy of an atom is where its one stand-in is
            copies = torch.arange(5).repeat_interleave(short.counts[s, r])
            where = {int(atom): i for i, atom in enumerate(short.atoms[s, r])}
            chosen = [where[int(atom)] for atom in copies]
            stand_in = short.heads[4].packed[s, r][:, chosen]
            assert_to_rounding(stand_in, plain.heads[4].packed[0, r], ROUNDING, f"layer {r}")


def test_an_atom_that_no_draw_hit_is_trained_too_and_changes_nothing():
    problem = small_problem()
    run = train_particles(problem, ADAMW, 4, 5, 3, seeds=4, record=[0, 3], device="cpu")
    idle = run.heads[0].weights == 0
    assert idle.any()
    moved = (run.heads[3].packed - run.heads[0].packed).abs().amax(dim=2)
    assert (moved[idle] > 1e-4).all()


def test_counts_and_atoms_are_reported_and_fit_the_heads():
    problem = small_problem()
    run = train_particles(problem, SGD(0.1), 3, 4, 0, seeds=2, device="cpu")
    assert run.counts.shape == (2, 3, 5)
    assert run.atoms.shape == (2, 3, 4)
    assert (run.counts.sum(dim=-1) == 4).all()
    for s in range(2):
        for r in range(3):
            atoms = run.atoms[s, r]
            assert torch.equal(run.heads[0].packed[s, r], problem.law.heads.packed[:, atoms])
            assert torch.equal(run.heads[0].weights[s, r], run.counts[s, r, atoms] / 4.0)


def test_heads_none_is_the_whole_law_in_every_layer():
    problem = small_problem(probes=2)
    whole = train_particles(problem, ADAMW, 3, None, 3, record=range(4), device="cpu")
    assert whole.head_count == math.inf
    assert whole.counts is None
    heads = problem.law.heads
    for r in range(3):
        assert torch.equal(whole.heads[0].packed[0, r], heads.packed)
        assert torch.equal(whole.heads[0].weights[0, r], heads.weights)
    start = heads.map(lambda t: t.expand(3, 1, *t.shape))
    by_hand = run_from(start, problem, ADAMW, 3)
    for k in range(4):
        assert torch.equal(whole.x[k], by_hand.x[k])
        assert torch.equal(whole.p[k], by_hand.p[k])


def test_heads_none_is_what_draws_in_exact_proportion_give():
    parts = small_atoms(M=3).heads.parts()
    law = Atoms(Heads(**parts, weights=torch.tensor([0.25, 0.25, 0.5], dtype=F64)))
    problem = small_problem(law)
    whole = train_particles(problem, ADAMW, 3, None, 3, record=range(4), device="cpu")
    plain = run_from(spread_out(law, torch.tensor([[1, 1, 2]] * 3)), problem, ADAMW, 3)
    for k in range(4):
        assert_to_rounding(plain.x[k], whole.x[k], ROUNDING)
        assert_to_rounding(plain.p[k], whole.p[k], ROUNDING)


@pytest.mark.parametrize("law", [XavierUniform(3, 2), TruncatedNormal(3, 2, 0.5, 1.0)], ids=repr)
def test_heads_none_of_a_sampled_law_is_its_nodes(law):
    problem = small_problem(law)
    run = train_particles(problem, SGD(0.1), 2, None, 0, device="cpu", nodes=64, nodes_seed=3)
    assert torch.equal(run.heads[0].packed[0, 1], law.nodes(64, 3).heads.packed)
    # antithetic pairs: the mean field vanishes, to rounding
    assert_to_rounding(run.x[0][0, -1], problem.contexts, 100)


@pytest.mark.parametrize("law", [XavierUniform(3, 2), TruncatedNormal(3, 2, 0.5, 1.0)], ids=repr)
def test_sampled_laws_run_the_plain_model_of_H_heads(law):
    problem = small_problem(law)
    run = train_particles(problem, ADAMW, 3, 4, 3, seeds=2, record=[0, 3], device="cpu")
    assert run.counts is None
    assert run.heads[0].count == 4
    assert (run.heads[0].weights == 0.25).all()
    start = run.heads[0].map(lambda t: t.transpose(0, 1))
    assert torch.equal(run_from(start, problem, ADAMW, 3).x[3], run.x[3])
    assert not torch.equal(run.heads[0].packed[0, 0], run.heads[0].packed[0, 1])
    assert not torch.equal(run.heads[0].packed[0], run.heads[0].packed[1])


@pytest.mark.parametrize("rule", [SGD(0.3), ADAMW], ids=repr)
@pytest.mark.parametrize("step", [0, 3])
def test_the_model_with_infinitely_many_heads_converges_with_order_one_in_depth(rule, step):
    """Richardson: |x_L - x_2L| at matching depths halves as L doubles, for x and for p."""
    problem = small_problem()
    depths = [16, 32, 64, 128]
    runs = [train_particles(problem, rule, L, None, step, device="cpu") for L in depths]
    for name in ("x", "p"):
        paths = [getattr(run, name)[step][0, :: L // 16] for run, L in zip(runs, depths)]
        gaps = [float((a - b).abs().max()) for a, b in pairwise(paths)]
        order = -np.polyfit(np.log(depths[:-1]), np.log(gaps), 1)[0]
        assert abs(order - 1) < 0.2, (name, gaps)


def test_many_heads_approach_infinitely_many_like_one_over_root_H():
    problem = small_problem()
    whole = train_particles(problem, ADAMW, 4, None, 2, device="cpu")
    sizes, errors = [16, 256, 4096], []
    for H in sizes:
        run = train_particles(problem, ADAMW, 4, H, 2, seeds=64, device="cpu")
        errors.append(float((run.x[2] - whole.x[2]).square().mean().sqrt()))
    slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    # 64 seeds: 9 % on each error, over a factor 256 in H: 0.02 on the exponent
    assert abs(slope + 0.5) < 0.08


def test_a_million_heads_cost_what_the_atoms_do():
    problem = small_problem()
    run = train_particles(problem, ADAMW, 3, 10**6, 2, seeds=2, record=[0, 2], device="cpu")
    assert run.heads[0].count == 5
    assert (run.counts.sum(dim=-1) == 10**6).all()
    few = train_particles(problem, ADAMW, 3, 5, 2, seeds=2, record=[0, 2], device="cpu")
    assert run.cost == few.cost
    assert run.heads[2].packed.shape == few.heads[2].packed.shape
    whole = train_particles(problem, ADAMW, 3, None, 2, device="cpu")
    # fluctuations are O(1e-3): 10 of them, and far from the O(0.1) of five heads
    assert float((run.x[2] - whole.x[2]).abs().max()) < 1e-2
    started = time.perf_counter()
    train_particles(problem, ADAMW, 3, 10**6, 2, device="cpu")
    assert time.perf_counter() - started < 5  # a million stored heads would take minutes


# --- seeds -------------------------------------------------------------------------------------


def assert_same_seed(run, s, other, t, same):
    for k in run.x:
        for name in ("x", "p", "probe_x", "probe_p", "probe_loss"):
            if k in getattr(run, name):
                same(getattr(run, name)[k][s], getattr(other, name)[k][t], f"{name} of step {k}")
        same(run.heads[k].packed[s], other.heads[k].packed[t], f"heads of step {k}")
    same(run.loss[s], other.loss[t], "loss")


def bitwise(a, b, what):
    assert torch.equal(a, b), what


@pytest.mark.parametrize("rule", [ADAMW, BlockAdamW(0.05, eps=0.1), SGD(0.3, 0.5)], ids=repr)
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_a_seed_alone_is_the_seed_in_a_batch_bit_by_bit(rule, dtype):
    """At the sizes of the default study."""
    law = small_atoms(M=32, d=4, m=4, biases=())
    problem = small_problem(law, B=4, N=8, probes=3, dtype=dtype)
    batch = train_particles(problem, rule, 4, 16, 3, seeds=6, record=[0, 3], device="cpu")
    for s in (0, 3, 5):
        alone = train_particles(problem, rule, 4, 16, 3, seeds=[s], record=[0, 3], device="cpu")
        assert torch.equal(batch.counts[s], alone.counts[0])
        assert_same_seed(batch, s, alone, 0, bitwise)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("sizes", [(3, 5, 7, 2, 3), (2, 6, 3, 3, 5), (3, 4, 5, 2, 3)])
def test_a_seed_alone_is_the_seed_in_a_batch_at_any_sizes(sizes, dtype):
    B, N, M, m, d = sizes
    problem = small_problem(small_atoms(M=M, m=m, d=d), B=B, N=N, dtype=dtype)
    batch = train_particles(problem, ADAMW, 3, 8, 3, seeds=6, record=[0, 3], device="cpu")
    for s in range(6):
        alone = train_particles(problem, ADAMW, 3, 8, 3, seeds=[s], record=[0, 3], device="cpu")

        def to_rounding(a, b, what):
            assert_to_rounding(a, b, ROUNDING, what)

        assert torch.equal(batch.counts[s], alone.counts[0])
        assert_same_seed(batch, s, alone, 0, to_rounding)


# MKL sums some small products in an order that depends on the batch they are in and on where in
# memory they lie. FAILS at present for (1, 1, 7, 3, 40) in float32.
@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("path", ["eager", "auto"])
@pytest.mark.parametrize("sizes", [(2, 6, 3, 3, 5), (1, 9, 3, 3, 64), (1, 1, 7, 3, 40)])
def test_a_seed_alone_is_the_seed_in_a_batch_bit_by_bit_at_awkward_sizes(
    monkeypatch, sizes, path, dtype
):
    monkeypatch.setenv("IPSLIMIT_KERNEL", path)
    B, N, M, m, d = sizes
    problem = small_problem(small_atoms(M=M, m=m, d=d, scale=0.3), B=B, N=N, dtype=dtype)
    batch = train_particles(problem, ADAMW, 3, 8, 3, seeds=6, record=[0, 3], device="cpu")
    for s in range(6):
        alone = train_particles(problem, ADAMW, 3, 8, 3, seeds=[s], record=[0, 3], device="cpu")
        assert_same_seed(batch, s, alone, 0, bitwise)


def test_the_order_of_seeds_does_not_matter():
    problem = small_problem()
    some = train_particles(problem, ADAMW, 3, 4, 2, seeds=[7, 2, 5], device="cpu")
    other = train_particles(problem, ADAMW, 3, 4, 2, seeds=[5, 7, 2], device="cpu")
    assert some.seeds == (7, 2, 5)
    for s, t in ((0, 1), (1, 2), (2, 0)):
        assert torch.equal(some.counts[s], other.counts[t])
        assert_same_seed(some, s, other, t, lambda a, b, w: assert_to_rounding(a, b, ROUNDING, w))


def test_the_other_seeds_of_a_batch_do_not_matter():
    problem = small_problem(small_atoms(M=8, d=4, m=4, biases=()), B=4, N=8)
    first = train_particles(problem, ADAMW, 3, 8, 2, seeds=[3, 10, 11], device="cpu")
    second = train_particles(problem, ADAMW, 3, 8, 2, seeds=[20, 3], device="cpu")
    assert_same_seed(first, 0, second, 1, bitwise)


def test_a_number_of_seeds_means_the_first_ones():
    problem = small_problem()
    number = train_particles(problem, SGD(0.1), 2, 3, 1, seeds=3, device="cpu")
    listed = train_particles(problem, SGD(0.1), 2, 3, 1, seeds=np.arange(3), device="cpu")
    assert number.seeds == listed.seeds == (0, 1, 2)
    assert torch.equal(number.x[1], listed.x[1])


def test_draws_are_a_function_of_root_seed_depth_heads_and_seed():
    problem = small_problem(small_atoms(M=20))

    def counts(depth=4, heads=40, seeds=(1,), root_seed=0, **options):
        options = {"rule": SGD(0.1), "steps": 0, "device": "cpu"} | options
        run = train_particles(
            problem,
            options.pop("rule"),
            depth,
            heads,
            options.pop("steps"),
            seeds,
            root_seed,
            **options,
        )
        return run.counts[0]

    base = counts()
    assert torch.equal(base, counts(rule=ADAMW, steps=2, record=[1], residual_exponent=0.5))
    for other in ({"seeds": (2,)}, {"root_seed": 1}):
        assert not torch.equal(base, counts(**other)), other
    assert not torch.equal(base[:3], counts(depth=3))
    # the same generator would scale with H; independent draws do not
    assert not torch.equal(base, counts(heads=80) // 2)


def global_random_states():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


@pytest.mark.parametrize("heads", [3, None])
@pytest.mark.parametrize(
    "law", [small_atoms(), XavierUniform(3, 2), TruncatedNormal(3, 2, 0.5, 1.0)], ids=repr
)
def test_global_random_states_are_neither_touched_nor_used(law, heads):
    problem, results = small_problem(law), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = global_random_states()
        run = train_particles(problem, ADAMW, 2, heads, 1, device="cpu", nodes=16)
        assert global_random_states() == before
        results.append(run.x[1])
    assert torch.equal(*results)


# --- what is recorded --------------------------------------------------------------------------


def test_the_last_step_is_recorded_by_default_and_others_on_request():
    problem = small_problem(probes=2)
    run = train_particles(problem, ADAMW, 3, 4, 4, seeds=2, device="cpu")
    assert list(run.x) == list(run.p) == list(run.heads) == list(run.probe_x) == [4]
    some = train_particles(problem, ADAMW, 3, 4, 4, seeds=2, record=[3, 0, 3], device="cpu")
    assert list(some.x) == list(some.p) == list(some.heads) == list(some.probe_p) == [0, 3]
    assert some.x[0].shape == some.p[3].shape == (2, 4, 3, 4, 3)
    assert some.probe_x[0].shape == some.probe_p[3].shape == (2, 4, 2, 4, 3)
    assert some.probe_loss[0].shape == (2,)
    assert some.heads[3].lead == torch.Size([2, 3])
    assert some.loss.shape == run.loss.shape == (2, 5)
    assert (some.depth, some.head_count, some.seeds, some.root_seed) == (3, 4, (0, 1), 0)
    assert some.status == "ok"


def test_recording_changes_nothing_and_records_what_is_there():
    problem = small_problem(probes=2)
    every = train_particles(problem, ADAMW, 3, 4, 4, seeds=2, record=range(5), device="cpu")
    last = train_particles(problem, ADAMW, 3, 4, 4, seeds=2, device="cpu")
    assert torch.equal(every.loss, last.loss)
    assert_same_seed(last, 0, every, 0, bitwise)
    for k in range(5):
        until = train_particles(problem, ADAMW, 3, 4, k, seeds=2, device="cpu")
        assert_same_seed(
            until,
            1,
            train_particles(problem, ADAMW, 3, 4, k, seeds=2, record=[k], device="cpu"),
            1,
            bitwise,
        )
        assert torch.equal(until.x[k], every.x[k])
        assert torch.equal(until.p[k], every.p[k])
        assert torch.equal(until.heads[k].packed, every.heads[k].packed)
        assert torch.equal(until.loss, every.loss[:, : k + 1])


def test_recorded_steps_do_not_share_memory():
    run = train_particles(small_problem(), ADAMW, 3, 4, 2, record=range(3), device="cpu")
    before = run.heads[1].packed.clone(), run.x[1].clone()
    run.heads[0].packed.zero_()
    run.x[0].zero_()
    run.heads[2].packed.zero_()
    assert torch.equal(run.heads[1].packed, before[0])
    assert torch.equal(run.x[1], before[1])


def test_probes_are_not_trained_on_and_do_record():
    alone = train_particles(small_problem(), ADAMW, 3, 4, 3, seeds=2, record=range(4), device="cpu")
    with_probes = train_particles(
        small_problem(probes=5), ADAMW, 3, 4, 3, seeds=2, record=range(4), device="cpu"
    )
    assert not alone.probe_x
    for s in range(2):
        assert_same_seed(alone, s, with_probes, s, bitwise)
    assert sorted(with_probes.probe_x) == sorted(with_probes.probe_p) == list(range(4))


def test_probes_equal_to_the_contexts_have_their_trajectories():
    problem = small_problem()
    both = Problem(
        problem.contexts, problem.targets, problem.law, probes=(problem.contexts, problem.targets)
    )
    run = train_particles(both, ADAMW, 3, 4, 2, seeds=2, record=range(3), device="cpu")
    for k in range(3):
        assert torch.equal(run.x[k], run.probe_x[k])
        assert torch.equal(run.p[k], run.probe_p[k])
        assert torch.equal(run.loss[:, k], run.probe_loss[k])


def test_cost_counts_kernel_calls_of_one_layer():
    run = train_particles(small_problem(), ADAMW, 3, 4, 2, seeds=5, record=[0], device="cpu")
    assert run.cost == {"field": 3 * 3, "vjp": 3 * 2}  # the last step needs its loss only
    run = train_particles(small_problem(probes=2), ADAMW, 3, 4, 2, record=[0, 2], device="cpu")
    assert run.cost == {"field": 3 * 3 + 2 * 3, "vjp": 3 * 3 + 2 * 3}


def test_residual_exponent_scales_the_branches():
    problem = small_problem()
    runs = {
        a: train_particles(problem, SGD(0.1), 4, 3, 0, residual_exponent=a, device="cpu")
        for a in (0.0, 0.5, 1.0)
    }
    steps = {a: run.x[0][0, 1] - run.x[0][0, 0] for a, run in runs.items()}
    assert_to_rounding(steps[0.5], steps[0.0] / 2, 10)
    assert_to_rounding(steps[1.0], steps[0.0] / 4, 10)


def test_training_leaves_problem_and_start_unchanged():
    problem, start = small_problem(probes=2), plain_heads(3, 2)
    tensors = [problem.contexts, problem.targets, *problem.probes, problem.law.heads.packed]
    tensors += [start.packed, start.weights]
    before = [t.clone() for t in tensors]
    run_from(start, problem, ADAMW, 2)
    train_particles(problem, ADAMW, 3, None, 2, device="cpu")
    train_particles(problem, ADAMW, 3, 4, 2, device="cpu")
    for tensor, copy in zip(tensors, before):
        assert torch.equal(tensor, copy)


def test_float32_runs_and_stays_near_float64():
    # a float32 rounding is 6e-8; 3 layers and 3 steps of Adam with eps = 0.1 multiply it by ~100
    double = train_particles(small_problem(probes=2), ADAMW, 3, 4, 3, seeds=2, device="cpu")
    problem = small_problem(probes=2, dtype=torch.float32)
    single = train_particles(problem, ADAMW, 3, 4, 3, seeds=2, device="cpu")
    assert torch.equal(single.counts, double.counts)
    for name in ("x", "p", "probe_x", "probe_p"):
        a, b = getattr(single, name)[3], getattr(double, name)[3]
        assert a.dtype == torch.float32
        assert float((a - b).abs().max()) < 2e-5 * float(b.abs().max()), name
    assert single.loss.dtype == torch.float32


# --- the structure of the limit ----------------------------------------------------------------


def doubled(problem):
    contexts = problem.contexts.repeat_interleave(2, dim=1)
    return Problem(contexts, problem.targets, problem.law, causal=problem.causal)


def test_duplicating_every_token_changes_neither_loss_nor_heads_without_mask():
    problem = small_problem()
    one = train_particles(problem, ADAMW, 3, 4, 4, seeds=2, device="cpu")
    two = train_particles(doubled(problem), ADAMW, 3, 4, 4, seeds=2, device="cpu")
    assert_to_rounding(two.loss, one.loss, ROUNDING)
    assert_to_rounding(two.heads[4].packed, one.heads[4].packed, ROUNDING)
    assert_to_rounding(two.x[4], one.x[4].repeat_interleave(2, dim=-2), ROUNDING)
    assert_to_rounding(two.p[4], one.p[4].repeat_interleave(2, dim=-2), ROUNDING)


def test_duplicating_every_token_does_change_them_with_mask():
    problem = small_problem(causal=True)
    one = train_particles(problem, ADAMW, 3, 4, 4, seeds=2, device="cpu")
    two = train_particles(doubled(problem), ADAMW, 3, 4, 4, seeds=2, device="cpu")
    assert float((two.loss - one.loss)[:, 0].abs().min()) > 1e-4
    assert float((two.heads[4].packed - one.heads[4].packed).abs().max()) > 1e-3


class OnRawGradients(AdamW):
    """AdamW given dJ/dtheta = g / (L H) with eps as it is: the negative control."""

    def __init__(self, LH, **settings):
        super().__init__(**settings)
        self.LH = LH

    def update(self, heads, state, gradient, step):
        return super().update(heads, state, gradient.map(lambda t: t / self.LH), step)


def test_a_fixed_eps_on_raw_gradients_leaves_the_network_untrained_as_L_and_H_grow():
    problem = small_problem()
    settings = {"lr": 0.05, "eps": 0.01, "weight_decay": 0.0}
    gains = {"raw": [], "scaled": []}
    for depth, H in ((4, 16), (8, 10**5)):
        for name, rule in (
            ("raw", OnRawGradients(depth * H, **settings)),
            ("scaled", AdamW(**settings)),
        ):
            loss = train_particles(problem, rule, depth, H, 4, device="cpu").loss[0]
            gains[name].append(float(1 - loss[-1] / loss[0]))
    assert gains["raw"][0] > 0.02  # at L H = 64 it still trains
    assert gains["raw"][1] < 1e-3  # eps / (g / L H) = 8e3: steps are 1e-4 of Adam's
    assert gains["scaled"][1] > 0.5 * gains["scaled"][0] > 0.05


# --- diverged seeds ----------------------------------------------------------------------------


def law_with_a_bomb(size, weight=0.05, M=5):
    """Atoms of which the last is `size` times as large and rarely drawn."""
    heads = small_atoms(M=M, biases=()).heads
    packed = heads.packed.clone()
    packed[:, -1] *= size
    weights = torch.full((M,), (1 - weight) / (M - 1), dtype=F64)
    weights[-1] = weight
    return Atoms(Heads.from_packed(packed, weights, heads.layout))


def finite_seeds_alone(problem, rule, run, **options):
    alive = [s for s, bad in zip(run.seeds, run.diverged.tolist()) if not bad]
    again = train_particles(
        problem,
        rule,
        run.depth,
        run.head_count,
        run.loss.shape[1] - 1,
        seeds=alive,
        record=list(run.x),
        device="cpu",
        **options,
    )
    assert not again.diverged.any()
    for t, s in enumerate(alive):
        assert_same_seed(run, run.seeds.index(s), again, t, bitwise)


@pytest.mark.parametrize("rule", [ADAMW, SGD(0.1, 0.5), BlockAdamW(0.05, eps=0.1)], ids=repr)
def test_a_seed_whose_forward_pass_overflows_is_flagged_frozen_and_harms_no_other(rule):
    # float32 holds 3e38: logits of the bomb are ~1e40, so its tokens become NaN at once
    problem = small_problem(law_with_a_bomb(1e20), dtype=torch.float32, probes=2)
    run = train_particles(problem, rule, 4, 3, 3, seeds=12, record=range(4), device="cpu")
    hit = run.counts[:, :, -1].sum(dim=1) > 0
    assert 2 <= int(hit.sum()) <= 10
    assert torch.equal(run.diverged, hit)
    assert torch.equal(run.diverged_at, torch.where(hit, 0, -1))
    assert run.status == f"{int(hit.sum())} of 12 seeds diverged"
    for k in (1, 2, 3):  # frozen: still the heads they were drawn with
        assert torch.equal(run.heads[k].packed[hit], run.heads[0].packed[hit])
    assert not torch.isfinite(run.loss[hit]).any()
    assert torch.isfinite(run.loss[~hit]).all()
    assert torch.isfinite(run.x[3][~hit]).all()
    assert not torch.isfinite(run.x[3][hit]).flatten(1).all(dim=1).any()
    finite_seeds_alone(problem, rule, run)


def test_a_seed_that_training_drives_to_overflow_is_flagged_at_the_step_where_it_shows():
    # the bomb has finite fields, but its gradients are large enough for SGD to run away
    problem = small_problem(law_with_a_bomb(6.0), dtype=torch.float32)
    rule = SGD(0.3)
    run = train_particles(problem, rule, 3, 3, 12, seeds=12, record=range(13), device="cpu")
    assert 1 <= int(run.diverged.sum()) <= 11
    steps = run.diverged_at[run.diverged]
    assert (steps >= 1).all()
    assert (run.diverged_at[~run.diverged] == -1).all()
    for s, k in zip(run.diverged.nonzero()[:, 0].tolist(), steps.tolist()):
        assert torch.isfinite(run.loss[s, :k]).all()
        assert torch.isfinite(run.x[k - 1][s]).all()
        seen = torch.isfinite(run.loss[s, k]) & torch.isfinite(run.x[k][s]).all()
        assert not (seen & torch.isfinite(run.p[k][s]).all())
        assert not torch.isfinite(run.loss[s, k + 1 :]).any()
        for later in range(k + 1, 13):
            before, after = run.heads[k + 1].packed[s], run.heads[later].packed[s]
            assert torch.equal(before.nan_to_num(), after.nan_to_num())
    finite_seeds_alone(problem, rule, run)


class Steep:
    """Finite always; where tokens moved far, its derivative is 0 * infinity."""

    def __call__(self, x, y):
        far = x.square().mean(dim=(-1, -2)) > 100
        root = torch.where(far, 0.0 * x[..., 0, 0], x[..., 0, 0].square() + 1.0)
        return torch.sqrt(root)


def test_a_seed_whose_costate_alone_is_not_finite_is_flagged_too():
    problem = small_problem(law_with_a_bomb(20.0), loss=Steep())
    run = train_particles(problem, SGD(0.1), 4, 3, 2, seeds=12, record=[0, 1, 2], device="cpu")
    bad = ~torch.isfinite(run.p[0]).flatten(1).all(dim=1)
    assert 1 <= int(bad.sum()) <= 11
    assert torch.isfinite(run.loss[:, 0]).all()
    assert (run.diverged_at[bad] == 0).all()
    assert run.diverged[bad].all()
    finite_seeds_alone(problem, SGD(0.1), run)


def test_a_seed_whose_costate_is_not_finite_is_frozen_at_its_last_finite_heads():
    problem = small_problem(law_with_a_bomb(20.0), loss=Steep())
    run = train_particles(problem, SGD(0.1), 4, 3, 2, seeds=12, record=[0, 1, 2], device="cpu")
    bad = ~torch.isfinite(run.p[0]).flatten(1).all(dim=1)
    assert torch.equal(run.heads[2].packed[bad], run.heads[0].packed[bad])


def test_seeds_of_the_whole_law_share_one_answer(problem):
    one = train_particles(problem, ADAMW, 3, None, 2, record=[0, 2], device="cpu")
    many = train_particles(problem, ADAMW, 3, None, 2, seeds=[4, 7], record=[0, 2], device="cpu")
    assert many.seeds == (4, 7) and many.cost == one.cost
    assert many.x[2].shape == (2, *one.x[2].shape[1:]) and many.loss.shape == (2, 3)
    for seed in range(2):
        assert torch.equal(many.p[0][seed], one.p[0][0])
        assert torch.equal(many.heads[2].packed[seed], one.heads[2].packed[0])


def test_a_run_of_which_every_seed_diverges_still_returns():
    problem = small_problem(law_with_a_bomb(1e20, weight=1.0), dtype=torch.float32)
    run = train_particles(problem, ADAMW, 3, 2, 2, seeds=2, device="cpu")
    assert run.diverged.all()
    assert run.status == "2 of 2 seeds diverged"
    whole = train_particles(problem, ADAMW, 3, None, 2, device="cpu")
    assert whole.status == "1 of 1 seeds diverged"


# --- devices -----------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu():
    problem = small_problem(probes=2)
    cpu = train_particles(problem, ADAMW, 3, 4, 3, seeds=2, device="cpu")
    gpu = train_particles(problem, ADAMW, 3, 4, 3, seeds=2, device="cuda")
    assert gpu.x[3].device.type == "cuda"
    assert torch.equal(cpu.counts, gpu.counts.cpu())
    for name in ("x", "p", "probe_x", "probe_p"):
        assert_to_rounding(getattr(gpu, name)[3].cpu(), getattr(cpu, name)[3], ROUNDING, name)


def test_auto_device_is_cuda_where_there_is_one_else_the_cpu():
    run = train_particles(small_problem(), SGD(0.1), 2, 2, 0)
    assert run.x[0].device.type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("heads", [None, 3])
def test_training_leaves_the_law_as_it_was(heads):
    problem = small_problem()
    before = problem.law.heads.packed.clone(), problem.law.heads.weights.clone()
    train_particles(problem, AdamW(lr=0.1), 1, heads, 2, device="cpu")
    assert torch.equal(problem.law.heads.packed, before[0])
    assert torch.equal(problem.law.heads.weights, before[1])
