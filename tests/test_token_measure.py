"""A context as a measure over tokens: weights, copies and tracers, with and without a mask."""

import math

import pytest
import torch
from builders import F64, assert_to_rounding, normal, random_parts, small_atoms
from contract import every_rule

from ipslimit import (
    AdamW,
    Block,
    Heads,
    Problem,
    SBOAdamW,
    XavierPerceptrons,
    attention_field,
    attention_vjp,
    train_particles,
)
from ipslimit.model.losses import ReadoutCrossEntropy
from ipslimit.solvers import solve_limit

MASKS = pytest.mark.parametrize("causal", [False, True], ids=["no mask", "causal"])
B, N, D, STEPS = 2, 3, 3, 3
X, Y = normal(B, N, D, seed=2), normal(B, D, seed=3)
OMEGA = torch.tensor([2.0, 1.0, 1.0], dtype=F64) / 4
RULE = AdamW(0.05, eps=0.1)
RULES = every_rule()
# The first token twice, which the mask must see at one position.
DOUBLED, TWICE = torch.tensor([0, 0, 1, 2]), {"positions": torch.tensor([0, 0, 1, 2])}


def laws():
    attention = small_atoms(biases=("bq", "bk", "bv", "bo"))
    perceptron = XavierPerceptrons(D, 2).nodes(4, 0)
    return {
        "attention": attention,
        "behind a norm": Block(attention, perceptron, "rms", 0.1),
        "in turn": Block(attention, perceptron, "layer", 0.1, sequential=True),
    }


LAWS = laws()
EVERY_LAW = pytest.mark.parametrize("law", LAWS.values(), ids=[*LAWS])


def trained(problem, rule=RULE, heads=4):
    return train_particles(problem, rule, 3, heads, STEPS, 2, record=[0, STEPS])


def assert_same_model(ours, theirs, tokens=slice(None), copies=slice(None)):
    """Both runs have the same units, losses, and x and p at these tokens of each."""
    assert_to_rounding(ours.loss, theirs.loss, 64, "loss")
    for k in ours.x:
        for name in "xp":
            one, other = getattr(ours, name)[k][..., tokens, :], getattr(theirs, name)[k]
            assert_to_rounding(one, other[..., copies, :], 512, f"{name} at {k}")
        for family, units in ours.units[k].items():
            assert_to_rounding(units.packed, theirs.units[k][family].packed, 512, family)


@MASKS
@pytest.mark.parametrize("rule", RULES.values(), ids=[*RULES])
def test_a_token_of_twice_the_weight_is_that_token_twice(rule, causal):
    weighted = Problem(X, Y, LAWS["attention"], causal, token_weights=OMEGA)
    doubled = Problem(X[:, DOUBLED], Y, LAWS["attention"], causal, **TWICE)
    assert_same_model(trained(doubled, rule), trained(weighted, rule), slice(1, None))


@MASKS
@EVERY_LAW
def test_so_it_is_with_every_block_and_with_minibatches_and_probes(law, causal):
    x, y = normal(5, N, D, seed=4), normal(5, D, seed=5)
    omega = torch.rand(5, N, dtype=F64, generator=torch.Generator().manual_seed(6)) + 0.1
    omega /= omega.sum(-1, keepdim=True)
    split = omega[:, DOUBLED] * torch.tensor([0.3, 0.7, 1.0, 1.0], dtype=F64)
    more = {"batch": B, "batch_seed": 1}
    probes = X, Y, OMEGA
    one = Problem(x, y, law, causal, probes, **more, token_weights=omega)
    copies = X[:, DOUBLED], Y, OMEGA[DOUBLED] * torch.tensor([0.5, 0.5, 1, 1], dtype=F64)
    probes = *copies, TWICE["positions"]
    other = Problem(x[:, DOUBLED], y, law, causal, probes, **more, token_weights=split, **TWICE)
    ours, theirs = trained(other), trained(one)
    assert_same_model(ours, theirs, slice(1, None))
    for k in ours.probe_p:
        for name in ("probe_x", "probe_p"):
            assert_to_rounding(getattr(ours, name)[k][..., 1:, :], getattr(theirs, name)[k], 512)


@MASKS
@pytest.mark.parametrize("rule", [RULE, SBOAdamW(0.05, eps=0.1)], ids=["AdamW", "SBOAdamW"])
def test_so_it_is_in_the_limit(rule, causal):
    law = LAWS["attention"]
    weighted = solve_limit(Problem(X, Y, law, causal, token_weights=OMEGA), rule, 2, 1e-5)
    copies = Problem(X[:, DOUBLED], Y, law, causal, **TWICE)
    doubled = solve_limit(copies, rule, 2, 1e-5)
    assert weighted.status == doubled.status == "converged"
    assert weighted.error == pytest.approx(doubled.error, rel=1e-6)
    for name in "xp":
        ours, theirs = (getattr(run, name)(2, [0.0, 0.3, 1.0]) for run in (weighted, doubled))
        assert_to_rounding(ours, theirs[..., 1:, :], 512, name)
    assert_to_rounding(weighted.heads(2, 0.4).packed, doubled.heads(2, 0.4).packed, 512)


