"""Points that are carried among tokens: the flow map of particles, its costate and its Jacobian."""

import dataclasses

import pytest
import torch
from builders import F64, assert_to_rounding, normal, random_parts, small_atoms

from ipslimit import (
    SGD,
    Atoms,
    Block,
    Heads,
    Problem,
    TokenProblem,
    Units,
    XavierPerceptrons,
    XavierUniform,
    train_particles,
)
from ipslimit.model import company
from ipslimit.model.particles import train_from
from ipslimit.model.runs import empty_run

MASKS = pytest.mark.parametrize("causal", [False, True], ids=["no mask", "causal"])
B, N, D, STEPS, DEPTH = 2, 3, 3, 2, 3
X, Y, PROBES = normal(B, N, D, seed=2), normal(B, D, seed=3), normal(3, N, D, seed=4)
OMEGA = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.3, 0.6]], dtype=F64)
POSITIONS = torch.tensor([[2, 0, 4], [3, 1, 0]])
POINTS = normal(8, D, seed=5)
PERCEPTRON = XavierPerceptrons(D, 2).nodes(4, 0)
LAWS = {
    "attention": small_atoms(biases=("bq", "bk", "bv", "bo")),
    "in turn": Block(small_atoms(), PERCEPTRON, "layer", 0.1, sequential=True),
}
EVERY_LAW = pytest.mark.parametrize("law", LAWS.values(), ids=[*LAWS])
RULE = SGD(0.1)


def weighted(law=LAWS["attention"], causal=False, contexts=X, omega=OMEGA, positions=POSITIONS):
    more = {"positions": positions} if causal else {}
    probes = (PROBES, normal(3, D, seed=6)) if contexts.shape[1] == N else None
    return Problem(contexts, Y, law, causal, probes, token_weights=omega, **more)


def trained(problem, depth=DEPTH, heads=4, record=(0, STEPS)):
    return train_particles(problem, RULE, depth, heads, STEPS, 2, record=record)


@pytest.fixture(scope="module")
def run():
    return trained(weighted())


@MASKS
@EVERY_LAW
def test_a_point_on_a_token_is_carried_as_the_token(law, causal):
    run = trained(weighted(law, causal))
    for k in run.x:
        for b, j in ((0, 0), (0, 1), (0, 2), (1, 1)):
            place = X[:, j : j + 1], int(POSITIONS[b, j]) if causal else None
            if causal and POSITIONS[:, :].amin(1).max() > place[1]:
                continue
            assert_to_rounding(run.flow(k, *place)[:, :, b, 0], run.x[k][:, :, b, j], 64)
            assert_to_rounding(run.flow_p(k, *place)[:, :, b, 0], run.p[k][:, :, b, j], 2048)


@MASKS
@EVERY_LAW
def test_a_point_is_carried_as_a_tracer_of_the_problem(law, causal):
    tracer, omega = normal(B, 1, D, seed=8), torch.cat([OMEGA, torch.zeros(B, 1)], 1)
    positions = torch.cat([POSITIONS, torch.full((B, 1), 2)], 1)
    beside = trained(weighted(law, causal, torch.cat([X, tracer], 1), omega, positions))
    run = trained(weighted(law, causal))
    for k in run.x:
        place = tracer, 2 if causal else None
        assert_to_rounding(run.flow(k, *place)[..., 0, :], beside.x[k][..., N, :], 64)
        assert_to_rounding(run.flow_p(k, *place)[..., 0, :], beside.p[k][..., N, :], 2048)


@MASKS
@EVERY_LAW
def test_its_costate_is_the_limit_of_those_of_tokens_of_small_weight(law, causal):
    point, position, found = normal(B, 1, D, seed=8), 2 if causal else None, []
    exact = trained(weighted(law, causal), record=(0,)).flow_p(0, point, position)[..., 0, :]
    positions = torch.cat([POSITIONS, torch.full((B, 1), 2)], 1)
    for small in (1e-4, 1e-6):
        omega = torch.cat([(1 - small) * OMEGA, torch.full((B, 1), small, dtype=F64)], 1)
        beside = weighted(law, causal, torch.cat([X, point], 1), omega, positions)
        found.append(float((trained(beside, record=(0,)).p[0][..., N, :] - exact).norm()))
    assert found[1] < 1e-4 * exact.norm() and 80 < found[0] / found[1] < 120  # of first order


