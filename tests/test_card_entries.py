"""Every public entry on a card: no devices are mixed, and nothing comes back but what is asked for.

On a stand-in for a card, see `card_stand_in`, whose numbers are real and so those of the CPU.

Left out, since they are of the CPU by their nature:
- `train_particles(group=...)`: its collectives are the process group's, of which the CPU's (gloo)
  alone is here; a card's is NCCL.
- `IPSLIMIT_KERNEL=fused` and the compiled march: refused, or not chosen, on a card
  (`test_kernel_fused`).
- `solvers.routes`, which are for checks of the limit by others' solvers, made on the CPU.
- `ipslimit.optim`, `ipslimit.nn`, `BoundaryProbe`: of the user's models, on whatever device.
- commands on text: made on the CPU, and refused elsewhere.

And since the stand-in does not reach so far: autograd's face under a mask, which makes a tensor in
`backward`, where torch asks no function mode. (Its transpose is here by itself.)
"""

from typing import ClassVar

import pytest
import torch
from builders import normal, random_heads, small_atoms, small_problem
from card_stand_in import CARD, card, on_card, watched
from small_blocks import block, problem
from test_card_steps import RULES, text, weighted

from ipslimit import AdamW, Atoms, Rebalance, Units, attention_field, attention_vjp, train_particles
from ipslimit.measure.errors import bias_table, error_table, weak_table
from ipslimit.measure.fluctuation import predict_fluctuation
from ipslimit.solvers import solve_limit

ADAMW = AdamW(0.02, eps=0.1)
ALL_BIASES = small_atoms(biases=("bq", "bk", "bv", "bo"))


@pytest.fixture(autouse=True)
def a_card(monkeypatch):
    with card(monkeypatch):
        yield


def close(found, expected, tolerance=1e-9):
    assert found.device == CARD and expected.device.type == "cpu"
    gap = (found.cpu() - expected).abs().max()
    assert gap <= tolerance * max(1.0, float(expected.abs().max()))


def trained(of, rule, device, **options):
    return train_particles(of, rule, 3, 4, 2, 2, record=[0, 2], device=device, **options)


def same_runs(of, rule, **options):
    """On the card and on the CPU, to rounding: small differences grow where steps are signs."""
    found, expected = (trained(of, rule, device, **options) for device in ("cuda", "cpu"))
    for name in ("x", "p", "probe_x", "probe_p"):
        for k, t in getattr(expected, name).items():
            close(getattr(found, name)[k], t, 1e-7)
    close(found.loss, expected.loss, 1e-7)
    assert found.status == expected.status and found.notes == expected.notes
    return found, expected


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_particles_by_every_rule(name):
    same_runs(small_problem(ALL_BIASES, probes=2), RULES[name])


class Tanh(Units):
    """f(x_i) = W_out tanh(W_in x_i): of a family that autograd differentiates."""

    matrices: ClassVar = {"w_in": "n d", "w_out": "d n"}

    @staticmethod
    def unit_field(x, causal, w_in, w_out):
        return torch.tanh(x @ w_in.mT) @ w_out.mT


def by_autograd():
    units = Tanh(w_in=normal(4, 2, 3), w_out=normal(4, 3, 2, seed=1))
    return problem(Atoms(units))


