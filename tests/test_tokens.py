"""Language models: the scale and the correctness of the ends' gradients, the limit, resuming."""

import itertools
import math

import pytest
import torch
from test_block_orders import slope

from ipslimit import (
    SGD,
    AdamW,
    Atoms,
    Block,
    Lion,
    Rebalance,
    SBOAdamW,
    TokenProblem,
    XavierPerceptrons,
    XavierUniform,
    by_depth,
    train_particles,
)
from ipslimit.measure.errors import bias_table
from ipslimit.measure.fluctuation import predict_fluctuation
from ipslimit.model.token_ends import TokenEnds
from ipslimit.solvers import solve_limit
from ipslimit.solvers.grid import DepthGrid
from ipslimit.solvers.march import March
from ipslimit.solvers.on_grid import train_on_grid
from ipslimit.solvers.picard import Picard

RULE = AdamW(0.01, eps=0.01)


def tokens(V=7, N=5, n=9, d=4, seed=0, norm_eps=0.1, biases=False, atoms=4, **options):
    ids = torch.randint(0, V, (n, N + 1), generator=torch.Generator().manual_seed(seed))
    heads, perceptrons = XavierUniform(d, 3, biases=biases), XavierPerceptrons(d, 3, biases=biases)
    law = Block(heads.nodes(atoms, 0), perceptrons.nodes(atoms, 1), norm="rms", norm_eps=norm_eps)
    options = {"batch": min(4, n), "probes": ids[:3]} | options
    return TokenProblem(ids, V, options.pop("law", law), d, **options)


def equal_runs(a, b, steps):
    assert torch.equal(a.loss, b.loss)
    for k in steps:
        for name, table in a.ends[k].items():
            assert torch.equal(table, b.ends[k][name]), name
        assert torch.equal(a.x[k], b.x[k]) and torch.equal(a.p[k], b.p[k])


# --- gradients of the ends ----------------------------------------------------------------------


@pytest.mark.parametrize("tied_ends", [False, True])
def test_the_ends_gradients_are_those_of_autograd_and_of_taylor(tied_ends):
    problem = tokens(tied_ends=tied_ends)
    inputs, targets = problem.data(problem.chosen(0), "cpu")
    gen = torch.Generator().manual_seed(1)

    def J(tables):
        # a model without layers: what the layers do to p is tested elsewhere
        ends = TokenEnds(tables, problem.block.norm)
        return ends.losses(ends.enter(inputs), targets).mean()

    tables = {name: t.clone().requires_grad_() for name, t in problem.ends.items()}
    expected = dict(zip(tables, torch.autograd.grad(J(tables), tables.values()), strict=True))
    ends = problem.make_ends((), "cpu")
    read = ends.read(ends.enter(inputs), targets)
    pulled = ends.pull(inputs, read.costate)
    for name, table in problem.ends.items():
        g = (read.gradients.get(name, 0.0) + pulled.get(name, 0.0)).mT / len(table)
        torch.testing.assert_close(g, expected[name], rtol=1e-12, atol=1e-14)
        direction = torch.randn(table.shape, generator=gen, dtype=torch.float64)
        gaps = []
        for h in (1e-2, 5e-3):
            moved = problem.ends | {name: table + h * direction}
            gaps.append(float(J(moved) - J(problem.ends) - h * (g * direction).sum()))
        assert abs(gaps[0] / gaps[1] - 4.0) < 0.2, name


def sizes_of_gradients(**sizes):
    """Root mean squares of the entries of g of each end, at the start."""
    depth, heads, V = sizes.pop("L", 4), sizes.pop("H", 4), sizes.get("V", 32)
    problem = tokens(**{"V": V, "n": 64, "batch": 64, "N": 16, "probes": None} | sizes)
    run = train_particles(problem, SGD(1.0), depth, heads, 1, record=[0, 1], device="cpu")
    return {
        name: float((run.ends[1][name] - table).square().mean().sqrt())
        for name, table in run.ends[0].items()
    }


