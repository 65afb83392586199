"""Full-batch training steps of the particle transformer as others would write them.

Units are stacked over layers, q, k, v (L, R, H, m, d) and o (L, R, H, d, m): four parameters, six
with perceptrons, so that an optimizer has a few large tensors to go through and not 4 L small ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from ipslimit import AdamW, Problem
from ipslimit.model.branch import Branch

from . import peers


@dataclasses.dataclass
class Case:
    """A problem with its starting units, one copy a seed; `sizes` is (R, B, N, d, m, H, L).

    Where there are perceptrons, there are H of them too.
    """

    sizes: tuple[int, ...]
    problem: Problem
    rule: AdamW
    start: Branch  # leading dimensions (L, R)

    @property
    def residual(self) -> float:
        return 1.0 / self.sizes[6]

    @property
    def eps(self) -> float:
        """eps of an optimizer that is fed raw gradients: the same trajectory."""
        return self.rule.eps / (self.sizes[5] * self.sizes[6])

    def matrices(self) -> list[torch.Tensor]:
        units = self.start.families.values()
        return [t.contiguous() for family in units for t in family.parts().values()]

    @property
    def is_block(self) -> bool:
        return len(self.start.families) > 1

    def contexts(self) -> torch.Tensor:
        """(R, B, N, d)"""
        x = self.problem.contexts
        return x.expand(self.sizes[0], *x.shape).contiguous()


class TorchTrainer:
    """Autograd through the layers, torch.optim.AdamW.

    Parameters
    ----------
    field : callable
        One of `peers`; or its compiled form. Compiling the whole network instead would unroll
        its L layers, which takes minutes.
    """

    def __init__(self, case: Case, field: Callable):
        self.case, self.field = case, field
        self.parameters = [t.clone().requires_grad_() for t in case.matrices()]
        rule = case.rule
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=rule.lr,
            betas=rule.betas,
            eps=case.eps,
            weight_decay=rule.weight_decay,
            fused=True,
        )
        self.x, self.targets = case.contexts(), case.problem.targets

    def step(self) -> torch.Tensor:
        """One step; the loss of every seed before it."""
        x = self.x
        for layer in zip(*(t.unbind(0) for t in self.parameters), strict=True):
            x = x + self.case.residual * self.field(x, *layer)
        loss = (x.mean(-2) - self.targets).square().sum(-1).mean(-1)
        self.optimizer.zero_grad()
        loss.sum().backward()
        self.optimizer.step()
        return loss.detach()

    def units(self) -> list[torch.Tensor]:
        return [t.detach() for t in self.parameters]


class JaxTrainer:
    """lax.scan over the layers, optax.adamw, in one compiled step that reuses its buffers."""

    def __init__(self, case: Case):
        import optax

        jax = peers.import_jax()
        rule, residual = case.rule, case.residual
        optimizer = optax.adamw(rule.lr, *rule.betas, eps=case.eps, weight_decay=rule.weight_decay)
        targets = jax.numpy.asarray(case.problem.targets.numpy())
        field = peers.jax_block if case.is_block else peers.jax_field
        self.x = jax.numpy.asarray(case.contexts().numpy())

        def loss_of(parameters, x):
            def layer(x, units):
                return x + residual * field(x, *units), None

            x, _ = jax.lax.scan(layer, x, parameters)
            loss = ((x.mean(-2) - targets) ** 2).sum(-1).mean(-1)
            return loss.sum(), loss

        def step(parameters, state, x):
            gradient, loss = jax.grad(loss_of, has_aux=True)(parameters, x)
            updates, state = optimizer.update(gradient, state, parameters)
            return optax.apply_updates(parameters, updates), state, loss

        self.jax, self._step = jax, jax.jit(step, donate_argnums=(0, 1))
        # a copy: donated buffers must not be torch's
        self.parameters = [jax.numpy.array(t.numpy(), copy=True) for t in case.matrices()]
        self.state = optimizer.init(self.parameters)

    def step(self):
        self.parameters, self.state, loss = self._step(self.parameters, self.state, self.x)
        self.jax.block_until_ready((self.parameters, loss))
        return loss

    def units(self) -> list:
        return self.parameters


def make_trainers(case: Case, with_compile: bool = True) -> dict:
    """The peers that are here, by name."""
    around = peers.block_of if case.is_block else lambda field: field
    einsum = around(peers.einsum_field)
    trainers = {
        "einsum": TorchTrainer(case, einsum),
        "sdpa": TorchTrainer(case, around(peers.sdpa_field)),
    }
    if with_compile and not peers.compile_failure():
        trainers["compile"] = TorchTrainer(case, peers.compiled(einsum))
    if peers.import_jax() and peers.has("optax"):
        trainers["jax"] = JaxTrainer(case)
    return trainers
