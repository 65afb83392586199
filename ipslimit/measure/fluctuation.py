"""The limiting law of the fluctuation, predicted without a fit.

The state after k training steps is a smooth function of the layer weights w_{r,a}. Its
linearisation at the true weights, applied to the multinomial noise of a run's own draws, predicts
that run's fluctuation path by path: x^{L,H} - x^{L,inf} is about Dx [n/H - w]. As L H grows,
rms(measured) / rms(predicted) -> 1 at every training step: a check of the constant, not only of
the exponent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from ..checks import require_int, resolve_device, shown
from ..model.draws import layer_depths
from ..model.particles import train_from
from ..model.problem_identity import require_same_problem
from ..model.rules import Rule
from ..model.rules.identity import require_same_rule, rule_text
from ..model.run_arguments import require_problem
from ..model.run_state import RECORDED
from ..model.runs import ParticleRun, empty_run
from ..model.training_problem import TrainingProblem
from ..model.units import Units
from .token_sets import sets_of, token_mean

# The derivative is a central difference at this multiple of the noise itself: small enough that the
# next order is a hundredth of what it is at the noise, large enough for the roundings of float32.
STEP = 0.1
# At full size the response may depart from its linear part by this much of it, path by path, before
# it is called not linear. Then measured / predicted lies within as much of 1 (triangle inequality);
# a departure of next order, even in the noise, moves it by half the square of this.
LINEAR_TOLERANCE = 0.1

Noise = dict[str, torch.Tensor]  # of the weights, by family


@dataclasses.dataclass
class PredictedFluctuation:
    """Predicted x^{L,H} - x^{L,inf} of every seed, from `predict_fluctuation`.

    Attributes
    ----------
    x, p, probe_x, probe_p : dict step -> tensor (seeds, L+1, B, N, d)
    nonlinearity : dict (name, step) -> float
        How far the response at the size of the noise departs from its linear part: rms over
        seeds, layers, contexts and tokens (by their weights) of the departure over that of the
        linear part, for the noise itself (the run) or its mirror image, whichever departs more.
    """

    x: dict[int, torch.Tensor]
    p: dict[int, torch.Tensor]
    probe_x: dict[int, torch.Tensor]
    probe_p: dict[int, torch.Tensor]
    nonlinearity: dict[tuple[str, int], float]

    @property
    def status(self) -> str:
        """ "linear", or "not linear" if some nonlinearity exceeds 10 %."""
        return "not linear" if self._beyond() else "linear"

    @property
    def message(self) -> str:
        """The status, and what departs how far from its linear part at full size."""
        found = self._beyond() or self.nonlinearity
        parts = [f"{name} at step {step} by {100 * v:.2g} %" for (name, step), v in found.items()]
        return f"{self.status}: at the size of the noise the response departs from its linear " + (
            f"part in {', '.join(parts)}"
        )

    def _beyond(self) -> dict[tuple[str, int], float]:
        return {key: value for key, value in self.nonlinearity.items() if not is_linear(value)}


def is_linear(nonlinearity: float) -> bool:
    """Whether a response that departs so far from its linear part is called linear."""
    return nonlinearity <= LINEAR_TOLERANCE  # not so where it is not finite


def train_weights(
    problem: TrainingProblem,
    rule: Rule,
    weights: Mapping[str, torch.Tensor],
    record: Sequence[int],
    device: object,
    **options: object,
) -> ParticleRun:
    """The model with all atoms in every layer, at weights of any kind: by family (runs, L, M).

    At weights n / H that is the particle model with n draws of each atom, at those of the law the
    whole-law model. Trains to the last step of `record`; `options` are those of `train_from`.
    """
    families = {}
    for name, law in problem.block.laws.items():
        atoms, own = law.heads.to(problem.dtype), weights[name].transpose(0, 1)
        depth, count = own.shape[:2]
        packed = atoms.packed.expand(depth, *atoms.packed.shape)
        layers = Units.from_packed(packed, atoms.weights.expand(depth, -1), law.layout)
        packed = law.along(layers, layer_depths(depth)).packed.unsqueeze(1)
        packed = packed.expand(depth, count, *packed.shape[2:])
        families[name] = Units.from_packed(packed, own.to(atoms.weights), law.layout)
    start = problem.block.branch(families)
    run = empty_run(depth, None, range(count), max(record), problem, device)
    return train_from(start, problem, rule, max(record), record, run, device=device, **options)


def predict_fluctuation(
    problem: TrainingProblem,
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
    TypeError, ValueError
        For a run without draws of atoms, of another problem, or one that another rule trained.

    Notes
    -----
    The linear part is a central difference at 0.1 of the noise. It is judged at the noise itself:
    there the response is the run's own fluctuation, for draws from atoms are weights n / H, and so
    costs nothing. One more run, at the mirrored noise, says the same of draws as likely that were
    not taken: rare large responses that one side misses, such as flips of near-sign steps, show on
    the other. Costs three runs with all M atoms in every layer, whatever H, and one of one seed.
    """
    require_problem(problem, rule)
    if not isinstance(run, ParticleRun):
        raise TypeError(f"run must be a ParticleRun; got {shown(run)}.")
    device = resolve_device(device)
    if seeds_together is not None:
        require_int("seeds_together", seeds_together)
    require_same_rule("rule", rule_text(rule), "run", run.rule)
    require_same_problem(
        "problem", problem.identity, "run", run.of, ("group", "nodes", "nodes_seed")
    )
    laws = problem.block.laws
    if not problem.block.exact or set(run.unit_counts) != set(laws):
        raise ValueError(
            "run must come from a law with atoms (its draws are the noise); got a run without "
            "counts. Use ipslimit.Atoms."
        )
    if not run.x:
        raise ValueError(
            "run must have recorded a step; got one without, that was stopped before. Let it go "
            "on from there (start=), or pass record=."
        )
    recorded = tuple(run.x)
    weights_of = {name: law.heads.weights.to(problem.dtype) for name, law in laws.items()}
    noise = {
        name: counts.double() / run.unit_numbers[name] - laws[name].heads.weights.double().cpu()
        for name, counts in run.unit_counts.items()
    }

    def each(change: Callable, *noises: Noise) -> Noise:
        return {name: change(*(noise[name] for noise in noises)) for name in laws}

    def perturbed(noise: Noise) -> ParticleRun:
        weights = {name: w + noise[name].to(w) for name, w in weights_of.items()}  # (seeds, L, M)
        options = {"residual_exponent": run.residual_exponent, "record_heads": False}
        return train_weights(problem, rule, weights, recorded, device, **options)

    def respond(noise: Noise) -> dict[tuple[str, int], torch.Tensor]:
        """The linear part, and the response to the mirrored noise."""
        pair = perturbed(each(lambda z: torch.cat([STEP * z, -STEP * z]), noise))
        count = len(next(iter(noise.values())))
        linear = {
            (name, step): (t[:count] - t[count:]) / (2 * STEP)
            for name in RECORDED
            for step, t in getattr(pair, name).items()
        }
        del pair  # before the next one needs the room
        mirrored = perturbed(each(torch.neg, noise))
        return {
            key: torch.stack([t, getattr(mirrored, key[0])[key[1]] - exact[key]])
            for key, t in linear.items()
        }

    undisturbed = perturbed(each(lambda z: torch.zeros_like(z[:1]), noise))
    exact = {(name, step): t for name in RECORDED for step, t in getattr(undisturbed, name).items()}
    together = seeds_together or len(run.seeds)
    starts = range(0, len(run.seeds), together)
    parts = [respond(each(lambda z, i=i: z[i : i + together], noise)) for i in starts]
    answer, nonlinearity = {name: {} for name in RECORDED}, {}
    for name, step in exact:
        linear, mirrored = torch.cat([part.pop((name, step)) for part in parts], dim=1)
        # layer by layer in memory, however the run's seeds were put together: sums round with that
        own = getattr(run, name)[step].to(linear.device).transpose(0, 1).contiguous()
        own = own.transpose(0, 1) - exact[name, step]
        weights, *_ = sets_of(run, name, step).values()
        size, *gaps = (_size(t, weights) for t in (linear, own - linear, mirrored + linear))
        gap = max(gaps) if all(map(math.isfinite, gaps)) else math.nan
        nonlinearity[name, step] = gap / size if size else gap
        answer[name][step] = linear
    return PredictedFluctuation(**answer, nonlinearity=nonlinearity)


def _size(t: torch.Tensor, weights: torch.Tensor | None) -> float:
    """Root mean square of a component of t (seeds, L+1, B, N, d)."""
    square = t.square()
    mean = square.mean() if weights is None else token_mean(square.mean(-1), weights).mean()
    return float(mean.sqrt())
