"""Norms in front of a branch, and the branch behind them."""

import math

import pytest
import torch
from builders import F64, normal, random_heads
from own_units import Tanh

from ipslimit.model.branch import Branch
from ipslimit.model.norm import Norm
from ipslimit.model.rules import input_means

KINDS = ["rms", "layer"]


def naive(kind, x, eps):
    if kind == "layer":
        x = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)


def two_families(lead=(), d=3):
    perceptrons = Tanh(w_in=normal(*lead, 5, 2, d, seed=3), w_out=normal(*lead, 5, d, 2, seed=4))
    return {"attention": random_heads(lead, d=d), "perceptron": perceptrons}


@pytest.mark.parametrize("kind", KINDS)
def test_norm_and_its_transpose_are_the_formula_and_its_autograd(kind):
    x, dy = normal(2, 3, 4).requires_grad_(), normal(2, 3, 4, seed=1)
    norm = Norm(kind, 1e-3)
    expected = naive(kind, x, 1e-3)
    torch.testing.assert_close(norm(x.detach()), expected.detach(), rtol=1e-14, atol=1e-14)
    (dx,) = torch.autograd.grad(expected, x, dy)
    torch.testing.assert_close(norm.pull(x.detach(), dy), dx, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_the_transpose_of_a_norm_passes_a_taylor_test(kind):
    norm, x, v, dy = Norm(kind), normal(3, 5), normal(3, 5, seed=1), normal(3, 5, seed=2)
    slope = float((norm.pull(x, dy) * v).sum())
    gaps = [float((dy * (norm(x + t * v) - norm(x))).sum()) - t * slope for t in (1e-2, 1e-3)]
    assert 80 < gaps[0] / gaps[1] < 125


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_normed_to_the_same_bits_whoever_is_beside_it(kind):
    x = normal(37, 3, 5)
    for part in (slice(4, 5), slice(3, 20)):
        assert torch.equal(Norm(kind)(x)[part], Norm(kind)(x[part]))
        assert torch.equal(Norm(kind).pull(x, x)[part], Norm(kind).pull(x[part], x[part]))


def test_norms_are_refused_by_name():
    with pytest.raises(ValueError, match=r"^norm must be one of rms, layer; got 'batch'"):
        Norm("batch")
    with pytest.raises(ValueError, match=r"^norm_eps must be"):
        Norm("rms", 0.0)


def test_small_tokens_are_warned_of_below_ten_roots_of_eps():
    norm = Norm("rms", 1e-4)
    assert norm.warning(0.11) is None and norm.warning(math.inf) is None
    assert "raise norm_eps" in norm.warning(0.09)
    assert Norm("rms", 0.1).warning(0.3) is None  # of slope 3 at most
    assert torch.allclose(norm.sizes(torch.tensor([[3.0, 4.0]])), torch.tensor(12.5).sqrt())
    assert float(Norm("layer").sizes(torch.tensor([[5.0, 5.0, 5.0]]))) == 0.0


@pytest.mark.parametrize("norm", [None, Norm("rms", 0.01), Norm("layer", 0.01)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_branch_is_the_sum_of_its_families_behind_the_norm(norm, causal):
    families = two_families()
    branch = Branch(families, norm)
    x, p = normal(2, 4, 3).requires_grad_(), normal(2, 4, 3, seed=7)
    y = x if norm is None else naive(norm.kind, x, norm.eps)
    parts = {name: units.packed.clone().requires_grad_() for name, units in families.items()}
    total = sum(u.with_packed(parts[name]).field(y, causal) for name, u in families.items())
    torch.testing.assert_close(branch.field(x.detach(), causal), total.detach())
    dx, *grads = torch.autograd.grad(total, [x, *parts.values()], p)
    mine, sums, means = branch.vjp(x.detach(), p, causal, True, False)
    torch.testing.assert_close(mine, dx, rtol=1e-11, atol=1e-12)
    for units, grad, own in zip(families.values(), grads, sums.values(), strict=True):
        torch.testing.assert_close(own * units.weights, grad, rtol=1e-11, atol=1e-12)
    assert means is None and branch.vjp(x.detach(), p, causal, False)[1:] == (None, None)


def test_mean_inputs_of_a_branch_are_those_of_the_normed_tokens():
    heads, norm = random_heads(), Norm("rms", 0.01)
    x, p = normal(2, 4, 3), normal(2, 4, 3, seed=7)
    _, _, means = Branch({"attention": heads}, norm).vjp(x, p, with_means=True)
    *_, outputs = heads.vjp(norm(x), p, with_outputs=True)
    assert torch.equal(means["attention"], input_means(norm(x), outputs, 1 / 8))
    assert means["attention"].dtype == F64


def test_a_sequential_branch_has_a_stage_for_every_family_and_the_same_field():
    families, x = two_families(), normal(2, 4, 3)
    parallel, sequential = Branch(families), Branch(families, sequential=True)
    assert len(parallel.stages) == 1 and len(sequential.stages) == 2
    assert [list(stage.families) for stage in sequential.stages] == [["attention"], ["perceptron"]]
    assert torch.equal(parallel.field(x), sequential.field(x))
    assert "sequential" in repr(sequential)
