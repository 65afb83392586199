"""Laws of perceptrons: what is drawn, the nodes, and training from them."""

import math

import numpy as np
import pytest
import torch
from builders import F64, assert_to_rounding, normal
from perceptron_units import naive_field, random_perceptrons

from ipslimit import (
    AdamW,
    Atoms,
    Perceptrons,
    Problem,
    SBOAdamW,
    TruncatedNormal,
    TruncatedNormalPerceptrons,
    XavierPerceptrons,
    XavierUniform,
    train_particles,
)
from ipslimit.model.perceptron_laws import PERCEPTRON_LAWS
from ipslimit.solvers import solve_limit

LAWS = {
    "xavier": XavierPerceptrons(3, 2, gain=1.5),
    "gated": XavierPerceptrons(3, 2, gated=True, biases=True, activation="silu"),
    "normal": TruncatedNormalPerceptrons(3, 2, std=0.5, bound=0.8, activation="tanh"),
}
SAMPLED = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)


def rng(seed=0):
    return np.random.default_rng(seed)


def perceptron_atoms(**sizes):
    units = random_perceptrons(H=4, activation="tanh", **sizes)
    return Atoms(units.from_packed(units.packed / 2, units.weights.softmax(0), units.layout))


def problem(law, B=3, N=4):
    return Problem(normal(B, N, 3, seed=5), normal(B, 3, seed=6), law)


def test_units_have_the_parts_and_the_activation_that_the_fields_say():
    layouts = {name: law.layout for name, law in LAWS.items()}
    assert layouts["xavier"].names == ("w_in", "w_out")
    assert layouts["gated"].names == ("w_in", "w_out", "w_gate", "b_in", "b_out")
    assert [layout.activation for layout in layouts.values()] == ["gelu", "silu", "tanh"]
    assert all(layout.family is Perceptrons for layout in layouts.values())


@SAMPLED
def test_draws_have_the_moments_of_their_density_and_biases_zero(law):
    draw = law.draw(4000, 3, rng(), F64)
    rows = law.layout.matrix_rows
    entries = draw.packed[:, :rows]
    assert draw.packed.shape == (3, law.layout.size, 4000) and not draw.packed[:, rows:].any()
    assert float(entries.abs().max()) <= law.bound
    if isinstance(law, XavierPerceptrons):
        assert law.bound == law.gain * math.sqrt(6 / 5)
        variance = law.bound**2 / 3
    else:
        a = law.bound / law.std
        density = math.exp(-(a**2) / 2) / math.sqrt(2 * math.pi)
        variance = law.std**2 * (1 - 2 * a * density / math.erf(a / math.sqrt(2)))
    number = entries.numel()
    # four standard deviations, of a variance's estimate at most as for a fourth moment of bound^4
    assert abs(float(entries.mean())) < 4 * math.sqrt(variance / number)
    assert abs(float(entries.var()) - variance) < 4 * law.bound**2 / math.sqrt(number)


@pytest.mark.parametrize(
    "ours, heads",
    [
        (XavierPerceptrons(3, 2, gain=0.7), XavierUniform(3, 2, gain=0.7)),
        (
            TruncatedNormalPerceptrons(3, 2, std=0.4, bound=1.0),
            TruncatedNormal(3, 2, std=0.4, bound=1.0),
        ),
    ],
    ids=["xavier", "normal"],
)
def test_densities_are_those_of_the_laws_of_heads(ours, heads):
    u = np.linspace(0, 1, 101)[1:-1]
    assert np.array_equal(ours.quantile(u), heads.quantile(u))


@SAMPLED
def test_nodes_come_in_mirror_pairs_and_their_mean_field_is_zero(law):
    nodes = law.nodes(16, seed=3).heads
    x = normal(2, 4, 3, seed=1)
    assert nodes.count == 16 and nodes.layout == law.layout
    first, second = nodes.packed.split(8, dim=1)
    flipped = {"w_out"} | ({"b_out"} & set(law.layout.names))
    for name, rows in law.layout.slices.items():
        sign = -1.0 if name in flipped else 1.0
        assert torch.equal(second[rows], sign * first[rows]), name
    assert_to_rounding(nodes.field(x), torch.zeros_like(x), 16)


