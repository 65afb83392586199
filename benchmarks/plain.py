"""The particle transformer in plain PyTorch: H real heads in every layer, autograd, torch.optim.

What one would write without ipslimit to measure the same study: no kernel, no atoms' shortcut.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ipslimit import AdamW, Problem

from . import peers

# Seeds are batched up to this many heads a layer: more do not make a layer cheaper per head, and
# take memory for activations in proportion.
HEADS_TOGETHER = 256


class Transformer(nn.Module):
    """L layers of H heads for R seeds at once; residual branches scaled by 1/L."""

    def __init__(self, matrices: list[torch.Tensor]):
        super().__init__()
        self.matrices = nn.ParameterList(nn.Parameter(t.clone()) for t in matrices)
        self.depth = len(matrices[0])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """All hidden states from contexts (R, B, N, d)."""
        states = [x]
        for layer in zip(*(t.unbind(0) for t in self.matrices), strict=True):
            states.append(states[-1] + peers.sdpa_field(states[-1], *layer) / self.depth)
        return states


@dataclasses.dataclass
class PlainRun:
    """x, p: dict step -> (R, L+1, B, N, d); probe_x, probe_p the same; loss (R, steps + 1)."""

    x: dict
    p: dict
    probe_x: dict
    probe_p: dict
    loss: torch.Tensor


def seeds_together(heads: int, seeds: int) -> int:
    """How many seeds a good user would train in one batch."""
    return max(1, min(seeds, HEADS_TOGETHER // heads))


def draw_heads(problem: Problem, counts: torch.Tensor) -> list[torch.Tensor]:
    """q, k, v, o of H real heads (L, R, H, ...) from the draws of every atom, (R, L, M)."""
    seeds, depth, atoms = counts.shape
    index = torch.arange(atoms).repeat(seeds * depth)
    drawn = index.repeat_interleave(counts.flatten()).view(seeds, depth, -1).transpose(0, 1)
    return [getattr(problem.law.heads, name)[drawn].contiguous() for name in peers.MATRICES]


def train(
    problem: Problem, rule: AdamW, matrices: list[torch.Tensor], steps: int, record: tuple[int, ...]
) -> PlainRun:
    """Full-batch training of all seeds, with hidden states and costates at the recorded steps.

    The optimizer is fed raw gradients, hence eps / (L H).
    """
    depth, seeds, heads = matrices[0].shape[:3]
    model = Transformer(matrices)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=rule.lr,
        betas=rule.betas,
        eps=rule.eps / (depth * heads),
        weight_decay=rule.weight_decay,
        fused=True,
    )
    run = PlainRun({}, {}, {}, {}, torch.empty(seeds, steps + 1, dtype=problem.dtype))
    contexts = problem.contexts.expand(seeds, *problem.contexts.shape)
    for step in range(steps + 1):
        keep = step in record
        if keep and problem.probes:
            probes, targets = problem.probes
            states = model(_differentiable(probes.expand(seeds, *probes.shape), True))
            _, run.probe_x[step], run.probe_p[step] = _pass_back(states, targets, model, False)
        if step == steps and not keep:
            with torch.no_grad():
                run.loss[:, step] = _loss(model(contexts)[-1], problem.targets)
            break
        optimizer.zero_grad()
        states = model(_differentiable(contexts, keep))
        found = _pass_back(states, problem.targets, model, step < steps, keep)
        run.loss[:, step] = found[0]
        if keep:
            run.x[step], run.p[step] = found[1:]
        if step < steps:
            optimizer.step()
    return run


def _differentiable(x: torch.Tensor, wanted: bool) -> torch.Tensor:
    return x.clone().requires_grad_() if wanted else x


def _loss(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (x.mean(-2) - targets).square().sum(-1).mean(-1)


def _pass_back(states, targets, model, train: bool, keep: bool = True):
    """Loss, and if `keep` states and costates p = N dl_b/dx; leaves gradients if `train`."""
    loss = _loss(states[-1], targets)
    if not keep:
        loss.sum().backward()
        return loss.detach(), None, None
    wanted = [*model.parameters()] if train else []
    gradients = torch.autograd.grad(loss.sum(), [*states, *wanted])
    for parameter, gradient in zip(wanted, gradients[len(states) :], strict=True):
        parameter.grad = gradient
    contexts, tokens = states[0].shape[1:3]
    x = torch.stack([s.detach() for s in states], dim=1)
    p = contexts * tokens * torch.stack(gradients[: len(states)], dim=1)
    return loss.detach(), x, p
