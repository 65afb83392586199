"""What a training run of particles holds, and runs of several seeds as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from .flow import flow, flow_jacobian, flow_p
from .predictions import run_logits
from .run_frame import run_frame
from .run_state import Kept, restored, state_of
from .training_problem import TrainingProblem
from .units import Units

if TYPE_CHECKING:
    from pandas import DataFrame

# What a run holds one of for every seed, whatever the law; and of its draws, where it has any.
PER_SEED = tuple(
    "loss diverged diverged_at x p probe_x probe_p probe_loss units states ends end_states".split()
)
DRAWS = ("unit_counts", "unit_atoms")


@dataclasses.dataclass
class ParticleRun(Kept):
    """Trajectories of `train_particles`.

    Attributes
    ----------
    x, p : dict step -> tensor (seeds, L+1, B, N, d)
        Hidden states and costates (N dl/dx, or (1 / omega_i) dl/dx_i, of O(1)) on the training
        contexts; with minibatches on those of batch k, `batches[k]`.
    probe_x, probe_p : dict step -> tensor (seeds, L+1, B', N, d)
        The same on the probe contexts; empty without probes.
    loss : tensor (seeds, steps+1)
        J before each step and after the last, of step k on batch k.
    probe_loss : dict step -> tensor (seeds,)
        J on the probes at the recorded steps, and at those of `evaluate`.
    units : dict step -> dict family -> Units, with leading dimensions (seeds, L)
    ends : dict step -> dict name -> tensor (seeds, rows, d)
        Of a `TokenProblem` the embedding, positions and readout; empty of another problem.
    unit_counts : dict family -> tensor (seeds, L, M) of int64
        Draws of each atom; without an entry for laws without atoms and for the whole law.
    unit_atoms : dict family -> tensor (seeds, L, K) of int64
        Which atom each stored unit started from.
    unit_numbers : dict family -> number
        H of every family; inf for the whole law.
    heads, counts, atoms
        The same of a run that has one family: `heads` step -> Heads (or its other units); counts
        and atoms None where there are none.
    states : dict family -> dict name -> tensor (seeds, L, ...)
        The rule's state after the last step, with keep_state alone: what `start` goes on from.
    end_states : dict name -> dict name -> tensor (seeds, d, rows)
        The rule's state of the ends, likewise.
    batches : dict step -> tensor (B,) of int64
        Which contexts batch k is of; empty where every step sees all of them.
    diverged : tensor (seeds,) of bool
        Seeds whose hidden states, costates or loss became NaN or infinite. From then on their
        heads are frozen, and what they give is recorded as it comes, non-finite. (A probe that
        overflows alone is recorded as it comes too, and does not flag the seed.)
    diverged_at : tensor (seeds,) of int64
        The training step at which that was seen; -1 where it was not.
    status : str
        "ok", or "n of m seeds diverged"; and where a callback stopped it, "stopped at step k".
    notes : list of str
        What the rule has to say of the run, such as symmetry pairs that could not be balanced, and
        the norm of tokens that come near to zero.
    least_size : float
        Least size of a token in front of the norm that any seed has seen; inf without a norm.
    last : int
        The step that was reached.
    cost : dict
        "field" and "vjp": kernel evaluations of one layer on all seeds (probes included).
    problem : Problem or TokenProblem
        That it is a run of.
    token_weights, probe_token_weights : tensor (n, N), or None
        omega of the problem's tokens; None where they are equal.
    depth, head_count, seeds, root_seed, residual_exponent
        Of the run; head_count is H, that of the first family where they differ.
    of : dict of str to str
        Which problem it is of, as texts by argument (`Problem.identity`); and of what units it is,
        where it is of a quadrature (nodes, nodes_seed) or of one of several processes (group).
    rule : str
        Which rule trained it, as a text (`rules.identity.rule_text`): its class and its fields, or
        "no identity: " and why there is none. Empty where that is not known.
    """

    depth: int
    unit_numbers: dict[str, float]
    seeds: tuple[int, ...]
    root_seed: int
    loss: torch.Tensor
    diverged: torch.Tensor
    diverged_at: torch.Tensor
    residual_exponent: float = 1.0
    rule: str = ""
    problem: TrainingProblem | None = dataclasses.field(default=None, repr=False)
    of: dict[str, str] = dataclasses.field(default_factory=dict)
    unit_counts: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    unit_atoms: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    x: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    p: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    probe_x: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    probe_p: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    probe_loss: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    units: dict[int, dict[str, Units]] = dataclasses.field(default_factory=dict)
    ends: dict[int, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    states: dict[str, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    end_states: dict[str, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    batches: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    least_size: float = float("inf")
    last: int = 0
    stopped: bool = False
    notes: list[str] = dataclasses.field(default_factory=list)
    cost: dict[str, int] = dataclasses.field(default_factory=lambda: {"field": 0, "vjp": 0})

    @property
    def status(self) -> str:
        count = int(self.diverged.sum())
        found = [f"{count} of {len(self.seeds)} seeds diverged"] if count else []
        found += [f"stopped at step {self.last}"] if self.stopped else []
        return ", ".join(found) or "ok"

    @property
    def token_weights(self) -> torch.Tensor | None:
        return self.problem.token_weights

    @property
    def probe_token_weights(self) -> torch.Tensor | None:
        return self.problem.probe_token_weights

    @property
    def head_count(self) -> float:
        return next(iter(self.unit_numbers.values()))

    @property
    def heads(self) -> dict[int, Units]:
        return {step: units[self._family] for step, units in self.units.items()}

    @property
    def counts(self) -> torch.Tensor | None:
        return self.unit_counts.get(self._family)

    @property
    def atoms(self) -> torch.Tensor | None:
        return self.unit_atoms.get(self._family)

    @property
    def _family(self) -> str:
        """The family of a run that has but one."""
        if len(self.unit_numbers) > 1:
            names = ", ".join(self.unit_numbers)
            raise AttributeError(
                f"heads, counts and atoms are of a run with one family; this one has {names}. Use "
                "units[k], unit_counts and unit_atoms."
            )
        return next(iter(self.unit_numbers))

    def logits(self, problem: TrainingProblem, k: int, ids: torch.Tensor) -> torch.Tensor:
        """What every seed's language model of a recorded step says of texts.

        Parameters
        ----------
        problem : TokenProblem
            That of the run.
        k : int
        ids : tensor (n, N') of int64
            The beginnings of texts, 1 <= N' <= N.

        Returns
        -------
        tensor, shape (seeds, n, N', V)
            Logits of the token that follows each.

        Raises
        ------
        TypeError, ValueError
            For other arguments, and for a run of another problem.
        """
        return run_logits(self, problem, k, ids)

    def flow(
        self, k: int, points: torch.Tensor, position: int | None = None, *, probe: bool = False
    ) -> torch.Tensor:
        """X_{r/L}(y): where the layers of a recorded step carry points that are no tokens.

        A point is moved by the measure over the tokens of a context, and moves nobody.

        Parameters
        ----------
        k : int
        points : tensor (n, d), or (B, n, d), or (seeds, B, n, d)
            For all contexts and seeds, or of each its own.
        position : int, optional
            Under a mask, of the points: they see tokens of positions up to it. By default that of
            the last token. Without a mask it changes nothing.
        probe : bool
            Take the probe contexts, and not those of batch k.

        Returns
        -------
        tensor, shape (seeds, L+1, B, n, d)
            At a token's own place and position it is the token's x, up to rounding.

        Raises
        ------
        TypeError, ValueError
            For other arguments, steps that are not recorded, a run that is one of several
            processes', and units of a user's that mix tokens.
        """
        return flow(self, k, points, position, probe)

    def flow_p(
        self, k: int, points: torch.Tensor, position: int | None = None, *, probe: bool = False
    ) -> torch.Tensor:
        """The costate P_{r/L} along `flow`, (seeds, L+1, B, n, d); arguments as there.

        That of a token of weight omega there, (1 / omega) dl/dx, as omega goes to 0: the
        derivative at the point, with the measure held fixed, of the flat derivative of the loss.

        Raises
        ------
        TypeError, ValueError
            As `flow`; and for a loss that is not of the weights of tokens.
        """
        return flow_p(self, k, points, position, probe)

    def flow_jacobian(
        self, k: int, points: torch.Tensor, position: int | None = None, *, probe: bool = False
    ) -> torch.Tensor:
        """dX_{r/L}/dy of `flow`, (seeds, L+1, B, n, d, d), with the measure held fixed.

        Row a has the derivative of component a. Arguments as of `flow`.
        """
        return flow_jacobian(self, k, points, position, probe)

    def to_frame(self, what: str = "loss") -> DataFrame:
        """The run as a tidy pandas DataFrame.

        Parameters
        ----------
        what : "loss", or "x", "p", "probe_x" or "probe_p"

        Returns
        -------
        DataFrame
            Always with L and H (and H_<family> where these differ), seed (its index) and step. Of
            the loss one row for every seed and step, (seeds * (last + 1)), with loss and probe_loss
            (J, in the units of the problem's loss; NaN where it was not taken) and diverged. Of
            tokens one row for every recorded step, seed, layer 0..L, context (its number in the
            problem; of the probes, in these) and token, with s = layer / L and the d components
            x_0, x_1, .. or p_0, p_1, .. (p as scaled here, N dl/dx).

        Raises
        ------
        ValueError
            For anything else, and for what the run did not record.
        ModuleNotFoundError
            Without pandas: pip install "ipslimit[frames]".
        """
        return run_frame(self, what)

    def state(self) -> dict:
        """All of the run but its problem, in plain types and tensors.

        Returns
        -------
        dict
            By the names of the attributes; units as (packed, weights). What
            `torch.load(..., weights_only=True)` reads after `torch.save`.
        """
        return state_of(self)

    @classmethod
    def from_state(cls, state: dict, problem: TrainingProblem) -> ParticleRun:
        """The run whose `state` this is, to the last bit.

        Parameters
        ----------
        state : dict
        problem : Problem or TokenProblem
            That of the run.

        Raises
        ------
        TypeError, ValueError
            For another problem, and for what is no state of a run.
        """
        return restored(cls, state, problem)

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name} {number:g}" for name, number in self.unit_numbers.items())
        return (
            f"ParticleRun({self.status}, depth={self.depth}, heads: {numbers}, "
            f"{len(self.seeds)} seeds, steps={sorted(self.x)})"
        )

    def flag(self, step: int, finite: torch.Tensor) -> None:
        """Mark the seeds that are not finite at this step, unless they were not before."""
        fresh = ~finite & ~self.diverged
        self.diverged |= fresh
        self.diverged_at.masked_fill_(fresh, step)


def empty_run(
    depth: int,
    heads: float | Mapping[str, float] | None,
    seeds: Iterable[int],
    steps: int,
    problem: TrainingProblem,
    device,
) -> ParticleRun:
    """A run with nothing in it yet, for `train_from` to fill; `heads` None is the whole law."""
    seeds = tuple(seeds)
    if not isinstance(heads, Mapping):
        number = float("inf") if heads is None else heads
        heads = dict.fromkeys(problem.block.laws, number)
    return ParticleRun(
        depth=depth,
        unit_numbers=dict(heads),
        seeds=seeds,
        root_seed=0,
        loss=torch.full((len(seeds), steps + 1), torch.nan, dtype=problem.dtype, device=device),
        diverged=torch.zeros(len(seeds), dtype=torch.bool, device=device),
        diverged_at=torch.full((len(seeds),), -1, device=device),
        problem=problem,
        of=dict(problem.identity),
    )


def joined(parts: Sequence[ParticleRun]) -> ParticleRun:
    """Runs of different seeds of one model as one run."""
    if len(parts) == 1:
        return parts[0]

    def join(values: list):
        if isinstance(values[0], dict):
            return {key: join([value[key] for value in values]) for key in values[0]}
        if isinstance(values[0], Units):
            packed = torch.cat([value.packed for value in values])
            weights = torch.cat([value.weights for value in values])
            return Units.from_packed(packed, weights, values[0].layout)
        return torch.cat(values)

    names = (*PER_SEED, *DRAWS)
    fields = {name: join([getattr(part, name) for part in parts]) for name in names}
    fields["seeds"] = tuple(seed for part in parts for seed in part.seeds)
    fields["cost"] = {name: sum(part.cost[name] for part in parts) for name in parts[0].cost}
    fields["least_size"] = min(part.least_size for part in parts)
    fields["notes"] = list(dict.fromkeys(note for part in parts for note in part.notes))
    return dataclasses.replace(parts[0], **fields)


def repeated(run: ParticleRun, seeds: tuple[int, ...]) -> ParticleRun:
    """The run of one seed as that of many, without copying it."""
    return _with_seeds(run, seeds, lambda t: t.expand(len(seeds), *t.shape[1:]))


def first_seed(run: ParticleRun) -> ParticleRun:
    """The run of the first seed alone, without copying it."""
    return _with_seeds(run, run.seeds[:1], lambda t: t[:1])


def _with_seeds(run: ParticleRun, seeds: tuple[int, ...], change: Callable) -> ParticleRun:
    def changed(value):
        if isinstance(value, dict):
            return {key: changed(item) for key, item in value.items()}
        return value.map(change) if isinstance(value, Units) else change(value)

    values = {name: changed(getattr(run, name)) for name in PER_SEED}
    return dataclasses.replace(run, seeds=seeds, **values)
