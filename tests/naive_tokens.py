"""A language model written out naively, for the tests to compare with: `naive_blocks` between ends.

One window at a time; torch differentiates it all: nothing is shared with the package but the
equations. Ends are {name: (rows, d)}; without "readout" the embedding reads, too.
"""

import dataclasses

import torch


@dataclasses.dataclass
class Pass:
    """One forward and backward pass."""

    loss: float
    x: torch.Tensor  # (L+1, B, N, d)
    p: torch.Tensor
    g: dict[str, dict[str, torch.Tensor]]  # of the units
    g_ends: dict[str, torch.Tensor]
    logits: torch.Tensor  # (B, N, V)


def forward(block, units, ends, window):
    """States (L+1, N, d), logits (N, V) and mean cross-entropy of one window (N + 1,)."""
    reader = ends.get("readout", ends["embedding"])
    tokens = [ends["embedding"][t] + ends["position"][i] for i, t in enumerate(window[:-1])]
    states, _ = block.layers(units, torch.stack(tokens))
    logits = block.normed(states[-1]) @ reader.T
    total = 0.0
    for i, label in enumerate(window[1:]):
        total = total + torch.log(torch.exp(logits[i]).sum()) - logits[i, label]
    return states, logits, total / (len(window) - 1)


def backward(block, units, ends, windows):
    """J, p = N B dJ/dx, g = L dJ/dtheta / w, and of the ends V dJ/dE, N dJ/dpos, V dJ/dU."""
    B, N = len(windows), windows.shape[1] - 1
    leaves = {
        f: {n: t.detach().clone().requires_grad_(n != "weights") for n, t in parts.items()}
        for f, parts in units.items()
    }
    own = {name: t.detach().clone().requires_grad_() for name, t in ends.items()}
    passes = [forward(block, leaves, own, window) for window in windows]
    J = sum(loss for _, _, loss in passes) / B
    flat = [x for states, _, _ in passes for x in states]
    slopes = torch.autograd.grad(J, flat, retain_graph=True)
    x, p = (
        torch.stack(
            [torch.stack(list(t[b * len(passes[0][0]) :][: len(passes[0][0])])) for b in range(B)],
            1,
        )
        for t in (flat, slopes)
    )
    found = Pass(
        float(J.detach()),
        x.detach(),
        N * B * p,
        {},
        {},
        torch.stack([l for _, l, _ in passes]).detach(),
    )
    for family, parts in leaves.items():
        names = [name for name in parts if name != "weights"]
        slopes = torch.autograd.grad(J, [parts[n] for n in names], retain_graph=True)
        scale = (1.0 if block.tied else block.depth) / parts["weights"]
        found.g[family] = {
            name: slope * scale.reshape(*scale.shape, *[1] * (slope.ndim - 2))
            for name, slope in zip(names, slopes)
        }
    for name, slope in zip(own, torch.autograd.grad(J, list(own.values()))):
        found.g_ends[name] = slope * len(own[name])
    return found


@dataclasses.dataclass
class Step:
    """The model after k updates, on the batch that makes the next one."""

    units: dict[str, dict[str, torch.Tensor]]
    ends: dict[str, torch.Tensor]
    pass_: Pass


def naive_token_training(block, units, ends, windows, rule, rate, steps, batches=None):
    """Steps 0..steps; `rate(t, family, name, r)` as of `naive_training`, family "ends" of the ends.

    The rule acts on every matrix of every unit, and on every row of the ends, by itself.
    """
    units = {f: {n: t.detach().clone() for n, t in parts.items()} for f, parts in units.items()}
    ends = {name: t.detach().clone() for name, t in ends.items()}
    states, done = {}, []

    def moved(key, theta, g, t, lr):
        new, states[key] = rule.step(theta, g, lr, states.get(key, {}), t)
        return new

    for k in range(steps + 1):
        batch = range(len(windows)) if batches is None else batches[k]
        now = backward(block, units, ends, windows[list(batch)])
        done.append(Step(units, ends, now))
        if k == steps:
            return done
        units = {f: dict(parts) for f, parts in units.items()}
        for family, gradient in now.g.items():
            for name, g in gradient.items():
                units[family][name] = torch.stack(
                    [
                        moved((family, name, r), theta, g[r], k + 1, rate(k + 1, family, name, r))
                        for r, theta in enumerate(units[family][name])
                    ]
                )
        ends = {
            name: moved((name,), t, now.g_ends[name], k + 1, rate(k + 1, "ends", name, 0))
            for name, t in ends.items()
        }
