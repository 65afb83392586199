"""The rule SBOAdamW: its identities, an independent form of it, and both models trained by it."""

import pytest
import torch
from builders import (
    BIASES,
    F64,
    assert_to_rounding,
    naive_field,
    normal,
    random_heads,
    random_parts,
    small_atoms,
    small_problem,
)
from contract import ROUNDING, run_from

from ipslimit import AdamW, Heads, SBOAdamW, train_particles
from ipslimit.solvers import solve_limit

SETTINGS = {"lr": 0.05, "betas": (0.9, 0.99), "eps": 0.1, "weight_decay": 0.1}
RULES = [
    SBOAdamW(**SETTINGS),
    SBOAdamW(**SETTINGS, centre="ema", centre_decay=0.7),
    SBOAdamW(**SETTINGS, centre="fixed"),
    SBOAdamW(**SETTINGS, transport=True),
    SBOAdamW(**SETTINGS, centre="ema", centre_decay=0.7, transport=True),
]
EVERY_RULE = pytest.mark.parametrize("rule", RULES, ids=repr)
BIASED = ("q", "k", "v", "o")


def biased_problem(**changed):
    return small_problem(small_atoms(biases=BIASES), **changed)


def inputs(lead=(2,), d=3, m=2, H=3, seed=0):
    """Mean inputs (..., d + m, H) whose first rows are the same for every head."""
    tokens = normal(*lead, d, 1, seed=seed).expand(*lead, d, H)
    return torch.cat([tokens, normal(*lead, m, H, seed=seed + 1)], dim=-2)


def centre_of(name, means, d=3):
    """The mean input of one matrix, (..., H, columns)."""
    return (means[..., d:, :] if name == "o" else means[..., :d, :]).mT


# ------------------------------------------------------------------------- identities


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_the_centre_moves_by_the_step_of_the_bias_alone(weight_decay):
    """db + dW c = -lr u_b, whatever W does."""
    rule = SBOAdamW(0.05, (0.9, 0.99), 0.1, weight_decay)
    heads, bias_m, bias_v = random_heads((2,)), {}, {}
    state = rule.init(heads)
    for k in range(1, 6):
        g, means = random_heads((2,), seed=10 + k), inputs(seed=30 + k)
        before = heads
        heads, state = rule.update(heads, state, g, k, means)
        for name in BIASED:
            b = f"b{name}"
            bias_m[b] = 0.9 * bias_m.get(b, 0.0) + 0.1 * getattr(g, b)
            bias_v[b] = 0.99 * bias_v.get(b, 0.0) + 0.01 * getattr(g, b).square()
            u = bias_m[b] / (1 - 0.9**k) / ((bias_v[b] / (1 - 0.99**k)).sqrt() + 0.1)
            moved = (getattr(heads, name) - getattr(before, name)) @ centre_of(name, means)[
                ..., None
            ]
            gap = getattr(heads, b) - getattr(before, b) + moved[..., 0] + 0.05 * u
            assert float(gap.abs().max()) < 1e-14  # a few roundings of terms of size 1


def test_the_shape_gradient_is_the_gradient_at_a_fixed_value_at_the_centre():
    """With plain Adam steps u, the first step of W is that of AdamW on g_W - g_b c^T."""
    heads, g, means = random_heads((2,)), random_heads((2,), seed=1), inputs()
    moved, _ = RULES[0].update(heads, RULES[0].init(heads), g, 1, means)
    for name in BIASED:
        product = getattr(g, f"b{name}")[..., None] * centre_of(name, means)[..., None, :]
        getattr(g, name).sub_(product)
    adamw = AdamW(**SETTINGS)
    expected, _ = adamw.update(heads, adamw.init(heads), g, 1)
    for name in BIASED:
        assert_to_rounding(getattr(moved, name), getattr(expected, name), 10, name)


def test_a_matrix_without_a_bias_is_left_to_adamw():
    heads = random_heads((2,), biases=("bv",))
    adamw, state, other = AdamW(**SETTINGS), RULES[0].init(heads), AdamW(**SETTINGS).init(heads)
    one = two = heads
    for k in range(1, 4):
        g = random_heads((2,), biases=("bv",), seed=k)
        one, state = RULES[0].update(one, state, g, k, inputs(seed=k))
        two, other = adamw.update(two, other, g, k)
    for name in "qko":
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    assert not torch.equal(one.v, two.v)


