"""Transformers with attention and perceptrons, written out naively, for the tests to compare with.

One model at a time, context by context and unit by unit, and torch differentiates it all: nothing
is shared with the package but the equations. Everything is float64.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

F64 = torch.float64
FAMILIES = ("attention", "perceptron")  # in the order in which a sequential layer takes them


def gelu(z):
    return z * 0.5 * (1.0 + torch.erf(z / math.sqrt(2.0)))


def gelu_tanh(z):
    return z * 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3)))


def relu(z):
    return torch.where(z > 0, z, torch.zeros_like(z))


def silu(z):
    return z / (1.0 + torch.exp(-z))


ACTIVATIONS = {f.__name__: f for f in (gelu, gelu_tanh, relu, silu, torch.tanh)}


def mean_pooled(x, y):
    """|mean_i x_i - y|^2 of one context (N, d)."""
    return ((x.mean(dim=0) - y) ** 2).sum()


@dataclasses.dataclass(frozen=True)
class NaiveBlock:
    """What a layer is; the units are given apart, {family: {name: (L, H, ...)}} with "weights".

    Tied layers have units (1, H, ...), which every layer uses.
    """

    depth: int
    norm: str | None = None
    norm_eps: float = 1e-5
    sequential: bool = False
    activation: str = "gelu"
    causal: bool = False
    tied: bool = False
    loss: Callable = mean_pooled

    def layer_of(self, r):
        return 0 if self.tied else r

    def normed(self, x):
        """The tokens (N, d) as the units of a layer see them."""
        if self.norm is None:
            return x
        rows = []
        for token in x:
            if self.norm == "layer":
                token = token - token.mean()
            rows.append(token / torch.sqrt((token**2).mean() + self.norm_eps))
        return torch.stack(rows)

    def unit_output(self, family, unit, z):
        """f(z_i; theta) of one unit {name: tensor} at the normed tokens z (N, d)."""
        return (self.head if family == "attention" else self.perceptron)(unit, z)

    def head(self, unit, z):
        q = z @ unit["q"].T + unit.get("bq", 0.0)
        k = z @ unit["k"].T + unit.get("bk", 0.0)
        v = z @ unit["v"].T + unit.get("bv", 0.0)
        seen = []
        for i in range(len(z)):
            last = i + 1 if self.causal else len(z)
            a = torch.exp(k[:last] @ q[i] / math.sqrt(len(unit["q"])))
            seen.append((a / a.sum()) @ v[:last])
        return torch.stack(seen) @ unit["o"].T + unit.get("bo", 0.0)

    def perceptron(self, unit, z):
        act = ACTIVATIONS[self.activation]
        hidden = z @ unit["w_in"].T + unit.get("b_in", 0.0)
        hidden = act(z @ unit["w_gate"].T) * hidden if "w_gate" in unit else act(hidden)
        return hidden @ unit["w_out"].T + unit.get("b_out", 0.0)

    def family_field(self, family, parts, x):
        """sum_u w_u f(norm(x_i); theta_u) of one layer's units of one family, at x (N, d)."""
        z = self.normed(x)
        weights = parts["weights"]
        fields = (self.unit_output(family, unit_at(parts, u), z) for u in range(len(weights)))
        return sum(w * field for w, field in zip(weights, fields))

    def layers(self, units, x):
        """The states of one context: at 0, 1/L, .., 1; and between the halves, if there are any."""
        states, between = [x], []
        for r in range(self.depth):
            parts = {f: at_layer(units[f], self.layer_of(r)) for f in units}
            if self.sequential:
                for family in FAMILIES:
                    x = x + self.family_field(family, parts[family], x) / self.depth
                    if family == "attention":
                        between.append(x)
            else:
                x = x + sum(self.family_field(f, parts[f], x) for f in units) / self.depth
            states.append(x)
        return states, between


def at_layer(parts, r):
    return {name: tensor[r] for name, tensor in parts.items()}


def unit_at(parts, u):
    return {name: tensor[u] for name, tensor in parts.items() if name != "weights"}


@dataclasses.dataclass
class Backward:
    """One forward and backward pass: what a step of training needs and what is compared."""

    loss: float
    x: torch.Tensor  # (L+1, B, N, d)
    p: torch.Tensor
    between: torch.Tensor | None  # (L, B, N, d)
    p_between: torch.Tensor | None
    g: dict[str, dict[str, torch.Tensor]]


