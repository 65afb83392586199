"""One contract for every rule, on every path, in both models."""

import math

import pytest
import torch
from builders import BIASES, F64, assert_to_rounding, small_atoms, small_problem
from contract import (
    BOMB,
    BUILT_IN,
    DTYPES,
    EVERY_DTYPE,
    EVERY_PATH,
    EVERY_RULE,
    MORE,
    PATHS,
    PLAIN,
    ROUNDING,
    RULES,
    assert_same_seeds,
    biased_atoms,
    check_alone,
    check_bomb,
    global_random_states,
    law_with_a_bomb,
    on_path,
    problem_of,
    recorded,
    run_from,
    spread_out,
    takes,
    tensors_of,
    train,
)

from ipslimit import Atoms, Heads, Problem, TruncatedNormal, XavierUniform
from ipslimit.model.rules.trial import Trial
from ipslimit.solvers import solve_limit

# Where sizes or laws are the matter: the plainest rule, and the one that asks for most.
NAMES = ("adamw", "sbo rebalanced")
TYPICAL = pytest.mark.parametrize("rule", [RULES[name] for name in NAMES], ids=NAMES)
DENSE = torch.linspace(0, 1, 17, dtype=F64)


def solve(problem, rule, path="auto", steps=2, tol=0.1, **options):
    """The limit on this path; a scheme's own grids, so that paths are compared on the same."""
    with pytest.MonkeyPatch.context() as patch:
        rule = on_path(patch, path, rule)
        options = {"record": [steps], "elements": 2, "max_elements": 8, "nodes": 8} | options
        return solve_limit(problem, rule, steps, tol, device="cpu", scramblings=1, **options)


def limit_values(run):
    """All that a limit says at the depths of DENSE, by name."""
    values = {"loss": run.loss}
    for k in run.steps:
        values |= {f"x of step {k}": run.x(k, DENSE), f"p of step {k}": run.p(k, DENSE)}
        values[f"heads of step {k}"] = run.heads(k, DENSE).packed
    return values


# --- seeds -------------------------------------------------------------------------------------


@EVERY_RULE
@EVERY_PATH
@EVERY_DTYPE
def test_a_seed_alone_is_the_seed_in_any_batch_bit_by_bit(rule, path, dtype):
    """At the sizes of the default study."""
    problem = problem_of(biased_atoms(32, 4, 4), (4, 8), probes=3, dtype=dtype)
    check_alone(problem, rule, path, 16, depth=2, steps=2, record=[0, 2])


# MKL sums some small products in an order that depends on the batch they are in and on where in
# memory they lie, those of one row or column otherwise than others.
SIZES = [
    # (B, N, M, m, d)
    (3, 5, 7, 2, 3),
    (2, 6, 3, 3, 5),
    (3, 4, 5, 2, 3),
    (1, 9, 3, 3, 64),
    (1, 1, 7, 3, 40),
    (3, 5, 9, 1, 1),
    (3, 5, 9, 3, 1),
    (3, 5, 9, 1, 4),
]


@TYPICAL
@pytest.mark.parametrize("path", ["eager", "auto"])
@EVERY_DTYPE
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_so_it_is_at_awkward_sizes(rule, path, dtype, sizes):
    B, N, M, m, d = sizes
    problem = problem_of(biased_atoms(M, m, d, scale=0.3), (B, N), dtype=dtype)
    check_alone(problem, rule, path, 8, depth=2, record=[0, 3])


@TYPICAL
@pytest.mark.parametrize("path", ["eager", "auto"])
@pytest.mark.parametrize("heads", [1, 9])
def test_so_it_is_for_a_law_with_a_density(rule, path, heads):
    check_alone(problem_of(XavierUniform(3, 2, biases=True), (3, 5)), rule, path, heads)


@EVERY_RULE
@EVERY_PATH
@EVERY_DTYPE
def test_a_diverged_seed_is_flagged_frozen_and_harms_no_other(rule, path, dtype):
    problem = problem_of(law_with_a_bomb(BOMB[dtype]), (2, 3), probes=2, dtype=dtype)
    check_bomb(problem, rule, path=path)


@EVERY_RULE
@EVERY_PATH
def test_seeds_of_the_whole_law_share_one_answer(rule, path):
    problem = small_problem(biased_atoms(), probes=2)
    one = train(problem, rule, None, [1], path=path)
    many = train(problem, rule, None, [4, 7], path=path)
    assert many.seeds == (4, 7) and many.cost == one.cost and many.head_count == math.inf
    for seed in range(2):
        for (name, value), alone in zip(recorded(many).items(), recorded(one).values()):
            assert torch.equal(value[seed], alone[0]), name