def test_gradients_of_the_ends_are_of_order_one_whatever_the_sizes():
    base = sizes_of_gradients()
    assert all(0.02 < size < 2.0 for size in base.values())
    changes = [{"V": 16}, {"V": 1024, "n": 512, "batch": 512}, {"L": 32}, {"H": 64}, {"N": 64}]
    for change in changes:
        for name, size in sizes_of_gradients(**change).items():
            assert 1 / 6 < size / base[name] < 6, (change, name)


def test_raw_gradients_of_the_embedding_are_not_of_order_one():
    # what the scaling is for: dJ/dE falls like 1 / V
    few, many = sizes_of_gradients(V=16), sizes_of_gradients(V=1024, n=512, batch=512)
    assert (few["embedding"] / 16) / (many["embedding"] / 1024) > 10


# --- the limit ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [March, Picard])
def test_the_limit_of_a_language_model_is_of_order_4(scheme):
    problem, grids, steps = tokens(tied_ends=True), (2, 4, 8), 2
    dense = torch.linspace(0.0, 1.0, 9)

    def solve(elements):
        cost, grid = {"field": 0, "vjp": 0}, DepthGrid.uniform(elements)
        given = problem, SGD(0.1), steps, (steps,), grid, scheme(), cost, torch.device("cpu")
        return train_on_grid(*given)

    fine, found = solve(64), {}
    for run in map(solve, grids):
        for name in "xp":
            gap = getattr(run, name)[steps](dense) - getattr(fine, name)[steps](dense)
            found.setdefault(name, []).append(float(gap.abs().max()))
        for name, table in run.ends[steps].items():
            gap = float((table - fine.ends[steps][name]).abs().max())
            found.setdefault(name, []).append(gap)
        found.setdefault("loss", []).append(float((run.loss - fine.loss).abs().max()))
    for name, gaps in found.items():
        assert abs(slope(gaps, grids) - 4.0) < 0.4, (name, gaps)


def test_the_limits_estimates_are_not_below_half_of_the_errors():
    problem, steps = tokens(), 4
    run = solve_limit(problem, RULE, steps, 1e-2, elements=2, evaluate=[1, 2])
    fine = solve_limit(problem, RULE, steps, 1e-9, evaluate=[1, 2])
    assert run.status == fine.status == "converged"
    assert (run.loss - fine.loss).abs().max() > 0
    for k in range(steps + 1):
        assert 2 * run.loss_error[k] >= (run.loss[k] - fine.loss[k]).abs()
    assert sorted(run.probe_loss) == [1, 2, 4]
    for k, loss in run.probe_loss.items():
        assert 2 * run.probe_loss_error[k] >= (loss - fine.probe_loss[k]).abs()


def test_deep_models_of_the_whole_law_reach_the_limit_like_one_over_depth():
    problem, steps, depths = tokens(), 3, (8, 16, 32)
    limit = solve_limit(problem, RULE, steps, 1e-8)
    gaps = {}
    for L in depths:
        run = train_particles(problem, RULE, L, None, steps, device="cpu")
        for name, table in run.ends[steps].items():
            gap = float((table[0] - limit.ends[steps][name]).abs().max())
            gaps.setdefault(name, []).append(gap)
        gaps.setdefault("loss", []).append(float(abs(run.loss[0, -1] - limit.loss[-1])))
        logits = run.logits(problem, steps, problem.ids[:2, :-1])[0]
        gap = logits - limit.logits(problem, steps, problem.ids[:2, :-1])
        gaps.setdefault("logits", []).append(float(gap.abs().max()))
        rows = bias_table(run, limit)
        gaps.setdefault("x", []).append(max(r["error"] for r in rows if r["variable"] == "x"))
    for name, found in gaps.items():
        assert abs(slope(found, depths) - 1.0) < 0.15, (name, found)


