"""Generated attention inputs on both paths: the definition's answer, to rounding."""

import math

import pytest
import torch
from builders import naive_field, normal, parts_of, random_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from ipslimit import Heads, attention_field, attention_vjp
from ipslimit.cpu.dispatch import VARIABLE

F32, F64 = torch.float32, torch.float64
# Logits are about 10^exponent; each dtype up to near its end.
EXPONENTS = {F64: (-2, 0, 2, 4, 8, 16, 100, 200, 300), F32: (-2, 0, 2, 4, 8, 16, 30)}


@st.composite
def cases(draw):
    """Sizes, leading dimensions, dtype, scale, weights with zeros, and strange layouts of x."""
    size = st.integers(1, 4)
    B, N, d, m = draw(size), draw(st.integers(1, 7)), draw(size), draw(size)
    H = draw(st.sampled_from((1, 2, 3, 7, 8, 9, 17)))
    leads = draw(st.sampled_from((((), ()), ((2,), ()), ((), (2,)), ((2,), (2,)), ((3, 1), (2,)))))
    dtype = draw(st.sampled_from((F32, F64)))
    scale = 10.0 ** (draw(st.sampled_from(EXPONENTS[dtype])) / 2)
    seed = draw(st.integers(0, 10**6))
    biases = draw(st.sets(st.sampled_from(("bq", "bk", "bv", "bo"))))
    parts = random_parts(leads[1], H, m, d, tuple(sorted(biases)), seed)
    for name in ("q", "k", "bq", "bk"):
        if name in parts:
            parts[name] = parts[name] * scale
    zeros = torch.rand(H, generator=torch.Generator().manual_seed(seed)) < draw(st.floats(0, 1))
    parts["weights"] = torch.where(zeros, 0.0, parts["weights"])
    parts = {name: part.to(dtype) for name, part in parts.items()}
    # equal tokens tie: the rounding of their shares is multiplied by keys and queries, so no
    # arithmetic finds their derivatives where these are huge
    kinds = ("plain", "transposed", "strided", "context", *(("token",) if scale <= 100 else ()))
    kind = draw(st.sampled_from(kinds))
    x = _laid_out(kind, normal(*leads[0], B, N, d, seed=seed + 1, dtype=dtype))
    cotangent = normal(*draw(st.sampled_from(((B, N, d), (1, 1, d), (d,)))), dtype=dtype)
    return x, parts, cotangent, draw(st.booleans()), scale


def _laid_out(kind, x):
    """The same shape, not contiguous or broadcast."""
    if kind == "transposed":
        return x.mT.contiguous().mT
    if kind == "strided":
        return torch.stack([x, x], dim=-1).flatten(-2)[..., ::2]
    if kind == "token":
        return x[..., :1, :].expand(x.shape)
    return x[..., :1, :, :].expand(x.shape) if kind == "context" else x


def close(actual, expected, dtype, scale, what):
    """To rounding, which logits of size scale^2 amplify until the softmax is a hard maximum."""
    assert actual.shape == expected.shape, what
    assert torch.isfinite(actual).all(), what
    amplified = 1.0 + min(scale**2, 1e6)
    bound = 200 * torch.finfo(dtype).eps * amplified * max(1.0, float(expected.abs().max()))
    assert float((actual.double() - expected).abs().max()) <= bound, what


def definition(x, parts, cotangent, causal):
    """Field, dx and derivatives per unit weight by autograd of the definition in float64."""
    x = x.double().clone().requires_grad_()
    parts = {name: part.double().clone().requires_grad_() for name, part in parts.items()}
    field = naive_field(x, parts, causal)
    (field * cotangent.double()).sum().backward()
    return field.detach(), x.grad, {name: part.grad for name, part in parts.items()}


def check(case, path):
    x, parts, cotangent, causal, scale = case
    field, dx, dparts = definition(x, parts, cotangent, causal)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, path)
        heads = Heads(**parts)
        close(attention_field(x, heads, causal), field, x.dtype, scale, "field")
        found = attention_vjp(x, heads, cotangent, causal)
        close(found[0], dx, x.dtype, scale, "dx")
        derived = parts_of(found[1])
        # autograd through the face that records gradients gives what the hand-written one does
        leaf = x.clone().requires_grad_()
        (attention_field(leaf, heads, causal) * cotangent).sum().backward()
        close(leaf.grad, dx, x.dtype, scale, "autograd")
    if "bk" in derived:
        assert not derived.pop("bk").any()
    for name, value in derived.items():
        if name != "weights":  # per unit weight, so times the weight
            tail = value.ndim - parts["weights"].ndim
            value = value * parts["weights"][(..., *[None] * tail)]
        close(value, dparts[name], x.dtype, scale, name)


@pytest.mark.parametrize("path", ["eager", "fused"])
@given(cases())
def test_generated_inputs_give_the_definition(path, case):
    check(case, path)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["eager", "fused"])
@settings(max_examples=300)
@given(cases())
def test_many_generated_inputs_give_the_definition(path, case):
    check(case, path)


@pytest.mark.parametrize("path", ["eager", "fused"])
@pytest.mark.parametrize("causal", [False, True])
@settings(max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from((F32, F64)))
def test_logits_beyond_the_dtype_are_never_a_plausible_number(path, causal, seed, dtype):
    """Tokens of a context whose logits overflow are right or not finite; others are untouched."""
    largest = math.sqrt(torch.finfo(dtype).max)
    parts = {n: p.to(dtype) for n, p in random_parts(seed=seed).items()}
    x = normal(2, 5, 3, seed=seed + 1, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, path)
        clean = attention_field(x, Heads(**parts), causal)
        spoilt = x.clone()
        spoilt[1] *= 10 * largest
        field = attention_field(spoilt, Heads(**parts), causal)
    assert torch.equal(field[0], clean[0])
    with_room = {name: part.double() for name, part in parts.items()}
    if dtype == F32:  # float64 still holds these logits
        expected = naive_field(spoilt.double(), with_room, causal)[1]
        fine = torch.isfinite(field[1])
        error = ((field[1].double() - expected).abs() / expected.abs().max())[fine]
        assert (error <= 1e-5).all()
    else:
        assert not torch.isfinite(field[1]).all()