def test_centres_are_the_mean_its_moving_average_or_the_first_one():
    heads, means = random_heads((2,)), [inputs(seed=k) for k in range(4)]
    ema = means[0]
    for mean in means[1:]:
        ema = 0.7 * ema + 0.3 * mean
    for rule, expected in ((RULES[1], ema), (RULES[2], means[0]), (RULES[3], means[3])):
        state = rule.init(heads)
        for k, mean in enumerate(means, start=1):
            heads, state = rule.update(heads, state, random_heads((2,), seed=k), k, mean)
        assert_to_rounding(state["centre"], expected, 10, repr(rule))


def test_transport_moves_the_first_moment_to_what_the_new_centre_would_have_made_it():
    """m_W is linear in the gradients: with one centre used throughout it is the same."""
    rule, heads = SBOAdamW(0.05, transport=True), random_heads((2,))
    state, plain = rule.init(heads), SBOAdamW(0.05).init(heads)
    gradients, last = [random_heads((2,), seed=k) for k in range(1, 5)], inputs(seed=9)
    for k, g in enumerate(gradients, start=1):
        _, state = rule.update(heads, state, g, k, inputs(seed=k) if k < 4 else last)
        _, plain = SBOAdamW(0.05).update(heads, plain, g, k, last)
    assert_to_rounding(state["m"], plain["m"], 100)
    assert float((state["v"] - plain["v"]).abs().max()) > 1e-4  # which has no such map


def test_without_biases_it_is_refused_and_without_means_too():
    with pytest.raises(ValueError, match=r"must have biases.*biases=True"):
        train_particles(small_problem(small_atoms(biases=())), RULES[0], 2, 3, 1)
    heads = random_heads()
    with pytest.raises(TypeError, match="means must be given"):
        RULES[0].update(heads, RULES[0].init(heads), heads, 1)


# ------------------------------------------------------------------- independent forms


class Network:
    """L layers of H heads as torch parameters; `means` are found on the way forward."""

    def __init__(self, start, problem):
        self.problem, self.scale = problem, 1 / start.lead[0]
        self.layers = [
            {name: t.detach().clone().requires_grad_() for name, t in start[r, 0].parts().items()}
            for r in range(start.lead[0])
        ]
        self.weights = start.weights[0, 0]

    def loss(self):
        """The loss whose gradient is g of every head, and the mean inputs of every layer."""
        x, means = self.problem.contexts, []
        for layer in self.layers:
            means.append(self.means(x, layer))
            x = x + self.scale * naive_field(x, layer | {"weights": self.weights})
        total = self.problem.loss(x, self.problem.targets).mean()
        return total / (self.scale * self.weights[0]), means

    def means(self, x, layer):
        """Mean inputs (H, columns) of every matrix, from the definition."""
        with torch.no_grad():
            q, k, v = (
                torch.einsum("hmd,bnd->bhnm", layer[n], x) + layer[f"b{n}"][:, None] for n in "qkv"
            )
            z = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v
            tokens = x.mean((0, 1)).expand(q.shape[1], -1)
            return {"q": tokens, "k": tokens, "v": tokens, "o": z.mean((0, 2))}

    def gradients(self):
        for layer in self.layers:
            for t in layer.values():
                t.grad = None
        loss, means = self.loss()
        loss.backward()
        return means


def sbo_by_hand(network, steps, lr, betas, eps, weight_decay, centre, centre_decay, transport):
    """SBO-AdamW on torch parameters, matrix by matrix."""
    m, v, c = {}, {}, {}
    for k in range(1, steps + 1):
        for r, (layer, means) in enumerate(zip(network.layers, network.gradients())):
            for n in BIASED:
                key, W, b = (r, n), layer[n], layer[f"b{n}"]
                old = c.get(key, means[n])
                c[key] = {
                    "batch": means[n],
                    "fixed": old,
                    "ema": centre_decay * old + (1 - centre_decay) * means[n],
                }[centre]
                gb = torch.zeros_like(b) if n == "k" else b.grad  # autograd's is rounding
                gW = W.grad - gb[:, :, None] * c[key][:, None, :]
                if transport and k > 1:
                    moved = (c[key] - old)[:, None, :]
                    m[key, "W"] = m[key, "W"] - m[key, "b"][:, :, None] * moved
                u = {}
                for which, g in (("W", gW), ("b", gb)):
                    m[key, which] = betas[0] * m.get((key, which), 0) + (1 - betas[0]) * g
                    v[key, which] = betas[1] * v.get((key, which), 0) + (1 - betas[1]) * g**2
                    root = (v[key, which] / (1 - betas[1] ** k)).sqrt()
                    u[which] = m[key, which] / (1 - betas[0] ** k) / (root + eps)
                with torch.no_grad():
                    dW = -lr * u["W"] - lr * weight_decay * W
                    W += dW
                    b += -lr * u["b"] - torch.einsum("hij,hj->hi", dW, c[key])


