"""Particles and limit of blocks: several families, norms, batches, ties, laws along depth."""

import dataclasses
import math

import pytest
import torch
from builders import F64, normal, small_atoms
from own_units import Tanh, TanhLaw

from ipslimit import (
    SGD,
    AdamW,
    AlongDepth,
    Atoms,
    Block,
    Problem,
    Rebalance,
    XavierUniform,
    by_depth,
    warmup_cosine,
)
from ipslimit import train_particles as train
from ipslimit.measure.errors import bias_table, error_table
from ipslimit.measure.fluctuation import predict_fluctuation
from ipslimit.solvers import solve_limit
from ipslimit.solvers.on_grid import Stopped

RULE = AdamW(0.05, eps=0.1)
PERCEPTRONS = Atoms(Tanh(w_in=normal(4, 2, 3, seed=3), w_out=normal(4, 3, 2, seed=4)))


def block(**options):
    return Block(small_atoms(biases=()), PERCEPTRONS, **{"norm": "rms", "norm_eps": 0.1} | options)


def problem(law=None, contexts=5, probes=0, **options):
    pair = (normal(probes, 4, 3, seed=8), normal(probes, 3, seed=9)) if probes else None
    given = normal(contexts, 4, 3, seed=2), normal(contexts, 3, seed=5)
    return Problem(*given, block() if law is None else law, probes=pair, **options)


def assert_same(one, other, steps):
    assert torch.equal(one.loss, other.loss) and one.batches.keys() == other.batches.keys()
    assert torch.equal(one.diverged, other.diverged) and one.unit_numbers == other.unit_numbers
    for k in steps:
        assert torch.equal(one.x[k], other.x[k]) and torch.equal(one.p[k], other.p[k])
        for name, units in one.units[k].items():
            assert torch.equal(units.packed, other.units[k][name].packed)


def test_a_block_of_one_law_without_a_norm_is_the_law_to_the_bit():
    law = small_atoms()
    plain, wrapped = (train(problem(own), RULE, 3, 4, 2, 2) for own in (law, Block(law)))
    assert_same(plain, wrapped, [2])
    assert torch.equal(plain.heads[2].packed, wrapped.heads[2].packed)
    assert torch.equal(plain.counts, wrapped.unit_counts["attention"])


def test_attention_of_a_block_draws_what_attention_alone_draws():
    alone = train(problem(small_atoms(biases=())), RULE, 3, 4, 0, 2)
    both = train(problem(), RULE, 3, {"attention": 4, "perceptron": 7}, 0, 2)
    assert torch.equal(alone.counts, both.unit_counts["attention"])
    assert both.unit_counts["perceptron"].sum(-1).unique().tolist() == [7]
    assert both.unit_numbers == {"attention": 4, "perceptron": 7} and both.head_count == 4
    with pytest.raises(AttributeError, match="units\\[k\\], unit_counts and unit_atoms"):
        _ = both.heads


@pytest.mark.parametrize("sequential", [False, True])
def test_a_seed_of_a_block_is_the_same_alone_and_in_a_batch(sequential):
    of = problem(block(sequential=sequential), batch=3)
    many, one = (train(of, RULE, 4, 5, 3, seeds, record=[1, 3]) for seeds in ([0, 1, 2], [1]))
    for k in (1, 3):
        assert torch.equal(many.x[k][1:2], one.x[k]) and torch.equal(many.p[k][1:2], one.p[k])
        for name in ("attention", "perceptron"):
            assert torch.equal(many.units[k][name].packed[1:2], one.units[k][name].packed)


def test_batches_are_drawn_without_replacement_by_seed_and_step_alone():
    of = problem(contexts=7, batch=3, batch_seed=4)
    drawn = [of.chosen(k) for k in range(40)]
    assert all(len(set(b.tolist())) == 3 for b in drawn)
    assert torch.equal(torch.cat(drawn).unique(), torch.arange(7))
    assert torch.equal(of.chosen(11), drawn[11])
    other = problem(contexts=7, batch=3, batch_seed=5)
    assert not all(torch.equal(other.chosen(k), b) for k, b in enumerate(drawn))
    assert torch.equal(problem(contexts=7).chosen(3), torch.arange(7))


