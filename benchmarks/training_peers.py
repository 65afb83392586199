"""Full-batch training steps of the particle transformer as others would write them.

Units are stacked over layers, q, k, v (L, R, H, m, d) and o (L, R, H, d, m): four parameters, six
with perceptrons, so that an optimizer has a few large tensors to go through and not 4 L small ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from ipslimit import AdamW, Problem
from ipslimit.model.branch import Branch

from . import peers


@dataclasses.dataclass
class Case:
    """A problem with its starting units, one copy a seed; `sizes` is (R, B, N, d, m, H, L)."""

    sizes: tuple[int, ...]
    problem: Problem
    rule: AdamW
    start: Branch  # leading dimensions (L, R)

    @property
    def residual(self) -> float:
        return 1.0 / self.sizes[6]

    @property
    def eps(self) -> list[float]:
        """eps by matrix of an optimizer that is fed raw gradients: the same trajectory."""
        families = self.start.families.values()
        eps = [self.rule.eps / (family.count * self.sizes[6]) for family in families]
        return [e for e, family in zip(eps, families, strict=True) for _ in family.parts()]

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
        self.parameters = [t.clone().requires_grad_() for t in self.arranged(case.matrices())]
        rule = case.rule
        groups: dict[float, list] = {}
        for parameter, eps in zip(self.parameters, self.arranged_eps(case.eps), strict=True):
            groups.setdefault(eps, []).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": some, "eps": eps} for eps, some in groups.items()],
            lr=rule.lr,
            betas=rule.betas,
            weight_decay=rule.weight_decay,
            fused=True,
        )
        self.x, self.targets = case.contexts(), case.problem.targets

    def arranged(self, matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters, of the units' matrices (L, R, H, ..)."""
        return matrices

    def arranged_eps(self, eps: list[float]) -> list[float]:
        return eps

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


class WideTrainer(TorchTrainer):
    """A causal Transformer as it is usually written, for the same numbers.

    Heads lie side by side in one matrix for queries, keys and values and one for the outputs, and
    so do the perceptrons in two of one MLP: (L, R, 3 H m, d), (L, R, d, H m), (L, R, H n, d) and
    (L, R, d, H n), without R where it is 1.

    Parameters
    ----------
    compiled : bool
        Whether torch.compile makes the layer.
    """

    def __init__(self, case: Case, compiled: bool):
        heads, perceptrons = case.start.families.values()
        self.rows, self.sizes = case.sizes[0], (heads.layout.m, perceptrons.layout.n)
        layer = functools.partial(peers.wide_block, head=heads.layout.m, units=perceptrons.count)
        super().__init__(case, peers.compiled(layer) if compiled else layer)
        if self.rows == 1:
            self.x = self.x[0]

    def arranged(self, matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        q, k, v, o, w_in, w_out = matrices
        rows = [torch.cat([t.flatten(2, 3) for t in (q, k, v)], 2), w_in.flatten(2, 3)]
        columns = [t.movedim(2, 3).flatten(3, 4).contiguous() for t in (o, w_out)]
        wide = [rows[0], columns[0], rows[1], columns[1]]
        return [t.squeeze(1) for t in wide] if self.rows == 1 else wide

    def arranged_eps(self, eps: list[float]) -> list[float]:
        return [eps[0], eps[3], eps[4], eps[5]]

    def step(self) -> torch.Tensor:
        return super().step().view(self.rows)

    def units(self) -> list[torch.Tensor]:
        wide = [t.detach() for t in self.parameters]
        if self.rows == 1:
            wide = [t.unsqueeze(1) for t in wide]
        qkv, o, w_in, w_out = wide
        m, n = self.sizes
        o, w_out = (t.unflatten(3, (-1, size)).movedim(3, 2) for t, size in ((o, m), (w_out, n)))
        heads = [t.unflatten(2, (-1, m)) for t in qkv.chunk(3, 2)]
        return [*heads, o, w_in.unflatten(2, (-1, n)), w_out]


class JaxTrainer:
    """lax.scan over the layers, optax.adamw, in one compiled step that reuses its buffers."""

    def __init__(self, case: Case):
        import optax

        jax = peers.import_jax()
        rule, residual = case.rule, case.residual
        (eps,) = set(case.eps)
        optimizer = optax.adamw(rule.lr, *rule.betas, eps=eps, weight_decay=rule.weight_decay)
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
    compiles = with_compile and not peers.compile_failure()
    if case.problem.causal:
        trainers = {"wide": WideTrainer(case, False)}
        return trainers | ({"compile": WideTrainer(case, True)} if compiles else {})
    around = peers.block_of if case.is_block else lambda field: field
    einsum = around(peers.einsum_field)
    trainers = {
        "einsum": TorchTrainer(case, einsum),
        "sdpa": TorchTrainer(case, around(peers.sdpa_field)),
    }
    if compiles:
        trainers["compile"] = TorchTrainer(case, peers.compiled(einsum))
    if peers.import_jax() and peers.has("optax"):
        trainers["jax"] = JaxTrainer(case)
    return trainers