def test_an_odd_number_of_nodes_is_refused():
    with pytest.raises(ValueError, match=r"n.* must be even in number.*; got 7"):
        LAWS["xavier"].nodes(7)


@SAMPLED
def test_particles_train_from_the_law_on_the_naive_field(law):
    run = train_particles(problem(law), AdamW(0.05, eps=0.1), 3, 6, 1, device="cpu", record=[0, 1])
    for k in (0, 1):
        units, x = run.heads[k][0], problem(law).contexts
        for r in range(3):
            parts = units[r].parts() | {"weights": units[r].weights}
            x = x + naive_field(x, parts, law.layout.activation) / 3
            assert_to_rounding(run.x[k][0, r + 1], x, 64)
    assert not torch.equal(run.heads[0].packed, run.heads[1].packed)


@pytest.mark.parametrize("rule", [AdamW(0.05, eps=0.1), SBOAdamW(0.05, eps=0.1)], ids=["w", "sbo"])
def test_the_shortcut_of_atoms_is_exact(rule):
    """40 units of 4 atoms are 4 weighted ones: trained as 40, they are the same."""
    law = perceptron_atoms(names=("b_in", "b_out"))
    short = train_particles(problem(law), rule, 2, 40, 2, device="cpu", record=[0, 2])
    start = short.heads[0][0]
    copies = (start.weights * 40).round().long()
    wide = [p.repeat_interleave(n, 1) for p, n in zip(start.packed, copies, strict=True)]
    assert all(w.shape[1] == 40 for w in wide)
    x = problem(law).contexts
    for r in range(2):
        whole = Perceptrons.from_packed(wide[r], torch.full((40,), 1 / 40, dtype=F64), law.layout)
        x = x + whole.field(x) / 2
    assert_to_rounding(short.x[0][0, -1], x, 64)


def test_the_limit_from_atoms_is_what_deep_particles_of_the_whole_law_approach():
    law = perceptron_atoms()
    rule = AdamW(0.05, eps=0.1)
    limit = solve_limit(problem(law), rule, 1, 1e-6, record=[0, 1], device="cpu")
    assert limit.status == "converged"
    gaps = []
    for L in (8, 16):
        whole = train_particles(problem(law), rule, L, None, 1, device="cpu", record=[1])
        gaps.append(float((whole.x[1][0, -1] - limit.x(1, 1.0)).abs().max()))
    assert 1.7 < gaps[0] / gaps[1] < 2.4, gaps  # a bias of order 1/L


@pytest.mark.parametrize(
    "make, exception, words",
    [
        (lambda: XavierPerceptrons(3, 0), ValueError, ("n must", "got 0")),
        (lambda: XavierPerceptrons(3, 2, gain=0.0), ValueError, ("gain", "got 0")),
        (lambda: XavierPerceptrons(3, 2, gain=1.7e308), ValueError, ("sqrt(6 / (d + n))",)),
        (lambda: XavierPerceptrons(3, 2, activation="elu"), ValueError, ("activation", "'elu'")),
        (lambda: XavierPerceptrons(3, 2, gated=1), TypeError, ("gated", "got 1")),
        (lambda: TruncatedNormalPerceptrons(3, 2, std=-1, bound=1), ValueError, ("std", "got -1")),
        (lambda: TruncatedNormalPerceptrons(3, 2, std=1, bound=0), ValueError, ("bound", "got 0")),
    ],
)
def test_bad_fields_are_refused_in_one_line(make, exception, words):
    with pytest.raises(exception) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, f"{word!r} is missing in: {message}"


def test_laws_have_their_names_and_say_what_they_are():
    assert set(PERCEPTRON_LAWS) == {"xavier", "truncated-normal", "atoms"}
    assert repr(LAWS["gated"]) == (
        "XavierPerceptrons(d=3, n=2, gain=1, biases=True, gated=True, activation='silu')"
    )