def backward(block, units, contexts, targets):
    """J = (1/B) sum_b l, p = N B dJ/dx and g = L dJ/dtheta / w of each unit (tied: dJ/dtheta / w).

    A unit of weight 0 is not in J; its g is what (df/dtheta)^T p gives, see `by_costate`.
    """
    B, N, _ = contexts.shape
    leaves = {
        f: {n: t.detach().clone().requires_grad_(n != "weights") for n, t in parts.items()}
        for f, parts in units.items()
    }
    paths = [block.layers(leaves, x.clone().requires_grad_()) for x in contexts]
    J = sum(block.loss(states[-1], y) for (states, _), y in zip(paths, targets)) / B

    def both(which):
        """The states (layers, B, N, d), and their costates."""
        if not paths[0][which]:
            return None, None
        flat = [x for path in paths for x in path[which]]
        slopes = torch.autograd.grad(J, flat, retain_graph=True)
        n = len(paths[0][which])
        stacks = (
            torch.stack([torch.stack(list(seq[b * n : (b + 1) * n])) for b in range(B)], dim=1)
            for seq in (flat, slopes)
        )
        x, slope = (stack.detach() for stack in stacks)
        return x, N * B * slope

    x, p = both(0)
    between, p_between = both(1)
    found = Backward(float(J.detach()), x, p, between, p_between, {})
    for family, parts in leaves.items():
        names = [name for name in parts if name != "weights"]
        slopes = torch.autograd.grad(J, [parts[name] for name in names], retain_graph=True)
        scale = (1.0 if block.tied else block.depth) / parts["weights"]
        found.g[family] = {
            name: slope * scale.reshape(*scale.shape, *[1] * (slope.ndim - 2))
            for name, slope in zip(names, slopes)
        }
        for r, u in (parts["weights"] == 0).nonzero().tolist():
            alone = by_costate(block, family, at_layer(units[family], r), u, r, found)
            for name, g in alone.items():
                found.g[family][name][r, u] = g
    return found


def by_costate(block, family, parts, u, r, found):
    """g = (1/B) sum_b (1/N) sum_i (df/dtheta)^T p_bi of a unit of layer r; tied: mean over r."""
    unit = {name: t.clone().requires_grad_() for name, t in unit_at(parts, u).items()}
    total = 0.0
    layers = range(block.depth) if block.tied else [r]
    for s in layers:
        x, p = found.x[s], found.p[s + 1]
        if block.sequential and family == "attention":
            p = found.p_between[s]
        elif block.sequential:
            x = found.between[s]
        for tokens, costate in zip(x, p):
            output = block.unit_output(family, unit, block.normed(tokens))
            total = total + (output * costate).sum() / (len(layers) * len(x) * len(tokens))
    slopes = torch.autograd.grad(total, list(unit.values()))
    return dict(zip(unit, slopes))


@dataclasses.dataclass(frozen=True)
class NaiveSGD:
    momentum: float = 0.0
    weight_decay: float = 0.0

    def step(self, theta, g, lr, state, t):
        b = self.momentum * state.get("b", torch.zeros_like(g)) + g + self.weight_decay * theta
        return theta - lr * b, {"b": b}


@dataclasses.dataclass(frozen=True)
class NaiveAdamW:
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def step(self, theta, g, lr, state, t):
        b1, b2 = self.betas
        m = b1 * state.get("m", torch.zeros_like(g)) + (1 - b1) * g
        v = b2 * state.get("v", torch.zeros_like(g)) + (1 - b2) * g * g
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        theta = (1 - lr * self.weight_decay) * theta
        return theta - lr * m_hat / (torch.sqrt(v_hat) + self.eps), {"m": m, "v": v}


@dataclasses.dataclass
class Step:
    """The model after k updates, on the batch that makes the next one."""

    units: dict[str, dict[str, torch.Tensor]]
    pass_: Backward


def naive_training(block, units, contexts, targets, rule, rate, steps, batches=None):
    """Steps 0..steps. `rate(t, family, name, r)` is lr of update t = 1.. of a matrix of layer r.

    `batches[k]` are the contexts that make update k -> k+1, all of them by default.
    """
    units = {f: {n: t.detach().clone() for n, t in parts.items()} for f, parts in units.items()}
    states, done = {}, []
    for k in range(steps + 1):
        batch = list(range(len(contexts))) if batches is None else list(batches[k])
        now = backward(block, units, contexts[batch], targets[batch])
        done.append(Step(units, now))
        if k == steps:
            return done
        units = {f: dict(parts) for f, parts in units.items()}
        for family, gradient in now.g.items():
            for name, g in gradient.items():
                new = units[family][name].clone()
                for r in range(len(new)):
                    key = (family, name, r)
                    new[r], states[key] = rule.step(
                        new[r], g[r], rate(k + 1, family, name, r), states.get(key, {}), k + 1
                    )
                units[family][name] = new


# --- random blocks ------------------------------------------------------------------------------


def random_units(block, sizes, d, seed, biases=(), gated=False, m=2, n=3, scale=0.7, zero=False):
    """Units {family: {name: (L, H, ...)}} with `sizes` {family: H}; weights 1/H, or one of them 0.

    `biases` are the names of those to have, of either family.
    """
    gen = torch.Generator().manual_seed(seed)
    lead = 1 if block.tied else block.depth
    shapes = {
        "attention": {"q": (m, d), "k": (m, d), "v": (m, d), "o": (d, m)},
        "perceptron": {"w_in": (n, d), "w_out": (d, n)},
    }
    rows = {
        "attention": {"bq": m, "bk": m, "bv": m, "bo": d},
        "perceptron": {"b_in": n, "b_out": d},
    }
    units = {}
    for family, H in sizes.items():
        wanted = dict(shapes[family])
        if family == "perceptron" and gated:
            wanted["w_gate"] = (n, d)
        wanted |= {b: (rows[family][b],) for b in biases if b in rows[family]}
        units[family] = {
            name: scale * torch.randn(lead, H, *shape, generator=gen, dtype=F64)
            for name, shape in wanted.items()
        }
        weights = torch.full((lead, H), 1.0 / H, dtype=F64)
        if zero:
            weights[:, 0], weights[:, 1:] = 0.0, 1.0 / (H - 1)
        units[family]["weights"] = weights
    return units
