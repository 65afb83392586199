"""Generated training runs: symmetries, and seeds that diverge beside others that do not."""

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
from builders import BIASES, normal, small_atoms
from contract import (
    BOMB,
    BUILT_IN,
    KINDS,
    SMOOTH_KINDS,
    assert_same_seeds,
    check_alone,
    check_bomb,
    law_with_a_bomb,
    on_path,
    rebalanced,
    takes,
    train,
)
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from ipslimit import Atoms, Heads, Problem, TruncatedNormal, XavierUniform
from ipslimit.experiments.cells import train_seeds
from ipslimit.experiments.settings import Setting, Sizes, SweepSetting
from ipslimit.model.runs import joined
from ipslimit.solvers import solve_limit
from ipslimit.solvers.picard import NotContracting

F32, F64 = torch.float32, torch.float64
PATHS = st.sampled_from(("auto", "eager", "fused", "layers"))

OPTIONS = {
    "lr": (1e-3, 0.1),
    "eps": (1e-2, 1.0),
    "betas": ((0.9, 0.99), (0.0, 0.0), (0.5, 0.9)),
    "weight_decay": (0.0, 0.1),
    "momentum": (0.0, 0.5),
    "mean": (False, True),
    "centre": ("batch", "ema", "fixed"),
    "transport": (False, True),
}
EXTREME = {"lr": (1e-300, 0.1, 1e3, 1e30, 1e300), "eps": (0.0, 1e-320, 1e-60, 1e-2, 1e30)}


@st.composite
def rules(draw, extreme=False):
    """Any rule under contract; those that turn rounding into steps only among the extreme."""
    kind = draw(st.sampled_from(list((KINDS if extreme else SMOOTH_KINDS).values())))
    options = OPTIONS | (EXTREME if extreme else {})
    chosen = {name: draw(st.sampled_from(options[name])) for name in options if name in takes(kind)}
    try:
        rule = kind(**chosen)
    except ValueError:  # a kind that takes no eps of 0
        reject()
    every, damping = draw(st.integers(1, 3)), draw(st.sampled_from((0.5, 1)))
    balanced = rebalanced(rule, every=every, damping=damping) if draw(st.booleans()) else None
    return balanced or rule


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


@settings(max_examples=15)
@given(problems(), rules(extreme=True), PATHS, st.sampled_from((1, 2, 9)))
def test_a_seed_does_not_depend_on_its_batch_mates(problem, rule, path, heads):
    check_alone(problem, rule, path, heads)


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


def check_generated_bomb(data, rule, **options):
    dtype = data.draw(st.sampled_from((F32, F64)))
    problem = data.draw(problems(law_with_a_bomb(BOMB[dtype]), dtypes=(dtype,)))
    check_bomb(problem, rule, path=data.draw(PATHS), **options)


@settings(max_examples=12)
@given(st.data(), rules())
def test_a_diverged_seed_leaves_its_batch_mates_bit_identical(data, rule):
    check_generated_bomb(data, rule)


@settings(max_examples=12)
@given(data=st.data(), rule=rules())
def test_so_it_does_where_heads_are_shared_out(group, data, rule):
    check_generated_bomb(data, rule, group=group)


@pytest.mark.slow
@settings(max_examples=100)
@given(data=st.data(), rule=rules())
def test_so_it_does_in_many_runs(group, data, rule):
    check_generated_bomb(data, rule, group=data.draw(st.sampled_from((None, group))))


@dataclasses.dataclass(frozen=True, init=False)
class Bombed(Setting):
    """A setting some of whose seeds diverge."""

    def make_law(self):
        return law_with_a_bomb(BOMB[F64])


@pytest.mark.parametrize(
    "rule, rebalance",
    # there is nothing to balance under gauge-adamw
    [(rule, every) for rule in BUILT_IN for every in (0, 1) if (rule, every) != ("gauge-adamw", 1)],
)
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
        rebalance=rebalance,
    )
    study = SweepSetting(setting, Sizes((3,), (2,), 11))
    whole = train_seeds(study, "cpu", 3, 2, 11)
    assert 1 <= int(whole.diverged.sum()) <= 10
    for together in (1, 3, 4):
        assert_same_seeds(whole, whole.seeds, train_seeds(study, "cpu", 3, 2, together))


@given(st.lists(st.integers(0, 6), min_size=2, max_size=5, unique=True), rules())
def test_joined_parts_are_the_run_of_all_seeds(seeds, rule):
    problem = Problem(normal(2, 3, 3), normal(2, 3, seed=1), small_atoms(biases=BIASES))
    parts = [train(problem, rule, seeds=[seed], steps=2) for seed in seeds]
    whole, run = joined(parts), train(problem, rule, seeds=seeds, steps=2)
    assert whole.seeds == run.seeds
    assert_same_seeds(whole, seeds, run)


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
        rule = on_path(patch, path, rule)
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
    assert torch.isfinite(run.loss).all()
    # nothing can be said where the coarser grid diverged, or squares of differences do
    beyond = run.loss.max() > torch.finfo(run.loss.dtype).max ** 0.5
    assert math.isfinite(run.error) or beyond or not run._coarse.is_finite()
    for k in (0, 1, 2):
        for s in (0.0, 0.3, 1.0):
            for value in (run.x(k, s), run.p(k, s), run.heads(k, s).packed):
                assert torch.isfinite(value).all()