@EVERY_RULE
@EVERY_PATH
def test_a_run_of_fewer_steps_is_the_beginning_of_a_longer_one(rule, path):
    """And what is recorded changes nothing."""
    problem = small_problem(biased_atoms(), probes=2)
    whole = train(problem, rule, 4, steps=4, path=path)
    for steps in (0, 1, 3):
        short = train(problem, rule, 4, steps=steps, path=path, record=[steps])
        assert torch.equal(short.loss, whole.loss[:, : steps + 1])
        said = recorded(whole)
        for name, value in recorded(short).items():
            assert name == "loss" or torch.equal(value, said[name]), name


# --- one model, in several forms ---------------------------------------------------------------


@EVERY_RULE
@pytest.mark.parametrize("heads", [4, None])
@pytest.mark.parametrize("causal", [False, True])
def test_every_path_trains_alike(rule, heads, causal):
    problem = small_problem(biased_atoms(), causal=causal, probes=2)
    eager, *others = (train(problem, rule, heads, path=path) for path in PATHS)
    for other in others:
        assert other.cost == eager.cost
        for name, value in recorded(eager).items():
            if value.is_floating_point():
                assert_to_rounding(recorded(other)[name], value, ROUNDING, name)


def check_paths_of_the_limit(rule, method):
    problem = small_problem(biased_atoms(), causal=True)
    eager, *others = (solve(problem, rule, path, method=method) for path in PATHS)
    for other in others:
        assert other.grid == eager.grid and other.status == eager.status
        for name, value in limit_values(eager).items():
            assert_to_rounding(limit_values(other)[name], value, ROUNDING, name)


@EVERY_RULE
def test_every_path_finds_the_same_limit(rule):
    check_paths_of_the_limit(rule, "march")


@TYPICAL
def test_so_it_does_by_iteration(rule):
    check_paths_of_the_limit(rule, "picard")


@EVERY_RULE
@EVERY_PATH
@pytest.mark.parametrize("H", [1, 5, 40])
def test_the_atoms_shortcut_is_the_plain_model_of_H_heads(rule, path, H, monkeypatch):
    problem = small_problem(biased_atoms(), causal=H == 5, probes=2)
    short = train(problem, rule, H, path=path)
    rule = on_path(monkeypatch, path, rule)
    for s in range(2):
        plain = run_from(spread_out(problem.law, short.counts[s]), problem, rule, 3)
        assert plain.heads[0].count == H and short.heads[0].count == min(H, 5)
        assert_to_rounding(short.loss[s], plain.loss[0], ROUNDING)
        for k in range(4):
            assert_to_rounding(short.x[k][s], plain.x[k][0], ROUNDING, f"x of step {k}")
            assert_to_rounding(short.p[k][s], plain.p[k][0], ROUNDING, f"p of step {k}")
            assert_to_rounding(short.probe_x[k][s], plain.probe_x[k][0], ROUNDING, f"probes, {k}")
        for r in range(3):  # every copy of an atom is where its one stand-in is
            copies = torch.arange(5).repeat_interleave(short.counts[s, r])
            where = {int(atom): i for i, atom in enumerate(short.atoms[s, r])}
            stand_in = short.heads[3].packed[s, r][:, [where[int(atom)] for atom in copies]]
            assert_to_rounding(stand_in, plain.heads[3].packed[0, r], ROUNDING, f"layer {r}")


COPIES = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2])


@EVERY_RULE
@EVERY_PATH
def test_twin_heads_stay_twins_in_both_models(rule, path):
    """Heads that start alike train alike, whatever their weights and places."""
    heads = biased_atoms(3).heads
    weights = torch.linspace(1, 2, 9, dtype=F64)
    twins = Heads.from_packed(heads.packed[:, COPIES], weights / weights.sum(), heads.layout)
    for dtype in DTYPES:
        problem = small_problem(Atoms(twins), dtype=dtype)
        whole = train(problem, rule, None, 1, path=path).heads[3].packed[0]
        for packed in (whole, solve(problem, rule, path, steps=1).heads(1, DENSE).packed):
            assert float((packed[..., :3] - twins.packed[:, :3].to(dtype)).abs().max()) > 1e-4
            assert_to_rounding(packed, packed[..., COPIES], ROUNDING)


def both(problem, rule, heads=None):
    """What particles say, and what the limit says."""
    return recorded(train(problem, rule, heads)), limit_values(solve(problem, rule))


def twice(problem):
    """Every token two times, one after the other."""
    contexts = problem.contexts.repeat_interleave(2, dim=1)
    return Problem(contexts, problem.targets, problem.law, causal=problem.causal)