def test_the_logits_of_a_limit_are_those_of_its_loss():
    problem = tokens(batch=None)
    limit = solve_limit(problem, RULE, 2)
    log = limit.logits(problem, 2, problem.ids[:, :-1]).log_softmax(-1)
    loss = -log.gather(-1, problem.ids[:, 1:, None]).mean()
    assert abs(float(loss - limit.loss[2])) < 1e-12
    short = limit.logits(problem, 2, problem.ids[:, :2]).log_softmax(-1)
    torch.testing.assert_close(short, log[:, :2], rtol=0, atol=1e-12)


def test_the_predicted_fluctuation_of_a_language_model_is_what_is_measured():
    problem, steps = tokens(norm_eps=0.1), 2
    rule = AdamW(0.01, eps=0.1)
    run = train_particles(problem, rule, 16, 4096, steps, seeds=16, record=[steps], device="cpu")
    whole = train_particles(problem, rule, 16, None, steps, record=[steps], device="cpu")
    predicted = predict_fluctuation(problem, rule, run)
    assert predicted.status == "linear"
    for name in "xp":
        measured = getattr(run, name)[steps] - getattr(whole, name)[steps]
        gap = measured - getattr(predicted, name)[steps]
        assert gap.square().mean().sqrt() < 0.1 * measured.square().mean().sqrt()


