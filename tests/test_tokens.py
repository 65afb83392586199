"""Language models: the scale and the correctness of the ends' gradients, the limit, resuming."""

import math

import pytest
import torch
from test_block_orders import slope

from ipslimit import (
    SGD,
    AdamW,
    Block,
    TokenProblem,
    XavierPerceptrons,
    XavierUniform,
    train_particles,
)
from ipslimit.measure.errors import bias_table, error_table
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


# --- gradients of the ends ----------------------------------------------------------------------


@pytest.mark.parametrize("tied_ends", [False, True])
def test_the_ends_gradients_are_those_of_autograd_and_of_taylor(tied_ends):
    problem = tokens(tied_ends=tied_ends)
    batch = problem.data(problem.chosen(0), "cpu")
    gen = torch.Generator().manual_seed(1)

    def J(tables):
        # a model without layers: what the layers do to p is tested elsewhere
        ends = TokenEnds(tables, problem.block.norm)
        return ends.losses(ends.enter(batch.inputs), batch).mean()

    tables = {name: t.clone().requires_grad_() for name, t in problem.ends.items()}
    expected = dict(zip(tables, torch.autograd.grad(J(tables), tables.values()), strict=True))
    ends = problem.make_ends((), "cpu")
    read = ends.read(ends.enter(batch.inputs), batch)
    pulled = ends.pull(batch.inputs, read.costate)
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


def test_the_ends_of_drawn_models_fluctuate_like_one_over_the_root_of_all_heads():
    # at small eps Adam's step is nearly a sign, and entries flip
    problem, rule, steps, rms = tokens(), AdamW(0.01, eps=0.1), 3, {}
    limit = solve_limit(problem, rule, steps, 1e-8)
    for L, H in ((8, 8), (8, 2048)):
        run, whole = (
            train_particles(problem, rule, L, h, steps, seeds=32, device="cpu") for h in (H, None)
        )
        for row in error_table(run, whole, limit):
            if row["norm"] == "rms" and row["term"] == "fluctuation":
                rms.setdefault((row["variable"], H), []).append(row["error"] ** 2)
        ends = {r["variable"] for r in error_table(run, whole, limit) if r["term"] == "total"}
        assert {"embedding", "position", "readout", "theta_attention"} < ends
    for name in ("embedding", "position", "readout"):
        few, many = (math.sqrt(math.fsum(rms[name, H])) for H in (8, 2048))
        assert abs(math.log(few / many, 256) - 0.5) < 0.1, name


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
