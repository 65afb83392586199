"""SBO-AdamW of blocks written out naively: z = W y + b with the mean of y over all rows."""

import dataclasses

import torch
from naive_blocks import F64, Step, at_layer, backward, unit_at

BIAS_OF = {"q": "bq", "k": "bk", "v": "bv", "o": "bo", "w_in": "b_in", "w_out": "b_out"}


@dataclasses.dataclass(frozen=True)
class NaiveSBO:
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    def direction(self, g, state, t):
        """Adam's step at learning rate 1; state: {"m": .., "v": ..}, filled anew."""
        b1, b2 = self.betas
        state["m"] = b1 * state.get("m", torch.zeros_like(g)) + (1 - b1) * g
        state["v"] = b2 * state.get("v", torch.zeros_like(g)) + (1 - b2) * g * g
        return state["m"] / (1 - b1**t) / (torch.sqrt(state["v"] / (1 - b2**t)) + self.eps)

    def moved(self, unit, g, means, states, t):
        """One unit after update t, from its gradient and the means of its matrices' inputs."""
        new = dict(unit)
        for name in unit:
            if name in BIAS_OF.values():
                continue
            bias, gradient = BIAS_OF.get(name), g[name]
            if bias in unit:
                gradient = gradient - torch.outer(g[bias], means[name])
            change = self.direction(gradient, states.setdefault(name, {}), t)
            change = -self.lr * (change + self.weight_decay * unit[name])
            new[name] = unit[name] + change
            if bias in unit:
                alone = self.direction(g[bias], states.setdefault(bias, {}), t)
                new[bias] = unit[bias] - self.lr * alone - change @ means[name]
        return new


def input_means(block, family, unit, states):
    """Means over all tokens of what each matrix of a unit multiplies, at states (B, N, d)."""
    seen = [block.normed(x) for x in states]
    inner, last, bias = ("v", "o", "bo") if family == "attention" else ("w_in", "w_out", "b_out")
    bare = {name: t for name, t in unit.items() if name != bias}
    bare[last] = torch.eye(len(unit[inner]), dtype=F64)  # what it multiplies comes out
    hidden = torch.cat([block.unit_output(family, bare, z) for z in seen]).mean(dim=0)
    return {name: hidden if name == last else torch.cat(seen).mean(dim=0) for name in BIAS_OF}


def naive_sbo_training(block, units, contexts, targets, rule, steps, batches=None):
    """As `naive_blocks.naive_training`, of layers that are not tied."""
    states, done = {}, []
    for k in range(steps + 1):
        batch = list(range(len(contexts))) if batches is None else list(batches[k])
        now = backward(block, units, contexts[batch], targets[batch])
        done.append(Step(units, now))
        moved = {f: {n: t.clone() for n, t in parts.items()} for f, parts in units.items()}
        for family, parts in units.items():
            second = block.sequential and family == "perceptron"
            for r, u in torch.ones_like(parts["weights"]).nonzero().tolist():
                x = now.between[r] if second else now.x[r]
                unit = unit_at(at_layer(parts, r), u)
                means = input_means(block, family, unit, x)
                g = {name: now.g[family][name][r, u] for name in unit}
                own = states.setdefault((family, r, u), {})
                for name, t in rule.moved(unit, g, means, own, k + 1).items():
                    moved[family][name][r, u] = t
        units = moved
    return done