def test_a_run_on_batches_is_one_on_these_contexts_in_turn():
    of = problem(batch=2)
    run = train(of, SGD(0.3), 3, 4, 2, 2, record=[0, 1, 2])
    limit = solve_limit(of, SGD(0.3), 2, 1e-5, record=[0, 1, 2])
    for k in range(3):
        assert torch.equal(run.batches[k], of.chosen(k)) and torch.equal(
            limit.batches[k], of.chosen(k)
        )
        assert torch.equal(run.x[k][0, 0], of.contexts[of.chosen(k)])
        assert torch.equal(limit.x(k, 0.0), of.contexts[of.chosen(k)])
    # one step on the contexts of a batch alone is the first step of the run
    first = of.chosen(0)
    alone = Problem(of.contexts[first], of.targets[first], of.law)
    same = train(alone, SGD(0.3), 3, 4, 1, 2)
    for name, units in same.units[1].items():
        assert torch.equal(units.packed, run.units[1][name].packed)


def test_a_whole_batch_is_no_batch_up_to_the_order_of_its_contexts():
    whole, drawn = (train(problem(batch=b), RULE, 3, 4, 2, record=[2]) for b in (None, 5))
    torch.testing.assert_close(whole.loss, drawn.loss)
    back = drawn.batches[2].argsort()
    torch.testing.assert_close(whole.x[2], drawn.x[2][:, :, back])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("heads", [4, None])
def test_a_run_goes_on_to_the_same_bits_from_where_it_ended(heads, tied):
    of, rule = problem(batch=2, tied=tied, probes=2), Rebalance(AdamW(0.05, eps=0.1), 2)
    of = problem(Block(small_atoms(biases=()), norm="rms"), batch=2, tied=tied, probes=2)
    options = {"seeds": 2, "keep_state": True}
    whole = train(of, rule, 3, heads, 5, record=[1, 3, 5], **options)
    first = train(of, rule, 3, heads, 3, record=[1, 3], **options)
    second = train(of, rule, 3, heads, 5, record=[1, 3, 5], start=first, **options)
    assert_same(whole, second, [1, 3, 5])
    assert torch.equal(whole.probe_x[3], second.probe_x[3]) and whole.notes == second.notes
    for name, t in whole.states["attention"].items():
        assert torch.equal(t, second.states["attention"][name])
    assert second.last == 5 and second.status == "ok"


def test_a_callback_watches_a_run_and_stops_it_and_it_can_be_gone_on_from():
    of, seen = problem(), []

    def stop(k, run):
        seen.append((k, float(run.loss[0, k])))
        return k == 2

    stopped = train(of, RULE, 3, 4, 5, keep_state=True, callback=stop)
    whole = train(of, RULE, 3, 4, 5, keep_state=True)
    assert stopped.status == "stopped at step 2" and stopped.last == 2
    assert seen == [(k, float(whole.loss[0, k])) for k in range(3)]
    assert bool(stopped.loss[:, 3:].isnan().all())
    assert_same(train(of, RULE, 3, 4, 5, start=stopped), whole, [5])


def test_warm_starts_of_another_run_are_refused_by_name():
    of = problem()
    start = train(of, RULE, 3, 4, 2, keep_state=True)
    for change, words in (
        ({"depth": 4}, "with depth 4"),
        ({"heads": 5}, "with heads"),
        ({"seeds": 2}, "with seeds"),
        ({"steps": 1}, "from 2 on"),
        ({"record": [0, 3]}, "from 2 on"),
        ({"rule": SGD(0.1)}, "rule must be the rule that trained start"),
    ):
        given = {"rule": RULE, "depth": 3, "heads": 4, "steps": 4} | change
        with pytest.raises(ValueError, match=words):
            train(of, start=start, **given)
    with pytest.raises(ValueError, match="keep_state=True"):
        train(of, RULE, 3, 4, 4, start=train(of, RULE, 3, 4, 2))
    with pytest.raises(TypeError, match=r"^start must be a ParticleRun"):
        train(of, RULE, 3, 4, 4, start=3)
    with pytest.raises(TypeError, match=r"^callback must be callable"):
        train(of, RULE, 3, 4, 4, callback=3)