def test_points_among_probes_are_carried_by_them():
    run = trained(weighted())
    assert_to_rounding(run.flow(STEPS, PROBES, probe=True), run.probe_x[STEPS], 64)
    assert_to_rounding(run.flow_p(STEPS, PROBES, probe=True), run.probe_p[STEPS], 2048)


def test_of_a_minibatch_they_are_the_contexts_of_the_step():
    problem = Problem(normal(5, N, D, seed=9), normal(5, D, seed=10), LAWS["attention"], batch=B)
    run = trained(problem)
    for k in run.x:
        own = problem.contexts[run.batches[k]]
        assert_to_rounding(run.flow(k, own), run.x[k], 64)


# ---------------------------------------------------------------- against autograd of a naive model


def naive(x, omega, places, parts, causal):
    """X_r of tokens (N, d) under the measure omega, after layers of 2, from the definition."""
    states = [x]
    sees = places[:, None] >= places if causal else torch.ones(len(x), len(x), dtype=torch.bool)
    for r in range(len(parts["q"])):
        total = torch.zeros_like(x)
        for h in range(parts["q"].shape[1]):
            q, k, v, o = (parts[name][r, h] for name in "qkvo")
            e = torch.exp((x @ q.T) @ (x @ k.T).T / len(q) ** 0.5) * omega * sees
            z = e / e.sum(1, keepdim=True) @ (x @ v.T)
            total = total + parts["weights"][r, h] * z @ o.T
        x = x + total / 2
        states.append(x)
    return torch.stack(states)


@pytest.fixture(scope="module", params=[False, True], ids=["no mask", "causal"])
def by_definition(request):
    """A run of one seed, its heads, and for a context and a point what a naive model says."""
    problem = weighted(Atoms(Heads(**random_parts(biases=(), scale=0.7))), causal=request.param)
    run = train_particles(problem, RULE, 2, 3, 0, 1)
    heads = run.heads[0]
    parts = {name: t[0] for name, t in (heads.parts() | {"weights": heads.weights}).items()}
    b, position = 1, 2
    places = torch.cat([POSITIONS[b], torch.tensor([position])])

    def states(first, x, omega):
        some = {name: t[first:] for name, t in parts.items()}
        return naive(x, omega, places, some, request.param)

    return run, states, b, position if request.param else None


def test_the_costate_is_the_derivative_of_the_flat_derivative(by_definition):
    run, states, b, position = by_definition
    y = POINTS[:1]
    p = run.flow_p(0, y, position)[0, :, b, 0]
    path = run.flow(0, y, position)[0, :, b, 0]
    for r in range(3):
        point = path[r : r + 1].clone().requires_grad_()
        small = torch.zeros(1, dtype=F64, requires_grad=True)
        x, omega = torch.cat([run.x[0][0, r, b], point]), torch.cat([OMEGA[b], small])
        loss = ((omega[:, None] * states(r, x, omega)[-1]).sum(0) - Y[b]).square().sum()
        (flat,) = torch.autograd.grad(loss, small, create_graph=True)
        (expected,) = torch.autograd.grad(flat.sum(), point)
        assert_to_rounding(p[r], expected[0], 2048, f"layer {r}")


def test_the_jacobian_is_that_of_a_naive_model(by_definition):
    run, states, b, position = by_definition
    omega = torch.cat([OMEGA[b], torch.zeros(1)])

    def last(y):
        return states(0, torch.cat([X[b], y[None]]), omega)[:, -1]

    found = run.flow_jacobian(0, POINTS, position)[0, :, b]
    for i, y in enumerate(POINTS):
        assert_to_rounding(found[:, i], torch.autograd.functional.jacobian(last, y), 64)


