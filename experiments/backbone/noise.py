"""Training without anything to learn: what a run's numbers are by chance alone."""

from __future__ import annotations

from typing import Any

import torch

from ..text.training import TrainingLoop, seed_of_step

# Step -> root mean square of every parameter's gradient; None where there was none.
Sizes = dict[int, list[float | None]]


class MeasuredLoop(TrainingLoop):
    """A training run that keeps the sizes of its gradients.

    Attributes
    ----------
    sizes : Sizes
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.sizes: Sizes = {}

    def gradient(self, batch: Any, step: int) -> float:
        loss = super().gradient(batch, step)
        self.sizes[step] = [
            None if p.grad is None else float(p.grad.square().mean().sqrt())
            for p in self.model.parameters()
        ]
        return loss


class NoiseLoop(TrainingLoop):
    """The null of a run: the same steps on white noise of the sizes that its gradients had.

    The noise of a step depends on (seed, step) alone, so that a run begun anew has that of the run
    itself, as it has its batches. Sizes are those of the run at the same step: those that the noise
    would meet at its own points grow with every step that it goes astray, under SGD without end.

    Parameters
    ----------
    sizes : Sizes
        Of a `MeasuredLoop`.
    """

    def __init__(self, *arguments, sizes: Sizes, **options):
        super().__init__(*arguments, **options)
        self.sizes = sizes

    def gradient(self, batch: Any, step: int) -> float:
        """Leave noise in the parameters' gradients; returns 0, since nothing is learned."""
        if self.watchers:  # an optimizer that sees the inputs of layers sees the batch's
            super().gradient(batch, step)
        generator = torch.Generator().manual_seed(seed_of_step(self.seed, step, 3))
        for parameter, size in zip(self.model.parameters(), self.sizes[step], strict=True):
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.grad = None if size is None else noise.mul_(size)
        return 0.0
