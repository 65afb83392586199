"""Generated training runs: symmetries, and seeds that diverge beside others that do not."""

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
from builders import normal, random_heads, small_atoms
from hypothesis import given, settings
from hypothesis import strategies as st

from ipslimit import (
    SGD,
    AdamW,
    Atoms,
    BlockAdamW,
    Heads,
    Problem,
    Rebalance,
    SBOAdamW,
    TruncatedNormal,
    XavierUniform,
    train_particles,
)
from ipslimit.cpu.dispatch import VARIABLE
from ipslimit.experiments.cells import _train_in_parts
from ipslimit.experiments.study import Setting, Sizes, Study
from ipslimit.model.runs import joined
from ipslimit.solvers import solve_limit
from ipslimit.solvers.picard import NotContracting

F32, F64 = torch.float32, torch.float64
BIASES = ("bq", "bk", "bv", "bo")
PATHS = st.sampled_from(("auto", "eager", "fused"))


@st.composite
def rules(draw, extreme=False):
    rates = (1e-3, 0.1) if not extreme else (1e-300, 0.1, 1e3, 1e30, 1e300)
    lr, decay = draw(st.sampled_from(rates)), draw(st.sampled_from((0.0, 0.1)))
    kind = draw(st.sampled_from(("sgd", "adamw", "block", "sbo")))
    if kind == "sgd":
        momentum = draw(st.sampled_from((0.0, 0.5)))
        rule = SGD(lr, momentum, 0.0 if momentum else decay)
    else:
        sizes = (1e-2, 1.0) if not extreme else (0.0, 1e-320, 1e-60, 1e-2, 1e30)
        eps = draw(st.sampled_from(sizes))
        betas = draw(st.sampled_from(((0.9, 0.99), (0.0, 0.0), (0.5, 0.9))))
        arguments = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay}
        if kind == "adamw":
            rule = AdamW(**arguments)
        elif kind == "block":
            rule = BlockAdamW(**arguments, mean=draw(st.booleans()))
        else:
            centre = draw(st.sampled_from(("batch", "ema", "fixed")))
            rule = SBOAdamW(**arguments, centre=centre, transport=draw(st.booleans()))
    if draw(st.booleans()):
        rule = Rebalance(rule, draw(st.integers(1, 3)), draw(st.sampled_from((0.5, 1.0))))
    return rule


@st.composite
def problems(draw, law=None, causal=None, dtypes=(F32, F64)):
    if law is None:
        d, m, seed = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 999))
        law = draw(
            st.sampled_from(
                (
                    small_atoms(draw(st.integers(1, 9)), m, d, BIASES, seed),
                    XavierUniform(d, m, biases=True),
                    TruncatedNormal(d, m, 0.5, 1.0, biases=True),
                )
            )
        )
    B, N, seed = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(0, 999))
    dtype = draw(st.sampled_from(dtypes))
    causal = draw(st.booleans()) if causal is None else causal
    contexts = normal(B, N, law.d, seed=seed, dtype=dtype)
    return Problem(contexts, normal(B, law.d, seed=seed + 1, dtype=dtype), law, causal)


def train(problem, rule, heads=3, seeds=2, steps=3, depth=3, path="auto", **options):
    options = {"record": range(steps + 1), "device": "cpu", "nodes": 4} | options
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, path)
        return train_particles(problem, rule, depth, heads, steps, seeds, **options)