PROBLEMS = {
    "by autograd": by_autograd,
    "perceptrons": lambda: problem(block(norm=None, sequential=True)),
    "gated, normed": lambda: problem(block(norm="layer")),
    "batches": lambda: problem(batch=2),
    "tied": lambda: problem(tied=True),
    "causal": lambda: small_problem(causal=True, probes=2),
    "weighted": weighted,
    "text": text,
    "text, tied ends": lambda: text(batch=3, tied_ends=True),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_particles_of_every_problem(name):
    same_runs(PROBLEMS[name](), ADAMW)


@pytest.mark.parametrize("of", [lambda: small_problem(probes=2), weighted])
def test_particles_carry_points(of):
    found, expected = same_runs(of(), ADAMW)
    points = normal(3, 3, seed=9)
    for name in ("flow", "flow_p", "flow_jacobian"):
        close(getattr(found, name)(2, points), getattr(expected, name)(2, points))


def test_a_run_goes_on_from_another_one():
    of = small_problem(probes=2)
    first = train_particles(of, ADAMW, 3, 4, 1, 2, device="cuda", keep_state=True)
    rest = train_particles(of, ADAMW, 3, 4, 2, 2, device="cuda", start=first)
    whole = train_particles(of, ADAMW, 3, 4, 2, 2, device="cuda")
    assert torch.equal(rest.x[2].cpu(), whole.x[2].cpu())


def test_a_language_model_says_its_logits():
    found, expected = same_runs(text(), ADAMW)
    ids = text().ids[:2, :3]
    close(found.logits(text(), 2, ids), expected.logits(text(), 2, ids))


LIMITS = {
    "march": (lambda: small_problem(probes=2), ADAMW, "march"),
    "picard": (lambda: small_problem(probes=2), ADAMW, "picard"),
    "rebalanced": (lambda: small_problem(), Rebalance(ADAMW, every=1), "picard"),
    "perceptrons": (lambda: problem(block(sequential=True)), ADAMW, "picard"),
    "tied, batches": (lambda: problem(batch=2, tied=True), ADAMW, "picard"),
    "weighted": (weighted, ADAMW, "picard"),
    "text": (text, ADAMW, "auto"),
}


def limit(of, rule, method, device):
    return solve_limit(of, rule, 1, 1e-1, [0, 1], device, method=method, elements=1, max_elements=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_the_limit(name):
    of, rule, method = LIMITS[name]
    found = limit(of(), rule, method, "cuda")
    expected = limit(of(), rule, "march" if method == "auto" else method, "cpu")
    for k in (0, 1):
        for variable in ("x", "p"):
            close(getattr(found, variable)(k, 0.3), getattr(expected, variable)(k, 0.3), 1e-3)
        for family, units in found.units(k, [0.25, 0.6]).items():
            close(units.packed, expected.units(k, [0.25, 0.6])[family].packed, 1e-3)
    assert found.error_at("theta", 1, [0.0, 0.4]).shape == (2,)
    if name != "text":
        points = normal(2, 3, seed=9)
        close(found.flow(1, 0.5, points), expected.flow(1, 0.5, points), 1e-3)
        close(found.flow_p(1, 0.5, points), expected.flow_p(1, 0.5, points), 1e-2)
    else:
        assert found.logits(of(), 1, of().ids[:2, :3]).device == CARD


@pytest.mark.slow
def test_tables_of_errors_and_the_predicted_fluctuation():
    of = small_problem(probes=2)
    tables = []
    for device in ("cuda", "cpu"):
        run = trained(of, ADAMW, device)
        whole = train_particles(of, ADAMW, 3, None, 2, record=[0, 2], device=device)
        solved = solve_limit(of, ADAMW, 2, 1e-1, [0, 2], device, elements=1, max_elements=4)
        predicted = predict_fluctuation(of, ADAMW, run, device)
        rows = bias_table(whole, solved) + error_table(run, whole, solved, predicted)
        tables.append(rows + weak_table(run, solved, solved.loss))
    assert len(tables[0]) == len(tables[1]) > 50
    for ours, theirs in zip(*tables, strict=True):
        assert ours["term"] == theirs["term"] if "term" in ours else True
        assert ours["error"] == pytest.approx(theirs["error"], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_a_field_its_transpose_and_autograd(causal):
    x, heads, c = normal(2, 3, 4, 3), random_heads((2,)), normal(2, 3, 4, 3, seed=1)
    there = on_card(x.clone()), heads.to("cuda"), on_card(c.clone())
    close(attention_field(there[0], there[1], causal), attention_field(x, heads, causal))
    found, expected = attention_vjp(*there, causal), attention_vjp(x, heads, c, causal)
    close(found[0], expected[0])
    close(found[1].packed, expected[1].packed)
    if not causal:
        leaf = there[0].detach().requires_grad_()
        attention_field(leaf, there[1]).backward(there[2])
        close(leaf.grad, expected[0])


# ------------------------------------------------------------------- what comes back


def test_a_sweep_of_picard_waits_once():
    of, counts = small_problem(), []
    for steps in (1, 2):
        with watched() as log:
            run = solve_limit(of, ADAMW, steps, 1e-1, [steps], "cuda", method="picard", elements=2)
        sweeps = sum(n for what, n in log.waits.items() if what.startswith("tolist picard"))
        counts.append((log.waits.total() - sweeps, sweeps, run.cost["field"], log))
    # a step more is a few sweeps more, and three waits on each of three grids: its end is looked
    # at, and rates are put there
    assert counts[1][1] > counts[0][1]
    assert counts[1][0] - counts[0][0] <= 3 * 3, counts[1][3]


def test_particles_come_back_for_what_is_asked_alone():
    """All that is recorded stays on the card."""
    with watched() as log:
        trained(small_problem(probes=2), ADAMW, "cuda")
    assert not [what for what in log.waits if "copy from the card" in what], log
