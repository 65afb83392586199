"""The particle transformer: its draws, infinitely many heads, and what its runs hold."""

import math
import time

import numpy as np
import pytest
import torch
from builders import F64, assert_to_rounding, small_atoms, small_problem
from contract import ROUNDING, assert_alive_alone, law_with_a_bomb, recorded, run_from, spread_out

from ipslimit import SGD, AdamW, Atoms, Heads, TruncatedNormal, XavierUniform, train_particles
from ipslimit.model.problem import Problem

ADAMW = AdamW(0.05, betas=(0.9, 0.99), eps=0.1, weight_decay=0.1)


# --- the atoms' shortcut and H = infinity -----------------------------------------------------


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
    said = recorded(with_probes)
    assert all(torch.equal(value, said[name]) for name, value in recorded(alone).items())
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
    assert_alive_alone(run, problem, rule, 3)


class Steep:
    """Finite always; where tokens moved far, its derivative is 0 * infinity."""

    def __call__(self, x, y):
        far = x.square().mean(dim=(-1, -2)) > 100
        root = torch.where(far, 0.0 * x[..., 0, 0], x[..., 0, 0].square() + 1.0)
        return torch.sqrt(root)


def test_a_seed_whose_costate_alone_is_not_finite_is_flagged_and_frozen_too():
    problem = small_problem(law_with_a_bomb(20.0), loss=Steep())
    run = train_particles(problem, SGD(0.1), 4, 3, 2, seeds=12, record=[0, 1, 2], device="cpu")
    bad = ~torch.isfinite(run.p[0]).flatten(1).all(dim=1)
    assert 1 <= int(bad.sum()) <= 11
    assert torch.isfinite(run.loss[:, 0]).all()
    assert (run.diverged_at[bad] == 0).all()
    assert run.diverged[bad].all()
    assert torch.equal(run.heads[2].packed[bad], run.heads[0].packed[bad])
    assert_alive_alone(run, problem, SGD(0.1), 3)


def test_a_run_of_which_every_seed_diverges_still_returns():
    problem = small_problem(law_with_a_bomb(1e20, weight=1.0), dtype=torch.float32)
    run = train_particles(problem, ADAMW, 3, 2, 2, seeds=2, device="cpu")
    assert run.diverged.all()
    assert run.status == "2 of 2 seeds diverged"
    whole = train_particles(problem, ADAMW, 3, None, 2, device="cpu")
    assert whole.status == "1 of 1 seeds diverged"


# --- devices -----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_cuda_agrees_with_the_cpu():
    problem = small_problem(probes=2)
    cpu = train_particles(problem, ADAMW, 3, 4, 3, seeds=2, device="cpu")
    gpu = train_particles(problem, ADAMW, 3, 4, 3, seeds=2, device="cuda")
    assert gpu.x[3].device.type == "cuda"
    assert torch.equal(cpu.counts, gpu.counts.cpu())
    for name in ("x", "p", "probe_x", "probe_p"):
        assert_to_rounding(getattr(gpu, name)[3].cpu(), getattr(cpu, name)[3], ROUNDING, name)


def test_auto_leaves_small_work_to_the_cpu_also_where_there_is_a_card():
    run = train_particles(small_problem(), SGD(0.1), 2, 2, 0)
    assert run.x[0].device.type == "cpu"