@MASKS
@EVERY_LAW
@pytest.mark.parametrize("place", [0.5, 100.0], ids=["near", "far out"])
def test_a_tracer_moves_nobody(law, causal, place):
    tracer = torch.full((B, 1, D), place, dtype=F64)
    tracer[..., 0] -= 0.2  # not constant, which a layer norm refuses
    x, omega = torch.cat([tracer, X], 1), torch.cat([torch.zeros(1, dtype=F64), OMEGA])
    positions = torch.tensor([1, 0, 1, 2])
    alone = Problem(X, Y, law, causal, token_weights=OMEGA)
    beside = Problem(x, Y, law, causal, token_weights=omega, positions=positions)
    ours = trained(beside)
    assert ours.status == "ok"
    assert_same_model(ours, trained(alone), slice(1, None))


@MASKS
@EVERY_LAW
def test_a_tracer_on_a_token_follows_it(law, causal):
    x, omega = torch.cat([X, X[:, 1:2]], 1), torch.cat([OMEGA, torch.zeros(1, dtype=F64)])
    positions = torch.tensor([0, 1, 2, 1])
    run = trained(Problem(x, Y, law, causal, token_weights=omega, positions=positions))
    for k in run.x:
        assert_to_rounding(run.x[k][..., 3, :], run.x[k][..., 1, :], 64, "x")
        assert_to_rounding(run.p[k][..., 3, :], run.p[k][..., 1, :], 512, "p")


@MASKS
def test_equal_weights_change_no_bit(causal):
    plain = trained(Problem(X, Y, LAWS["attention"], causal, (X, Y)))
    equal, places = torch.full((B, N), 1 / N, dtype=F64), torch.tensor([3, 5, 70])
    given = Problem(
        X, Y, LAWS["attention"], causal, (X, Y, equal), token_weights=equal, positions=places
    )
    assert given.token_weights is None and given.probe_token_weights is None
    assert given.identity == plain.problem.identity
    run = trained(given)
    for name in ("x", "p", "probe_p"):
        for k, values in getattr(plain, name).items():
            assert torch.equal(values, getattr(run, name)[k])
    assert torch.equal(plain.heads[STEPS].packed, run.heads[STEPS].packed)
    assert torch.equal(plain.loss, run.loss)


@MASKS
def test_tokens_are_told_in_the_order_in_which_they_were_given(causal):
    order, positions = torch.tensor([2, 0, 1]), torch.tensor([0, 1, 2])
    law, back = LAWS["behind a norm"], order.argsort()
    given = {"token_weights": OMEGA[order], "positions": positions[order]}
    mixed = trained(Problem(X[:, order], Y, law, causal, **given))
    assert_same_model(mixed, trained(Problem(X, Y, law, causal, token_weights=OMEGA)), back)


def naive_weighted(x, parts, omega, causal):
    """The field of a measure over tokens, straight from its definition."""
    q = torch.einsum("hmd,bnd->bhnm", parts["q"], x) + parts["bq"][:, None]
    k = torch.einsum("hmd,bnd->bhnm", parts["k"], x) + parts["bk"][:, None]
    v = torch.einsum("hmd,bnd->bhnm", parts["v"], x) + parts["bv"][:, None]
    kernel = torch.exp(q @ k.mT / math.sqrt(q.shape[-1]))
    if causal:
        kernel = kernel.tril()
    kernel = kernel * omega[:, None, None]
    z = (kernel / kernel.sum(-1, keepdim=True)) @ v
    f = torch.einsum("hdm,bhnm->bhnd", parts["o"], z) + parts["bo"][:, None]
    return torch.einsum("h,bhnd->bnd", parts["weights"], f)


