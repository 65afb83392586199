"""Under torch.func and torch.inference_mode public functions work, or say what to do instead."""

import pytest
import torch
from builders import normal, random_heads, random_parts, small_problem
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from ipslimit import (
    SGD,
    AdamW,
    Heads,
    Perceptrons,
    Problem,
    TokenProblem,
    XavierUniform,
    attention_field,
    attention_vjp,
    train_particles,
)
from ipslimit.solvers import solve_limit

ONE = torch.ones((), dtype=torch.float64)
SEEN = {
    "plain": {},
    "causal": {"causal": True},
    "weights": {"token_weights": torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)},
    "positions": {"causal": True, "positions": torch.tensor([0, 2, 1, 1])},
}


@pytest.fixture(params=["eager", "fused"], autouse=True)
def path(request, monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", request.param)


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("seen", SEEN)
def test_vmap_is_one_more_leading_dimension(seen):
    heads, x, options = random_heads(lead=(2,)), normal(5, 2, 3, 4, 3), SEEN[seen]
    expected = torch.stack([attention_field(one, heads, **options) for one in x])
    assert_same(vmap(lambda one: attention_field(one, heads, **options))(x), expected)
    moved = x.movedim(0, 2)
    assert_same(vmap(lambda one: attention_field(one, heads, **options), 2)(moved), expected)


def test_vmap_over_heads_alone_and_with_tokens():
    parts, more, x = random_parts(), random_parts(lead=(5,), seed=3), normal(5, 2, 3, 4, 3)
    for name in ("q", "weights"):

        def field(part, x, name=name):
            return attention_field(x, Heads(**parts | {name: part}))

        expected = [field(part, x[0]) for part in more[name]]
        assert_same(vmap(field, (0, None))(more[name], x[0]), torch.stack(expected))
        expected = [field(*pair) for pair in zip(more[name], x)]
        assert_same(vmap(field)(more[name], x), torch.stack(expected))


def test_nested_vmap():
    heads, x = random_heads(), normal(2, 3, 2, 4, 3)
    found = vmap(vmap(lambda one: attention_field(one, heads)))(x)
    assert_same(found, attention_field(x, heads))


@pytest.mark.parametrize("seen", SEEN)
def test_vmap_of_the_transpose(seen):
    heads, options = random_heads(), SEEN[seen]
    x, cotangent = normal(5, 3, 4, 3), normal(5, 3, 4, 3, seed=1)

    def found(x, cotangent):
        dx, dheads, outputs = attention_vjp(x, heads, cotangent, with_outputs=True, **options)
        return dx, dheads.packed, dheads.weights, outputs

    given = [(x[0], c) for c in cotangent], [(one, cotangent[0]) for one in x], zip(x, cotangent)
    for pairs, dims in zip(given, ((None, 0), (0, None), (0, 0))):
        expected = [torch.stack(parts) for parts in zip(*(found(*pair) for pair in pairs))]
        each = (x[0] if dims[0] is None else x, cotangent[0] if dims[1] is None else cotangent)
        for one, other in zip(vmap(found, dims)(*each), expected, strict=True):
            assert_same(one, other)


def test_vmap_of_the_transpose_without_heads():
    heads, x, cotangent = random_heads(lead=(2,)), normal(3, 2, 3, 4, 3), normal(3, 4, 3, seed=1)
    found = vmap(lambda one: attention_vjp(one, heads, cotangent, with_heads=False)[0])(x)
    expected = [attention_vjp(one, heads, cotangent, with_heads=False)[0] for one in x]
    assert_same(found, torch.stack(expected))


@pytest.mark.parametrize("seen", SEEN)
def test_gradients_are_those_of_autograd(seen):
    parts, x, options = random_parts(), normal(3, 4, 3), SEEN[seen]

    def value(x, parts):
        return (attention_field(x, Heads(**parts), **options) ** 2).sum()

    leaves = [t.clone().requires_grad_() for t in (x, *parts.values())]
    expected = torch.autograd.grad(value(leaves[0], dict(zip(parts, leaves[1:]))), leaves)
    dx, dparts = grad(value, argnums=(0, 1))(x, parts)
    for found, wanted in zip((dx, *dparts.values()), expected, strict=True):
        assert_same(found, wanted)


def test_vjp_and_jacrev():
    heads, x, cotangent = random_heads(), normal(2, 4, 3), normal(2, 4, 3, seed=1)
    (dx,) = vjp(lambda x: attention_field(x, heads), x)[1](cotangent)
    assert_same(dx, attention_vjp(x, heads, cotangent)[0])
    expected = torch.autograd.functional.jacobian(lambda x: attention_field(x, heads), x)
    assert_same(jacrev(lambda x: attention_field(x, heads))(x), expected)


def test_a_gradient_for_each_of_several():
    parts, x = random_parts(), normal(5, 3, 4, 3)

    def value(q, x):
        return attention_field(x, Heads(**parts | {"q": q})).square().sum()

    found = vmap(grad(value), (None, 0))(parts["q"], x)
    assert_same(found, torch.stack([grad(value)(parts["q"], one) for one in x]))


class Layer(torch.nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = torch.nn.ParameterDict(parts)

    def forward(self, x):
        return attention_field(x, Heads(**self.parts))


def test_functional_call():
    model, other, x = Layer(random_parts()), random_parts(seed=5), normal(3, 4, 3)
    given = {f"parts.{name}": part for name, part in other.items()}
    assert_same(functional_call(model, given, (x,)), attention_field(x, Heads(**other)))
    found = grad(lambda given: functional_call(model, given, (x,)).sum())(given)
    model.parts = torch.nn.ParameterDict(other)
    model(x).sum().backward()
    for name, part in model.parts.items():
        assert_same(found[f"parts.{name}"], part.grad)


def test_perceptrons_too():
    units, x = Perceptrons(normal(4, 5, 3), normal(4, 3, 5, seed=1)), normal(6, 2, 4, 3)
    assert_same(vmap(units.field)(x), units.field(x))
    expected = torch.stack([grad(lambda x: units.field(x).sum())(one) for one in x])
    assert_same(vmap(grad(lambda x: units.field(x).sum()))(x), expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x: jvp(f, (x,), (x,)),
        lambda f, x: jacfwd(f)(x),
        lambda f, x: hessian(lambda x: f(x).sum())(x),
    ],
)
def test_forward_mode_is_refused(call):
    heads, x = random_heads(), normal(2, 4, 3)
    with pytest.raises(RuntimeError, match=r"no derivative in forward mode .* Use torch.func.vjp"):
        call(lambda x: attention_field(x, heads), x)


def test_a_level_of_forward_ad_gets_no_silent_zero():
    heads, x = random_heads(), normal(2, 4, 3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        for call in (attention_field, lambda x, h: attention_vjp(x, h, x)):
            with pytest.raises(RuntimeError, match="no derivative in forward mode"):
                call(dual, heads)
        assert_same(attention_field(x, heads), attention_field(x.clone(), heads))


def test_second_derivatives_are_refused():
    heads, x = random_heads(), normal(2, 4, 3)
    for value in (
        lambda x: attention_vjp(x, heads, x)[0].sum(),
        grad(lambda x: attention_field(x, heads).sum()),
    ):
        with pytest.raises(RuntimeError, match="a field can be differentiated once"):
            grad(lambda x: value(x).sum())(x)  # noqa: B023


@pytest.mark.parametrize("name", ["token_weights", "positions"])
def test_what_tokens_see_is_not_mapped_over(name):
    given = {"token_weights": torch.full((5, 4), 0.25, dtype=torch.float64)}
    given["positions"] = torch.arange(4).expand(5, 4)
    heads, x = random_heads(), normal(2, 4, 3)
    with pytest.raises(ValueError, match=f"^{name} must be the same for all .* from outside"):
        vmap(lambda one: attention_field(x, heads, True, **{name: one}))(given[name])


IDS = torch.tensor([[0, 1, 2, 3], [3, 1, 0, 2]])
REFUSED = {
    "train_particles": lambda a: train_particles(PROBLEM, SGD(lr=0.1), 2, 2, 1).loss.sum(),
    "solve_limit": lambda a: solve_limit(PROBLEM, SGD(lr=0.1), 1, 1e-1).loss.sum(),
    "Problem": lambda a: Problem(a * PROBLEM.contexts, PROBLEM.targets, PROBLEM.law).B,
    "TokenProblem": lambda a: TokenProblem(IDS, 4, XavierUniform(3, 2), 3).B,
    "flow": lambda a: RUN.flow(1, a * POINTS),
}
PROBLEM, POINTS = small_problem(), normal(2, 3)
RUN = train_particles(PROBLEM, SGD(lr=0.1), 2, 2, 1)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("transform", [grad, vmap, lambda f: lambda a: jvp(f, (a,), (a,))])
def test_training_inside_a_transform_is_refused_by_name(name, transform):
    given = torch.stack([ONE, ONE]) if transform is vmap else ONE
    with pytest.raises(RuntimeError, match=rf"{name}.* cannot be called inside a transform of"):
        transform(lambda a: a * REFUSED[name](a))(given)


def test_inference_mode_changes_no_bit():
    heads, x = random_heads(), normal(2, 4, 3)

    def answers():
        found = attention_vjp(x, heads, x, with_outputs=True)
        run = train_particles(PROBLEM, AdamW(lr=0.1), 4, 2, 2, keep_state=True)
        limit = solve_limit(PROBLEM, AdamW(lr=0.1, eps=0.1), 1, 1e-1, device="cpu")
        return [
            attention_field(x, heads),
            found[0],
            found[1].packed,
            found[2],
            run.loss,
            limit.loss,
        ]

    expected = answers()
    with torch.inference_mode():
        found = answers()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_what_was_made_in_inference_mode_can_be_used_outside():
    with torch.inference_mode():
        heads, x = random_heads(), normal(2, 4, 3)
        problem, start = (
            small_problem(),
            train_particles(PROBLEM, SGD(0.1), 2, 2, 1, keep_state=True),
        )
    y = x.clone().requires_grad_()
    attention_field(y, heads).sum().backward()
    again = random_heads()
    assert_same(y.grad, grad(lambda x: attention_field(x, again).sum())(normal(2, 4, 3)))
    assert torch.equal(train_particles(problem, SGD(0.1), 2, 2, 1).loss, start.loss)
    whole = train_particles(PROBLEM, SGD(0.1), 2, 2, 2)
    assert torch.equal(train_particles(PROBLEM, SGD(0.1), 2, 2, 2, start=start).loss, whole.loss)