@EVERY_RULE
def test_duplicating_every_token_changes_nothing_without_mask(rule):
    """The structure of McKean and Vlasov: a token feels the law of all, not their number."""
    problem = small_problem(biased_atoms())
    for one, two in zip(both(problem, rule, 4), both(twice(problem), rule, 4)):
        for name, value in one.items():
            doubled = value.repeat_interleave(2, dim=-2) if name[0] in "xp" else value
            if value.is_floating_point():
                assert_to_rounding(two[name], doubled, ROUNDING, name)


def test_duplicating_every_token_changes_everything_with_mask():
    """A token sees its copies, so that the mixture it averages over is another."""
    problem, rule = small_problem(causal=True), RULES["adamw"]
    for one, two in zip(both(problem, rule, 4), both(twice(problem), rule, 4)):
        for name, value in one.items():
            if name[0] in "xp":
                assert float((two[name][..., ::2, :] - value).abs().max()) > 1e-2, name
            if name[:5] == "heads" and name[-1] != "0":
                assert float((two[name] - value).abs().max()) > 1e-3, name
        assert float((two["loss"] - one["loss"]).abs().min()) > 1e-4


@EVERY_RULE
def test_atoms_may_be_permuted_and_split_in_halves_of_their_weight(rule):
    """Gradients are per unit weight, so the halves train as the whole does."""
    problem = small_problem(biased_atoms())
    heads, which = problem.law.heads, torch.tensor([3, 0, 4, 1, 2, 2])
    weights = heads.weights[which] * torch.tensor([1, 1, 1, 1, 0.5, 0.5], dtype=F64)
    law = Atoms(Heads.from_packed(heads.packed[:, which], weights, heads.layout))
    for one, two in zip(both(problem, rule), both(small_problem(law), rule)):
        for name, value in one.items():
            if value.is_floating_point():
                there = value[..., which] if name.startswith("heads") else value
                assert_to_rounding(two[name], there, ROUNDING, name)


@EVERY_RULE
@pytest.mark.parametrize(
    "layout", [Heads.make_layout(BIASES, d=d, m=m) for d, m in ((3, 2), (1, 1))], ids=str
)
def test_every_rule_passes_the_trial_that_those_of_ours_are_spared(rule, layout):
    """One pure map of every head, seed, layer and depth node by itself."""
    for steps in (1, 7):
        Trial(rule, layout, torch.device("cpu"), steps).run(torch.float32)


# --- what is not touched -----------------------------------------------------------------------


@EVERY_RULE
@EVERY_PATH
def test_nothing_given_is_changed_and_no_global_generator_read(rule, path):
    problem, answers = small_problem(biased_atoms(), probes=2), []
    before, start = (
        tensors_of(problem),
        biased_atoms().heads.map(lambda t: t.expand(3, 1, *t.shape)),
    )
    kept = start.packed.clone()
    for seed in (0, 1):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            states = global_random_states()
            sizes = ((3, 3), (None, 3), (None, 1))
            runs = [train(problem, rule, H, 2, 2, depth, path) for H, depth in sizes]
            # in the limit the rule is run by itself where the kernel is compiled, too
            limit = solve(problem, rule, "layers" if path == "eager" else path, steps=1)
            assert global_random_states() == states
        answers.append([value for run in runs for value in recorded(run).values()])
        answers[-1] += limit_values(limit).values()
    with pytest.MonkeyPatch.context() as patch:
        run_from(start, problem, on_path(patch, path, rule), 2)
    assert torch.equal(start.packed, kept)
    assert all(torch.equal(*pair) for pair in zip(before, tensors_of(problem), strict=True))
    assert all(torch.equal(*pair) for pair in zip(*answers, strict=True))


@pytest.mark.parametrize("heads", [3, None])
@pytest.mark.parametrize(
    "law", [small_atoms(), XavierUniform(3, 2), TruncatedNormal(3, 2, 0.5, 1.0)], ids=repr
)
def test_so_it_is_for_every_law(law, heads):
    rule, states = RULES["adamw"], global_random_states()
    runs = [train(small_problem(law), rule, heads, 2) for _ in range(2)]
    assert_same_seeds(runs[0], None, runs[1])
    one, two = (limit_values(solve(small_problem(law), rule)) for _ in range(2))
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert global_random_states() == states


def test_every_option_of_every_built_in_rule_is_under_contract():
    for name, kind in BUILT_IN.items():
        assert set(takes(kind)) <= {*PLAIN, *MORE}, f"{name}: add its other options to MORE"