def same_bits(a, b):
    """Equal, NaN in the same places."""
    return (
        a.shape == b.shape
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


def assert_same_seeds(run, seeds, other):
    """The seeds of a run are, bit by bit, those of another that has no others."""
    rows = [run.seeds.index(seed) for seed in seeds]
    others = [other.seeds.index(seed) for seed in seeds]
    for name in ("loss", "diverged", "diverged_at"):
        assert same_bits(getattr(run, name)[rows], getattr(other, name)[others]), name
    for step in run.x:
        for name in ("x", "p"):
            values, expected = getattr(run, name)[step], getattr(other, name)[step]
            assert same_bits(values[rows], expected[others]), (name, step)
        packed, expected = run.heads[step].packed, other.heads[step].packed
        assert same_bits(packed[rows], expected[others]), step


def assert_flagged_or_finite(run):
    """What is not finite belongs to a seed that is flagged, from the step it was seen at."""
    for i, at in enumerate(run.diverged_at.tolist()):
        last = math.inf if at < 0 else at
        assert bool(run.diverged[i]) == (at >= 0)
        finite = torch.isfinite(run.loss[i])
        assert all(finite[k] for k in range(run.loss.shape[1]) if k < last)
        for step in run.x:
            if step < last:
                for values in (run.x[step], run.p[step], run.heads[step].packed):
                    assert torch.isfinite(values[i]).all(), (i, step, at)


def check_alone(problem, rule, path, heads):
    run = train(problem, rule, heads, seeds=[5, 2, 7], path=path)
    assert_flagged_or_finite(run)
    for seed in run.seeds:
        assert_same_seeds(run, [seed], train(problem, rule, heads, seeds=[seed], path=path))
    turned = train(problem, rule, heads, seeds=[2, 7, 5], path=path)
    assert_same_seeds(run, run.seeds, turned)


@settings(max_examples=15)
@given(problems(), rules(extreme=True), PATHS, st.sampled_from((1, 2, 9)))
def test_a_seed_does_not_depend_on_its_batch_mates(problem, rule, path, heads):
    check_alone(problem, rule, path, heads)


@pytest.mark.parametrize("d, m", [(1, 1), (1, 3), (4, 1)])
@pytest.mark.parametrize("rule", [AdamW(0.1), Rebalance(SBOAdamW(0.1), 1, 0.5)], ids=repr)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_nor_at_sizes_where_products_of_one_row_or_column_are_summed_otherwise(d, m, rule, dtype):
    contexts, targets = normal(3, 5, d, dtype=dtype), normal(3, d, seed=1, dtype=dtype)
    for heads in (1, 9):
        problem = Problem(contexts, targets, XavierUniform(d, m, biases=True))
        check_alone(problem, rule, "eager", heads)


@pytest.mark.slow
@settings(max_examples=200)
@given(problems(), rules(extreme=True), PATHS, st.sampled_from((1, 2, 9)))
def test_many_seeds_do_not_depend_on_their_batch_mates(problem, rule, path, heads):
    check_alone(problem, rule, path, heads)


def close(a, b, what):
    """To rounding carried through 3 layers and 2 steps of rules with eps >= 0.01."""
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")


@given(problems(causal=False, dtypes=(F64,)), rules(), PATHS, st.randoms(use_true_random=False))
def test_permuting_tokens_permutes_paths_and_nothing_else(problem, rule, path, random):
    order = random.sample(range(problem.N), problem.N)
    turned = Problem(problem.contexts[:, order], problem.targets, problem.law)
    a, b = (train(p, rule, steps=2, path=path) for p in (problem, turned))
    close(a.x[2][..., order, :], b.x[2], "x")
    close(a.p[2][..., order, :], b.p[2], "p")
    close(a.loss, b.loss, "loss")
    close(a.heads[2].packed, b.heads[2].packed, "heads")


@given(problems(dtypes=(F64,)), rules(), PATHS, st.randoms(use_true_random=False))
def test_permuting_contexts_permutes_paths_and_nothing_else(problem, rule, path, random):
    order = random.sample(range(problem.B), problem.B)
    turned = Problem(problem.contexts[order], problem.targets[order], problem.law, problem.causal)
    a, b = (train(p, rule, steps=2, path=path) for p in (problem, turned))
    close(a.x[2][..., order, :, :], b.x[2], "x")
    close(a.p[2][..., order, :, :], b.p[2], "p")
    close(a.loss, b.loss, "loss")
    close(a.heads[2].packed, b.heads[2].packed, "heads")


@given(st.data(), rules(), PATHS)
def test_permuting_atoms_permutes_heads_and_nothing_else(data, rule, path):
    law = small_atoms(data.draw(st.integers(2, 9)), 2, 3, BIASES)
    problem = data.draw(problems(law, dtypes=(F64,)))
    order = data.draw(st.permutations(range(law.heads.count)))
    heads = law.heads
    turned = Atoms(Heads.from_packed(heads.packed[:, order], heads.weights[order], heads.layout))
    other = Problem(problem.contexts, problem.targets, turned, problem.causal)
    a, b = (train(p, rule, None, 1, 2, path=path) for p in (problem, other))
    close(a.x[2], b.x[2], "x")
    close(a.heads[2].packed[..., order], b.heads[2].packed, "heads")
    limits = [
        solve_limit(p, rule, 1, tol=1e-2, device="cpu", elements=2, max_elements=8)
        for p in (problem, other)
    ]
    close(limits[0].x(1, 1.0), limits[1].x(1, 1.0), "limit")


def law_with_a_bomb(dtype):
    """The last of five atoms overflows: only seeds that draw it diverge."""
    heads = random_heads((), 5, 2, 3, BIASES, seed=1, scale=0.7)
    packed, weights = heads.packed.clone(), torch.full((5,), 0.23, dtype=F64)
    packed[:, -1] *= 1e30 if dtype == F32 else 1e200
    weights[-1] = 0.08
    return Atoms(Heads.from_packed(packed, weights, heads.layout))


def one_process_group(folder):
    return dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1
    )


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """The sharded way, with all shares in this process."""
    one_process_group(tmp_path_factory.mktemp("group"))
    yield dist.group.WORLD
    dist.destroy_process_group()


