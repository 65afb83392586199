"""The limiting law of the fluctuation, predicted without a fit.

The state after k training steps is a smooth function of the layer weights w_{r,a}. Its
linearisation at the true weights, applied to the multinomial noise of a run's own draws, predicts
that run's fluctuation path by path: x^{L,H} - x^{L,inf} is about Dx [n/H - w]. As L H grows,
rms(measured) / rms(predicted) -> 1 at every training step: a check of the constant, not only of
the exponent.
"""

from __future__ import annotations

import dataclasses

import torch

from .heads import Heads
from .laws import Atoms
from .particles import ParticleRun, empty_run, train_from
from .problem import Problem
from .rules import Rule
from .rules.identity import require_same_rule, rule_text

# The derivative is a central difference at these multiples of the noise itself.
STEP, CHECK_STEP = 0.1, 0.01
# The two may differ by this much before the response is called not linear (with a small eps,
# Adam's step is nearly a sign).
LINEAR_TOLERANCE = 0.05


@dataclasses.dataclass
class PredictedFluctuation:
    """Predicted x^{L,H} - x^{L,inf} of every seed, from `predict_fluctuation`.

    Attributes
    ----------
    x, p, probe_x, probe_p : dict step -> tensor (seeds, L+1, B, N, d)
    nonlinearity : dict (name, step) -> float
        Relative rms difference between the predictions at the two difference steps.
    status : str
        "linear", or "not linear" if some nonlinearity exceeds 5 %.
    """

    x: dict[int, torch.Tensor]
    p: dict[int, torch.Tensor]
    probe_x: dict[int, torch.Tensor]
    probe_p: dict[int, torch.Tensor]
    nonlinearity: dict[tuple[str, int], float]

    @property
    def status(self) -> str:
        # not (<=), so that a non-finite response is not called linear
        linear = all(value <= LINEAR_TOLERANCE for value in self.nonlinearity.values())
        return "linear" if linear else "not linear"


def predict_fluctuation(
    problem: Problem,
    rule: Rule,
    run: ParticleRun,
    device: object = "cpu",
    seeds_together: int | None = None,
) -> PredictedFluctuation:
    """Linear response of the whole-law model to the weights that `run` drew.

    Parameters
    ----------
    problem, rule
        Those of `run`.
    run : ParticleRun
        Of a law with atoms. Its depth, residual exponent, draws and recorded steps are used.
    seeds_together : int, optional
        Seeds computed at a time, all by default: less memory, the same bits.

    Raises
    ------
    ValueError
        For a run without draws of atoms, or one that another rule trained.

    Notes
    -----
    Costs four runs with all M atoms in every layer, whatever H.
    """
    if run.counts is None or not isinstance(problem.law, Atoms):
        raise ValueError(
            "run must come from a law with atoms (its draws are the noise); got a run without "
            "counts. Use ipslimit.Atoms."
        )
    require_same_rule("rule", rule_text(rule), "run", run.rule)
    names = ("x", "p", "probe_x", "probe_p")
    recorded = tuple(run.x)
    law = problem.law.heads.to(problem.dtype)
    noise = run.counts.double() / run.head_count - problem.law.heads.weights.double().cpu()

    def respond(scale: float, noise: torch.Tensor) -> dict[str, dict[int, torch.Tensor]]:
        shifts = torch.cat([scale * noise, -scale * noise]).to(law.weights)  # (2 seeds, L, M)
        weights = (law.weights + shifts).transpose(0, 1)
        packed = law.packed.expand(*weights.shape[:2], *law.packed.shape)
        start = Heads.from_packed(packed, weights, law.layout)
        pair = empty_run(
            run.depth, run.head_count, range(len(shifts)), recorded[-1], problem, device
        )
        train_from(
            start, problem, rule, recorded[-1], recorded, pair, run.residual_exponent, device,
            record_heads=False,
        )  # fmt: skip
        count = len(noise)
        return {
            name: {
                step: (t[:count] - t[count:]) / (2 * scale)
                for step, t in getattr(pair, name).items()
            }
            for name in names
        }

    def respond_all(scale: float) -> dict[str, dict[int, torch.Tensor]]:
        parts = [respond(scale, part) for part in noise.split(seeds_together or len(noise))]
        if len(parts) == 1:
            return parts[0]
        return {
            name: {step: torch.cat([part[name][step] for part in parts]) for step in parts[0][name]}
            for name in names
        }

    answer, check = respond_all(STEP), respond_all(CHECK_STEP)
    nonlinearity = {}
    for name in names:
        for step, t in answer[name].items():
            size = float(t.square().mean().sqrt())
            gap = float((t - check[name][step]).square().mean().sqrt())
            nonlinearity[name, step] = gap / size if size else gap
    return PredictedFluctuation(**answer, nonlinearity=nonlinearity)