@MASKS
@EVERY_LAW
def test_the_flow_is_its_jacobian_to_first_order(law, causal):
    run, v = trained(weighted(law, causal)), normal(D, seed=11)
    here, slope = run.flow(STEPS, POINTS), run.flow_jacobian(STEPS, POINTS) @ v
    left = []
    for e in (1e-2, 1e-3):
        left.append(float((run.flow(STEPS, POINTS + e * v) - here - e * slope).abs().max()))
    assert left[0] < 1e-2 and 80 < left[0] / left[1] < 120  # what is left is of second order


# -------------------------------------------------------------------------------- of flows as such


@MASKS
def test_the_flow_of_all_layers_is_that_of_the_first_and_then_of_the_others(causal):
    problem = weighted(LAWS["in turn"], causal)
    run = train_particles(problem, RULE, 4, 5, STEPS, 1)
    later = problem.block.branch(
        {n: u.map(lambda t: t[:, 2:].transpose(0, 1)) for n, u in run.units[STEPS].items()}
    )
    rest = weighted(LAWS["in turn"], causal, run.x[STEPS][0, 2])
    # 2 layers of 4: each adds a 4th of its field
    half = train_from(later, rest, RULE, 0, (0,), empty_run(2, 5, (0,), 0, rest, "cpu"), 2.0)
    middle = run.flow(STEPS, POINTS)[0, 2]
    assert_to_rounding(half.flow(0, middle)[0], run.flow(STEPS, POINTS)[0, 2:], 64)
    assert_to_rounding(half.flow_p(0, middle)[0], run.flow_p(STEPS, POINTS)[0, 2:], 2048)
    product = half.flow_jacobian(0, middle)[0, -1] @ run.flow_jacobian(STEPS, POINTS)[0, 2]
    assert_to_rounding(product, run.flow_jacobian(STEPS, POINTS)[0, -1], 64)


@pytest.mark.parametrize("name", ["flow", "flow_p", "flow_jacobian"])
def test_points_do_not_see_each_other_and_may_be_many(run, monkeypatch, name):
    ask = getattr(run, name)
    axis = -3 if name == "flow_jacobian" else -2
    apart = torch.cat([ask(STEPS, y[None]) for y in POINTS], axis)
    assert_to_rounding(ask(STEPS, POINTS), apart, 2048)
    of_contexts = ask(STEPS, torch.stack([POINTS, POINTS.flip(0)]))
    assert_to_rounding(of_contexts[:, :, 1].flip(axis), ask(STEPS, POINTS)[:, :, 1], 2048)
    of_seeds = ask(STEPS, torch.stack([POINTS, POINTS.flip(0)])[:, None].expand(-1, B, -1, -1))
    assert_to_rounding(of_seeds[1].flip(axis), ask(STEPS, POINTS)[1], 2048)
    whole = ask(STEPS, POINTS)
    monkeypatch.setattr(company, "TOGETHER", 1)
    assert_to_rounding(ask(STEPS, POINTS), whole, 2048)


def test_a_point_far_out_harms_no_other(run):
    far = torch.cat([POINTS[:2], torch.full((1, D), 40.0, dtype=F64)])
    assert torch.equal(run.flow(STEPS, far)[..., :2, :], run.flow(STEPS, POINTS[:2])[..., :2, :])
    assert_to_rounding(run.flow_p(STEPS, far)[..., :2, :], run.flow_p(STEPS, POINTS[:2]), 2048)
    beyond = torch.cat([POINTS[:2], torch.full((1, D), 1e4, dtype=F64)])
    assert run.flow_p(STEPS, beyond)[:, 0].isinf().any()  # and never what is merely wrong


def test_single_precision_carries_as_double_does():
    heads = LAWS["attention"].heads.to(torch.float32)
    x, y, omega = (t.float() for t in (X, Y, OMEGA))
    single = trained(Problem(x, y, Atoms(heads), token_weights=omega))
    double = trained(Problem(X, Y, LAWS["attention"], token_weights=OMEGA))
    for name in ("flow", "flow_p", "flow_jacobian"):
        ours, theirs = getattr(single, name)(STEPS, POINTS.float()), getattr(double, name)
        assert_to_rounding(ours, theirs(STEPS, POINTS).float(), 4096, name)