def test_tied_layers_are_one_layer_trained_by_the_mean_of_its_gradients():
    of, free = problem(tied=True), problem()
    run = train(of, SGD(1.0), 4, 5, 1, record=[0, 1])
    for name, units in run.units[0].items():
        assert bool((units.packed == units.packed[:, :1]).all())
        assert bool((run.unit_counts[name] == run.unit_counts[name][:, :1]).all())
        moved = run.units[1][name].packed - units.packed
        assert bool((moved == moved[:, :1]).all())
    # the same first layers, untied, move by their own gradients
    from ipslimit.model.particles import train_from
    from ipslimit.model.runs import empty_run

    start = free.block.branch(
        {n: u.map(lambda t: t.transpose(0, 1)) for n, u in run.units[0].items()}
    )
    other = train_from(start, free, SGD(1.0), 1, (0, 1), empty_run(4, 5, (0,), 1, free, "cpu"))
    for name, units in other.units[1].items():
        mean = (units.packed - other.units[0][name].packed).mean(1)
        tied = (run.units[1][name].packed - run.units[0][name].packed)[:, 0]
        torch.testing.assert_close(tied, mean, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_tied_layers_tend_to_their_limit_like_one_over_depth():
    of = problem(tied=True)
    limit = solve_limit(of, SGD(0.3), 3, 1e-7)
    assert limit.status == "converged"
    errors = []
    for depth in (8, 16, 32):
        rows = bias_table(train(of, SGD(0.3), depth, None, 3), limit)
        errors.append([row["error"] for row in rows if row["norm"] == "rms"])
    for coarse, middle, fine in zip(*errors, strict=True):
        assert 1.7 < coarse / middle < 2.3 and 1.8 < middle / fine < 2.2


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"sequential": False}, {"sequential": True}])
def test_blocks_tend_to_the_limit_of_the_sum_like_one_over_depth(options):
    of = problem(block(**options), batch=3)
    limit = solve_limit(of, SGD(0.3), 2, 1e-7)
    assert limit.status == "converged" and limit.least_size > 0.1
    errors = []
    for depth in (16, 32, 64):
        rows = bias_table(train(of, SGD(0.3), depth, None, 2), limit)
        assert {row["variable"] for row in rows} == {
            "x",
            "p",
            "theta_attention",
            "theta_perceptron",
        }
        errors.append([row["error"] for row in rows if row["norm"] == "rms"])
    for coarse, middle, fine in zip(*errors, strict=True):
        assert 1.7 < coarse / middle < 2.3 and 1.8 < middle / fine < 2.2


def wider(units, s):
    return units.with_packed((0.5 + s[:, None, None]) * units.packed)


def test_a_law_along_depth_is_what_every_layer_and_every_node_starts_from():
    base = small_atoms(biases=())
    of = problem(AlongDepth(base, wider))
    run = train(of, SGD(0.3), 4, None, 0, record=[0])
    for r in range(4):
        expected = (0.5 + r / 4) * base.heads.packed
        torch.testing.assert_close(run.heads[0].packed[0, r], expected, rtol=1e-15, atol=0)
    limit = solve_limit(of, SGD(0.3), 2, 1e-6)
    assert limit.status == "converged"
    torch.testing.assert_close(
        solve_limit(of, SGD(0.3), 0, 1e-6).heads(0, 0.3).packed, 0.8 * base.heads.packed
    )
    drawn = train(of, SGD(0.3), 3, 6, 0, record=[0])
    for r in range(3):
        atoms = drawn.atoms[0, r]
        expected = (0.5 + r / 3) * base.heads.packed[:, atoms]
        torch.testing.assert_close(drawn.heads[0].packed[0, r], expected, rtol=1e-15, atol=0)
    errors = []
    for depth in (32, 64):
        rows = bias_table(train(of, SGD(0.3), depth, None, 2), limit)
        errors.append([row["error"] for row in rows if row["norm"] == "rms"])
    assert all(1.8 < coarse / fine < 2.2 for coarse, fine in zip(*errors, strict=True))


def test_the_constant_of_a_block_is_predicted():
    of = problem(AlongDepth(small_atoms(biases=()), wider))
    for own in (problem(batch=3), of, problem(tied=True)):
        run = train(own, SGD(0.3), 8, 2**16, 2, 6)
        predicted = predict_fluctuation(own, SGD(0.3), run)
        whole = train(own, SGD(0.3), 8, None, 2)
        for name in "xp":
            measured = getattr(run, name)[2] - getattr(whole, name)[2]
            gap = (measured - getattr(predicted, name)[2]).norm() / measured.norm()
            assert predicted.status == "linear" and float(gap) < 0.02, (name, float(gap))


def test_rows_of_a_block_name_both_numbers_where_they_differ():
    of = problem()
    limit, whole = solve_limit(of, RULE, 1, 1e-4), train(of, RULE, 3, None, 1)
    run = train(of, RULE, 3, {"attention": 4, "perceptron": 9}, 1)
    rows = error_table(run, whole, limit)
    assert {(row["H"], row["H_attention"], row["H_perceptron"]) for row in rows} == {(4, 4, 9)}
    assert all("H_attention" not in row for row in bias_table(whole, limit))