# --- seeds, parts, threads ----------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["eager", "fused"])
def test_seeds_alone_and_runs_in_two_parts_have_the_same_bits(kernel, monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", kernel)
    problem, steps = tokens(V=40, N=16, batch=8), range(5)
    options = {"record": steps, "evaluate": [1, 3], "device": "cpu"}
    run = train_particles(problem, RULE, 3, 8, 4, seeds=3, **options)
    alone = train_particles(problem, RULE, 3, 8, 4, seeds=[2], **options)
    assert torch.equal(alone.loss[0], run.loss[2])
    for name, table in alone.ends[4].items():
        assert torch.equal(table[0], run.ends[4][name][2])
    part = train_particles(
        problem,
        RULE,
        3,
        8,
        2,
        seeds=3,
        keep_state=True,
        **options | {"record": range(3), "evaluate": [1]},
    )
    rest = train_particles(problem, RULE, 3, 8, 4, seeds=3, start=part, **options)
    equal_runs(rest, run, steps)
    assert all(torch.equal(rest.probe_loss[k], run.probe_loss[k]) for k in (1, 3))


def test_a_run_has_the_same_bits_on_one_thread_and_on_several():
    problem, threads = tokens(V=80, N=32, n=40, batch=32, d=16), torch.get_num_threads()
    model = problem, RULE, 2, 4, 3
    try:
        runs = []
        for count in (1, 3):
            torch.set_num_threads(count)
            runs.append(train_particles(*model, record=[3], device="cpu"))
    finally:
        torch.set_num_threads(threads)
    equal_runs(*runs, [3])


def test_a_probe_loss_is_the_same_with_and_without_its_trajectories():
    problem = tokens(n=20, batch=3)
    kept = train_particles(problem, RULE, 3, 4, 2, record=[1, 2], device="cpu")
    light = train_particles(problem, RULE, 3, 4, 2, record=(), evaluate=[1, 2], device="cpu")
    assert not light.x and not light.units and not light.ends
    for k in (1, 2):
        torch.testing.assert_close(light.probe_loss[k], kept.probe_loss[k], rtol=1e-14, atol=0)


def test_a_seed_that_diverges_keeps_its_ends_and_harms_no_other():
    problem = tokens()
    wild = {"w_in": 1e200, "w_out": 1e200, "default": 0.01}
    run = train_particles(problem, SGD(wild), 2, 1, 4, seeds=2, record=[4], device="cpu")
    assert bool(run.diverged.all())
    assert torch.isfinite(run.ends[4]["embedding"]).all()


# --- rules --------------------------------------------------------------------------------------


def test_rules_that_have_nothing_to_act_on_in_the_ends_train_these_as_what_they_hold():
    problem = tokens(biases=True)
    rules = {
        "sbo": SBOAdamW(0.01, eps=0.01),
        "balanced": Rebalance(SBOAdamW(0.01, eps=0.01), every=2),
        "plain": RULE,
    }
    runs = {
        name: train_particles(problem, rule, 2, 4, 1, record=[0, 1], device="cpu")
        for name, rule in rules.items()
    }
    for name in ("sbo", "balanced"):
        # one step from the same gradient: the ends move as with AdamW, the units do not
        for end, table in runs[name].ends[1].items():
            torch.testing.assert_close(table, runs["plain"].ends[1][end], rtol=1e-13, atol=1e-15)
        assert not torch.equal(
            runs[name].units[1]["attention"].packed, runs["plain"].units[1]["attention"].packed
        )


@pytest.mark.parametrize("kernel", ["eager", "fused"])
def test_a_family_without_biases_or_pairs_is_trained_by_what_is_left_of_the_rule(
    kernel, monkeypatch
):
    monkeypatch.setenv("IPSLIMIT_KERNEL", kernel)
    d = 4
    law = Block(
        XavierUniform(d, 3, biases=True).nodes(4, 0), XavierPerceptrons(d, 3).nodes(4, 1)
    )  # gelu: perceptrons have neither biases nor a symmetry pair
    problem = tokens(law=law)
    plain = train_particles(problem, RULE, 2, 4, 1, record=[1], device="cpu")
    for rule in (SBOAdamW(0.01, eps=0.01), Rebalance(SBOAdamW(0.01, eps=0.01), every=1)):
        run = train_particles(problem, rule, 2, 4, 2, record=[1, 2], device="cpu")
        assert run.status == "ok" and not run.notes
        torch.testing.assert_close(
            run.units[1]["perceptron"].packed, plain.units[1]["perceptron"].packed
        )
        limit = solve_limit(problem, rule, 2, 1e-3)
        assert limit.status == "converged"


@pytest.mark.parametrize("rule", [SBOAdamW(0.01), Rebalance(RULE)], ids=["sbo", "rebalance"])
def test_a_rule_that_suits_no_family_at_all_is_refused(rule):
    law = Block(perceptron=XavierPerceptrons(4, 3).nodes(4, 1), norm="rms")
    with pytest.raises(ValueError, match=r"must have (biases|symmetry pairs)"):
        train_particles(tokens(law=law), rule, 2, 4, 1, device="cpu")


def test_learning_rates_by_matrix_name_the_ends_and_by_depth_knows_where_they_stand():
    problem = tokens()
    with pytest.raises(ValueError, match="rate for embedding"):
        units = dict.fromkeys(["q", "k", "v", "o", "w_in", "w_out"], 0.1)
        train_particles(problem, SGD(units), 2, 4, 1, device="cpu")
    frozen = {"embedding": by_depth(lambda s: 0.0), "default": 0.1}
    run = train_particles(problem, SGD(frozen), 2, 4, 1, record=[0, 1], device="cpu")
    assert torch.equal(run.ends[1]["embedding"], run.ends[0]["embedding"])
    assert not torch.equal(run.ends[1]["readout"], run.ends[0]["readout"])
    late = train_particles(
        problem, SGD(by_depth(lambda s: s, 0.1)), 2, 4, 1, record=[0, 1], device="cpu"
    )
    assert torch.equal(late.ends[1]["position"], late.ends[0]["position"])
    assert torch.equal(late.ends[1]["readout"], run.ends[1]["readout"])


def test_signs_step_every_row_of_the_ends():
    run = train_particles(tokens(), Lion(0.01), 2, 4, 1, record=[0, 1], device="cpu")
    moved = (run.ends[1]["readout"] - run.ends[0]["readout"]).abs()
    assert (moved - 0.01).abs().max() < 0.01  # decay beside it


# --- what a problem is --------------------------------------------------------------------------


def test_initial_ends_depend_on_their_seed_alone_and_have_the_stated_sizes():
    problem, other = tokens(V=4000, d=4), tokens(V=4000, d=4, ends_seed=1)
    again = tokens(V=4000, d=4, n=20, seed=3, atoms=8)
    for name, table in problem.ends.items():
        assert torch.equal(table, again.ends[name]) and not torch.equal(table, other.ends[name])
    assert abs(float(problem.ends["embedding"].square().mean()) - 0.5) < 0.02
    assert abs(float(problem.ends["readout"].square().mean()) - 0.25) < 0.01
    assert abs(float(tokens(V=4000, tied_ends=True).ends["embedding"].std()) - 0.5) < 0.01


def test_own_ends_are_taken_and_are_part_of_the_identity():
    table = torch.zeros(7, 4, dtype=torch.float64)
    problem = tokens(ends={"readout": table})
    run = train_particles(problem, RULE, 2, 4, 0, device="cpu")
    assert torch.equal(run.ends[0]["readout"][0], table)
    assert abs(float(run.loss[0, 0]) - math.log(7)) < 1e-12
    identities = [p.identity for p in (problem, tokens(), tokens(seed=1), tokens(tied_ends=True))]
    assert all(a != b for a, b in itertools.combinations(identities, 2))
    with pytest.raises(ValueError, match="problem must have the ends of this run"):
        run.logits(tokens(), 0, problem.ids[:, :2])


def bad(**options):
    given = {"ids": torch.zeros(2, 4, dtype=torch.int64), "vocabulary": 3, "d": 4}
    law = Atoms(XavierUniform(4, 2).nodes(2, 0).heads)
    TokenProblem(law=law, **given | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": [[1, 2]]}, "ids must be a tensor of int64"),
        ({"ids": torch.zeros(2, 4)}, "ids must be a tensor of int64"),
        ({"ids": torch.zeros(4, dtype=torch.int64)}, "ids must have shape"),
        ({"ids": torch.zeros(2, 1, dtype=torch.int64)}, "ids must have shape"),
        ({"ids": torch.zeros(0, 4, dtype=torch.int64)}, "ids must have shape"),
        ({"ids": torch.full((2, 4), 3)}, r"ids must lie in 0\.\.2"),
        ({"ids": torch.full((2, 4), -1)}, r"ids must lie in 0\.\.2"),
        ({"probes": torch.zeros(2, 5, dtype=torch.int64)}, "probes must have windows"),
        ({"probes": torch.full((2, 4), 9)}, "probes must lie"),
        ({"vocabulary": 1}, "vocabulary must"),
        ({"d": 3}, "d must be that of the law, 4"),
        ({"causal": False}, "causal must be True"),
        ({"batch": 3}, "batch must be at most"),
        ({"dtype": torch.float16}, "dtype must be"),
        ({"ends": {"unembedding": torch.zeros(3, 4)}}, "ends must name"),
        ({"ends": {"readout": torch.zeros(3, 3)}}, r"ends\['readout'\] must have shape"),
        ({"ends": torch.zeros(3)}, "ends must be a dict"),
        ({"tied_ends": True, "ends": {"readout": torch.zeros(3, 4)}}, "ends must name"),
        ({"ends_seed": -1}, "ends_seed must"),
    ],
)
def test_what_is_no_language_model_is_refused_in_one_line(options, message):
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        bad(**options)
    assert "\n" not in str(caught.value)


def test_questions_that_a_run_cannot_answer_are_refused():
    problem = tokens()
    run = train_particles(problem, RULE, 2, 4, 1, device="cpu")
    for ids in (problem.ids, problem.ids[:, :0], problem.ids.double(), problem.ids + 100):
        with pytest.raises((TypeError, ValueError), match="ids must"):
            run.logits(problem, 1, ids)
    with pytest.raises(ValueError, match="k must be a recorded step"):
        run.logits(problem, 0, problem.ids[:, :2])
    with pytest.raises(ValueError, match="evaluate must be empty"):
        train_particles(tokens(probes=None), RULE, 2, 4, 1, evaluate=[0], device="cpu")
    with pytest.raises(ValueError, match="evaluate must"):
        train_particles(problem, RULE, 2, 4, 1, evaluate=[2], device="cpu")