def test_the_whole_law_is_computed_once_for_all_seeds():
    run = train_particles(weighted(), RULE, DEPTH, None, STEPS, 3)
    found = run.flow(STEPS, POINTS)
    assert found.shape == (3, DEPTH + 1, B, len(POINTS), D) and found.stride(0) == 0
    assert_to_rounding(run.flow(STEPS, X), run.x[STEPS], 64)


def test_a_language_model_carries_points_that_have_no_label():
    law = XavierUniform(4, 4)
    ids = torch.randint(5, (3, 7), generator=torch.Generator().manual_seed(0))
    run = train_particles(TokenProblem(ids, 5, law, 4), RULE, 2, 3, 1, 2)
    x = run.x[1]
    # a point stands where it starts, with the tokens of one seed: those of another lie elsewhere
    assert_to_rounding(run.flow(1, x[0, 0, :, -1:])[0], x[0, :, :, -1:], 64)
    with pytest.raises(ValueError, match="problem must have a loss of the measure over tokens"):
        run.flow_p(1, x[0, 0])


BAD = {
    "points must have shape": {"points": POINTS[:, :2]},
    "points must have shape .*seeds=2, B=2, d=3": {"points": torch.ones(3, 2, D, dtype=F64)},
    "points must have shape .* got .3,.": {"points": POINTS[0]},
    "points must be finite": {"points": POINTS / 0},
    "points must have the dtype": {"points": POINTS.float()},
    "k must be a recorded step, one of .0, 2.; got 1": {"k": 1},
    "k must be an integer": {"k": 1.0},
    "position must be an integer": {"position": 1.0},
    "probe must be True or False": {"probe": 1},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_refused_in_one_line(run, message):
    given = {"k": STEPS, "points": POINTS} | BAD[message]
    with pytest.raises((TypeError, ValueError), match=message) as refused:
        run.flow(**given)
    assert "\n" not in str(refused.value)


def test_without_a_mask_a_position_changes_nothing(run):
    found = run.flow(STEPS, POINTS)
    assert torch.equal(run.flow(STEPS, POINTS, position=N - 1), found)


class Mixing(Units):
    """f(x_i; theta) = W sum_j x_j: looks at all tokens, and knows of no weights."""

    matrices = {"w": "d d"}  # noqa: RUF012

    @staticmethod
    def unit_field(x, causal, w):
        return (x.sum(0) @ w.mT).expand(x.shape)


def two(x, y):
    return (x.mean(-2) - y).square().sum(-1)


def test_what_has_no_flow_is_refused():
    causal = trained(weighted(causal=True))
    for position, message in ((5, "at most 4"), (1.5, "an integer"), (-1, "at least 0")):
        with pytest.raises((TypeError, ValueError), match=message):
            causal.flow(0, POINTS, position)
    late = weighted(causal=True, positions=torch.tensor([[2, 3, 4], [0, 1, 2]]))
    with pytest.raises(ValueError, match="position must be one up to which every context has"):
        trained(late).flow(0, POINTS, 1)
    plain = trained(Problem(X, Y, LAWS["attention"], loss=two))
    assert_to_rounding(plain.flow(0, X), plain.x[0], 64)
    with pytest.raises(ValueError, match=r"loss must be callable as loss\(x, y, weights"):
        plain.flow_p(0, X)
    with pytest.raises(ValueError, match="probe must be False for a problem without probes"):
        plain.flow(0, X, probe=True)
    shared = dataclasses.replace(plain, of=plain.of | {"group": "process 0 of 2"})
    with pytest.raises(ValueError, match="run must hold the units of all processes"):
        shared.flow(0, X)
    mixing = trained(Problem(X, Y, Atoms(Mixing(w=normal(4, D, D)))))
    with pytest.raises(ValueError, match="law must be of heads, or of units that take every token"):
        mixing.flow(0, X)
    normed = trained(weighted(LAWS["in turn"]))
    with pytest.raises(ValueError, match="points must have none that is constant"):
        normed.flow(0, torch.ones(1, D, dtype=F64))