@MASKS
def test_the_field_and_its_transpose_are_those_of_the_definition(causal):
    parts, c = random_parts(d=D), normal(B, N, D, seed=8)
    omega = torch.stack([OMEGA, OMEGA.flip(0)])
    heads, x = Heads(**parts), X.clone().requires_grad_()
    leaves = {name: part.clone().requires_grad_() for name, part in parts.items()}
    expected = naive_weighted(x, leaves, omega, causal)
    field = attention_field(X, heads, causal, token_weights=omega)
    assert_to_rounding(field, expected.detach(), 64)
    (N * omega[..., None] * c * expected).sum().backward()
    dx, dheads = attention_vjp(X, heads, c, causal, token_weights=omega)
    assert_to_rounding(dx, x.grad / (N * omega[..., None]), 256)
    for name, part in dheads.parts().items():
        wanted = leaves[name].grad / parts["weights"].view(-1, *[1] * (part.ndim - 1))
        assert_to_rounding(part, 0 * wanted if name == "bk" else wanted, 256, name)
    assert_to_rounding(dheads.weights, leaves["weights"].grad, 256)
    graded = X.clone().requires_grad_()
    (c * attention_field(graded, heads, causal, token_weights=omega)).sum().backward()
    x.grad = None
    (c * naive_weighted(x, parts, omega, causal)).sum().backward()
    assert_to_rounding(graded.grad, x.grad, 256)


@MASKS
def test_a_tracers_cotangent_is_that_of_a_small_weight(causal):
    heads, c = Heads(**random_parts(d=D)), normal(B, N, D, seed=8)
    omega = {w: torch.tensor([0.6 - w, 0.4, w], dtype=F64) for w in (0.0, 1e-5, 1e-7)}
    dx = {w: attention_vjp(X, heads, c, causal, token_weights=o)[0] for w, o in omega.items()}
    gaps = [float((dx[w] - dx[0.0]).norm() / dx[0.0].norm()) for w in (1e-5, 1e-7)]
    assert gaps[1] < 1e-3 and 80 < gaps[0] / gaps[1] < 120  # of first order


def test_losses_are_of_the_measure():
    doubled, omega = X[:, DOUBLED], torch.stack([OMEGA, OMEGA])
    for loss, y in (
        (ReadoutCrossEntropy(normal(4, D)), torch.tensor([1, 3])),
        (lambda x, y, weights: ((x**3).sum(-1) * weights).sum(-1) * y, torch.ones(2, dtype=F64)),
    ):
        one = Problem(X, y, LAWS["attention"], loss=loss, token_weights=OMEGA)
        other = Problem(doubled, y, LAWS["attention"], loss=loss)
        value, costate = one.loss_and_costate(X, one.targets, omega)
        expected, theirs = other.loss_and_costate(doubled, other.targets)
        assert_to_rounding(value, expected, 16)
        assert_to_rounding(costate / (N * omega[..., None]), theirs[:, 1:], 64)


def two(x, y):
    return (x.mean(-2) - y).square().sum(-1)


REFUSED = {
    "token_weights must not be negative": {"token_weights": [1.5, -0.5, 0.0]},
    "token_weights must have sum 1": {"token_weights": [0.5, 0.25, 0.2]},
    "token_weights must have sum 1 in every context; got 0": {"token_weights": [0.0, 0.0, 0.0]},
    "token_weights must be finite": {"token_weights": [math.nan, 0.5, 0.5]},
    "token_weights must be 0 or at least 1e-100": {"token_weights": [1e-120, 0.5, 0.5]},
    "token_weights must have shape": {"token_weights": [0.5, 0.5]},
    "token_weights must give every token one of positive weight": {"token_weights": [0, 0.5, 0.5]},
    "positions must have shape": {"positions": torch.tensor([0, 1])},
    "loss must be callable as loss\\(x, y, weights\\)": {"token_weights": OMEGA, "loss": two},
    "probes: probes' token_weights must have sum 1": {"probes": (X, Y, 2 * OMEGA)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_weights_and_positions_are_refused_in_one_line(message):
    given = dict(REFUSED[message])
    if isinstance(given.get("token_weights"), list):
        given["token_weights"] = torch.tensor(given["token_weights"], dtype=F64)
    with pytest.raises(ValueError, match=message.removeprefix("probes: ")) as refused:
        Problem(X, Y, LAWS["attention"], causal=True, **given)
    assert "\n" not in str(refused.value)


def test_weights_of_another_dtype_and_positions_that_are_no_integers_are_refused():
    with pytest.raises(TypeError, match="token_weights must have the dtype of the tokens"):
        Problem(X, Y, LAWS["attention"], token_weights=OMEGA.float())
    with pytest.raises(TypeError, match="positions must be integers"):
        Problem(X, Y, LAWS["attention"], causal=True, positions=torch.tensor([0.0, 1.0, 2.0]))


def test_problems_with_other_weights_or_positions_are_other_problems():
    law = LAWS["attention"]
    given = [{}, {"token_weights": OMEGA}, {"positions": torch.tensor([0, 0, 1])}]
    texts = [str(Problem(X, Y, law, True, **more).identity) for more in given]
    assert len(set(texts)) == 3