def equal_heads(depth=3, H=4):
    parts = random_parts((depth, 1), H, scale=0.7)
    parts.pop("weights")
    return Heads(**parts)


@EVERY_RULE
@pytest.mark.parametrize("path", ["eager", "fused"])
def test_particles_train_as_a_network_with_sbo_written_by_hand(rule, path, monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", path)
    problem, start, steps = biased_problem(), equal_heads(), 6
    run = run_from(start, problem, rule, steps)
    network = Network(start, problem)
    settings = {n: getattr(rule, n) for n in ("centre", "centre_decay", "transport")}
    sbo_by_hand(network, steps, **SETTINGS, **settings)
    for r, layer in enumerate(network.layers):
        for name, expected in layer.items():
            actual = getattr(run.heads[steps][0, r], name)
            assert_to_rounding(actual, expected.detach(), ROUNDING, f"{name} of layer {r}")


def test_adamw_on_centred_affine_parameters_recentred_each_step_is_sbo():
    """z = S (y - c) + beta, with beta += S (c' - c) before each gradient: 20 steps to 1e-10."""
    problem, start, steps = biased_problem(), equal_heads(), 20
    network = Network(start, problem)
    S = [
        {n: layer[n].detach().clone().requires_grad_() for n in BIASED} for layer in network.layers
    ]
    c = [{n: torch.zeros_like(layer[n][:, 0, :]) for n in BIASED} for layer in S]
    beta = [
        {n: layer[f"b{n}"].detach().clone().requires_grad_() for n in BIASED}
        for layer in network.layers
    ]
    decayed = [t for layer in S for t in layer.values()]
    free = [t for layer in beta for t in layer.values()]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": free, "weight_decay": 0.0}], **SETTINGS
    )

    def write_affine():
        """W = S and b = beta - S c, as functions of S and beta."""
        network.layers = [
            {n: S[r][n] for n in BIASED}
            | {f"b{n}": beta[r][n] - torch.einsum("hij,hj->hi", S[r][n], c[r][n]) for n in BIASED}
            for r in range(len(S))
        ]

    for _ in range(steps):
        write_affine()
        with torch.no_grad():
            for r, means in enumerate(network.loss()[1]):
                for n in BIASED:
                    beta[r][n] += torch.einsum("hij,hj->hi", S[r][n], means[n] - c[r][n])
                    c[r][n] = means[n]
        write_affine()
        optimizer.zero_grad()
        network.loss()[0].backward()
        for layer in beta:
            layer["k"].grad.zero_()  # exactly zero; autograd's is rounding
        optimizer.step()
    write_affine()
    run = run_from(start, problem, SBOAdamW(**SETTINGS), steps)
    for r, layer in enumerate(network.layers):
        for name, expected in layer.items():
            gap = getattr(run.heads[steps][0, r], name) - expected.detach()
            assert float(gap.abs().max()) < 1e-10, (r, name)


# ------------------------------------------------------------------- in both models


@pytest.mark.parametrize("rule", [SBOAdamW(0.03, eps=0.1), SBOAdamW(0.03, eps=0.1, centre="ema")])
def test_both_schemes_find_the_same_limit(rule):
    problem = biased_problem(probes=2)
    runs = [
        solve_limit(problem, rule, 3, 1e-7, device="cpu", method=name)
        for name in ("march", "picard")
    ]
    s = torch.linspace(0, 1, 33, dtype=F64)
    for name in ("x", "p", "probe_x", "probe_p"):
        one, two = (getattr(run, name)(3, s) for run in runs)
        assert float((one - two).abs().max()) <= sum(run.error for run in runs), name