def check_bomb(data, rule, **options):
    dtype = data.draw(st.sampled_from((F32, F64)))
    law = law_with_a_bomb(dtype)
    problem = data.draw(problems(law, dtypes=(dtype,)))
    options["path"] = data.draw(PATHS)
    run = train(problem, rule, 2, 12, 2, **options)
    hit = (run.counts[:, :, -1] > 0).any(dim=1)
    assert 1 <= int(hit.sum()) <= 11
    assert torch.equal(run.diverged, hit)
    assert_flagged_or_finite(run)
    alive = [seed for seed, bad in enumerate(hit.tolist()) if not bad]
    assert_same_seeds(run, alive, train(problem, rule, 2, alive, 2, **options))


@settings(max_examples=12)
@given(st.data(), rules())
def test_a_diverged_seed_leaves_its_batch_mates_bit_identical(data, rule):
    check_bomb(data, rule)


@settings(max_examples=12)
@given(data=st.data(), rule=rules())
def test_so_it_does_where_heads_are_shared_out(group, data, rule):
    check_bomb(data, rule, group=group)


@pytest.mark.slow
@settings(max_examples=100)
@given(data=st.data(), rule=rules())
def test_so_it_does_in_many_runs(group, data, rule):
    check_bomb(data, rule, group=data.draw(st.sampled_from((None, group))))


@dataclasses.dataclass(frozen=True)
class Bombed(Setting):
    """A setting some of whose seeds diverge."""

    def make_law(self):
        return law_with_a_bomb(F64)


@pytest.mark.parametrize("rule", ["adamw", "block-adamw", "sgd", "sbo"])
@pytest.mark.parametrize("rebalance", [0, 1])
def test_seeds_in_parts_are_seeds_at_once_where_some_diverge(rule, rebalance):
    setting = Bombed(
        d=3,
        m=2,
        tokens=3,
        contexts=2,
        probes=1,
        steps=2,
        rule=rule,
        biases=True,
        momentum=0.0,
        rebalance=rebalance,
    )
    study = Study(setting, Sizes((3,), (2,), 11))
    whole = _train_in_parts(study, "cpu", 3, 2, 11)
    assert 1 <= int(whole.diverged.sum()) <= 10
    for together in (1, 3, 4):
        assert_same_seeds(whole, whole.seeds, _train_in_parts(study, "cpu", 3, 2, together))


@given(st.lists(st.integers(0, 6), min_size=2, max_size=5, unique=True), rules())
def test_joined_parts_are_the_run_of_all_seeds(seeds, rule):
    problem = Problem(normal(2, 3, 3), normal(2, 3, seed=1), small_atoms(biases=BIASES))
    parts = [train(problem, rule, seeds=[seed], steps=2) for seed in seeds]
    whole, run = joined(parts), train(problem, rule, seeds=seeds, steps=2)
    assert whole.seeds == run.seeds
    assert_same_seeds(whole, seeds, run)
    assert torch.equal(whole.counts, run.counts) and torch.equal(whole.atoms, run.atoms)


@settings(max_examples=15)
@given(problems(), rules(extreme=True), st.sampled_from(("march", "picard", "auto")), PATHS)
def test_a_limit_is_finite_or_says_that_it_diverged(problem, rule, method, path):
    check_limit(problem, rule, method, path)


@pytest.mark.slow
@settings(max_examples=150)
@given(problems(), rules(extreme=True), st.sampled_from(("march", "picard", "auto")), PATHS)
def test_many_limits_are_finite_or_say_that_they_diverged(problem, rule, method, path):
    check_limit(problem, rule, method, path)


def check_limit(problem, rule, method, path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, path)
        try:
            run = solve_limit(
                problem,
                rule,
                2,
                tol=1e-2,
                record=[0, 1, 2],
                device="cpu",
                method=method,
                elements=2,
                max_elements=16,
                nodes=4,
                scramblings=2,
                max_nodes=4,
            )
        except NotContracting as error:
            assert method == "picard" and "Use method='march'" in str(error)
            return
    if run.status == "diverged":
        assert math.isinf(run.error)
        return
    assert run.status in ("converged", "tolerance not reached")
    reached = run.error <= 1e-2 and run.quadrature_error <= 1e-2
    assert reached == (run.status == "converged")
    assert torch.isfinite(run.loss).all() and math.isfinite(run.error)
    for k in (0, 1, 2):
        for s in (0.0, 0.3, 1.0):
            for value in (run.x(k, s), run.p(k, s), run.heads(k, s).packed):
                assert torch.isfinite(value).all()