def test_sampled_laws_of_a_block_have_a_quadrature_error_for_both():
    law = Block(XavierUniform(3, 2), TanhLaw(3, 2), norm="rms", norm_eps=0.1)
    limit = solve_limit(problem(law), SGD(0.3), 1, 1e-3, nodes=64, quadrature_tol=math.inf)
    assert limit.status == "converged" and 0.0 < limit.quadrature_error < 1.0
    assert limit.unit_numbers == {"attention": 64, "perceptron": 64}


def test_a_limit_is_watched_and_stopped_with_what_it_has():
    seen = []

    def stop(k, elements, loss):
        seen.append((k, elements, loss))
        return elements == 64

    limit = solve_limit(problem(), RULE, 1, 1e-13, callback=stop)
    assert limit.status == "tolerance not reached" and "stopped by callback" in limit.message
    assert limit.grid.elements == 32 and seen[:2] == [(0, 8, seen[0][2]), (1, 8, seen[1][2])]
    with pytest.raises(Stopped, match="stopped by callback at step 0 on 8 elements"):
        solve_limit(problem(), RULE, 1, callback=lambda *_: True)


def test_tokens_near_zero_are_reported_by_particles_and_limit():
    contexts = normal(2, 4, 3)
    contexts[0, 1] = 1e-3
    of = Problem(contexts, normal(2, 3, seed=5), Block(small_atoms(), norm="rms"))
    run = train(of, RULE, 4, 4, 1)
    assert run.least_size == pytest.approx(1e-3, rel=0.2) and "raise norm_eps" in run.notes[0]
    limit = solve_limit(of, RULE, 1, 1e-2)
    assert any("raise norm_eps" in note for note in limit.notes)
    assert "raise norm_eps" in limit.message


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Block(), "attention and perceptron must not both be None"),
        (lambda: Block(PERCEPTRONS), "^attention must be a law of Heads; got a law of Tanh"),
        (lambda: Block(perceptron=small_atoms()), "^perceptron must be a law of Perceptrons; got"),
        (lambda: Block(3), "^attention must be a law of Heads; got 3"),
        (lambda: Block(small_atoms(), norm="batch"), "^norm must be one of"),
        (lambda: Block(small_atoms(d=2), norm="layer"), '^norm "layer" must have d >= 3'),
        (lambda: Block(small_atoms(d=4), PERCEPTRONS), "must have the same d"),
        (lambda: Block(small_atoms(), sequential=1), "^sequential must be"),
        (lambda: problem(batch=6), "^batch must be at most the number of contexts, 5; got 6"),
        (lambda: problem(batch=0), "^batch must be"),
        (lambda: problem(batch=2, batch_seed=-1), "^batch_seed must be"),
        (lambda: problem(tied=1), "^tied must be"),
        (lambda: problem(AlongDepth(small_atoms(), wider), tied=True), "^tied must be False"),
        (lambda: AlongDepth(small_atoms(), lambda u, s: 3), "^change must return units"),
        (lambda: AlongDepth(3, wider), "^law must be a law"),
        (lambda: train(problem(), RULE, 2, {"attention": 3}, 1), "^heads must give a number for"),
        (lambda: train(problem(), RULE, 2, {"attention": 3, "perceptron": 0}, 1), "^heads\\['perc"),
        (
            lambda: Problem(torch.zeros(1, 2, 3, dtype=F64), normal(1, 3), block()),
            "^contexts must have no token that is zero",
        ),
    ],
)
def test_bad_blocks_are_refused_in_one_line(make, words):
    with pytest.raises((ValueError, TypeError), match=words) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_tied_layers_take_schedules_and_refuse_rates_by_depth():
    of = problem(tied=True)
    run = train(of, AdamW(warmup_cosine(0.1, 2, 4), eps=0.1), 3, 4, 4)
    assert run.status == "ok"
    with pytest.raises(ValueError, match=r"^profile must be finite"):
        train(of, AdamW(by_depth(lambda s: 1 + s, 0.1), eps=0.1), 3, 4, 1)


@dataclasses.dataclass
class Rising:
    """A profile that can be told from others."""

    start: float = 0.2

    def __call__(self, s):
        return self.start + s


def test_rates_by_depth_reach_layers_and_nodes_alike():
    of = problem(contexts=3)
    rule = SGD(by_depth(Rising()))
    limit = solve_limit(of, rule, 2, 1e-6)
    assert limit.status == "converged"
    errors = []
    for depth in (32, 64):
        rows = bias_table(train(of, rule, depth, None, 2), limit)
        errors.append([row["error"] for row in rows if row["norm"] == "rms"])
    assert all(1.8 < coarse / fine < 2.2 for coarse, fine in zip(*errors, strict=True))
