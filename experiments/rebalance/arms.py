"""What is compared: ways to start, rescale and balance, run along one order of the data."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Annotated

import numpy as np
import torch

from ipslimit.optim import SAGGS, FoundPairs, GaugeAdamW, find_pairs, rescale_pair

from ..frame.fields import Checked, Count, Real, Some
from ..text.training import Trainer, held_out_loss

# beyond these float32 moments, which scale with the square, leave their range
Factor = Annotated[float, Real(2.0**-20, 2.0**20)]


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes
    ----------
    name, label : str
        In files, and in the table.
    resumed : bool
        From a trained checkpoint, or from the initial model.
    rescaled : bool
        Every pair is multiplied by the factor before the first step.
    moments : bool
        The optimizer's moments are transformed with it.
    saggs : "" or "hard" or "soft"
    at_start : bool
        SAGGS balances before the first step too.
    exact : bool
        GaugeAdamW goes on in the place of AdamW.
    beside : tuple of str
        The arms with which it is compared, besides the plain run.
    aside : bool
        Run in the first variant alone.
    """

    name: str
    label: str
    resumed: bool = True
    rescaled: bool = True
    moments: bool = True
    saggs: str = ""
    at_start: bool = True
    exact: bool = False
    beside: tuple[str, ...] = ()
    aside: bool = False

    @property
    def control(self) -> str:
        """The plain run that it is compared with."""
        return CONTROL.name if self.resumed else BASE.name

    @property
    def treated(self) -> dict:
        """What is done to a model, in plain types: all that the arm's numbers depend on."""
        names = ("resumed", "rescaled", "moments", "saggs", "at_start", "exact")
        return {name: getattr(self, name) for name in names}


# The model trained from its own initial law to the end of the schedule. It leaves the checkpoints
# and is itself the control: of starts up to where these end, of resumed runs after a checkpoint.
BASE = Arm("base", "plain run from the start", resumed=False, rescaled=False)
CONTROL = Arm("control", "control", rescaled=False)
ARMS = (
    Arm("rescaled", "rescaled"),
    Arm("untouched", "rescaled, moments untouched", moments=False, aside=True),
    Arm("rescaled-hard", "rescaled, hard SAGGS", saggs="hard", beside=("rescaled", "control-hard")),
    Arm("rescaled-soft", "rescaled, soft SAGGS", saggs="soft", beside=("rescaled",)),
    Arm(
        "rescaled-late",
        "rescaled, soft, not at restart",
        saggs="soft",
        at_start=False,
        beside=("rescaled",),
        aside=True,
    ),
    Arm("rescaled-exact", "rescaled, GaugeAdamW", exact=True, beside=("control-exact",)),
    Arm("control-hard", "control, hard SAGGS", rescaled=False, saggs="hard"),
    Arm("control-soft", "control, soft SAGGS", rescaled=False, saggs="soft"),
    Arm("control-exact", "control, GaugeAdamW", rescaled=False, exact=True),
    Arm("start", "imbalanced start", resumed=False),
    # to rounding, this is also what hard SAGGS makes of the initial model itself
    Arm("start-hard", "imbalanced, hard SAGGS", resumed=False, saggs="hard", beside=("start",)),
    Arm("start-soft", "imbalanced, soft SAGGS", resumed=False, saggs="soft", beside=("start",)),
    Arm(
        "start-exact",
        "imbalanced, GaugeAdamW",
        resumed=False,
        exact=True,
        beside=("start",),
        aside=True,
    ),
)
KINDS = ("qk", "vo", "mlp")  # of pairs
# Held-out windows that show whether what is done before the first step changes the loss.
PROBES = 32
BY_NAME = {arm.name: arm for arm in (BASE, CONTROL, *ARMS)}


@dataclasses.dataclass(frozen=True)
class Treatment(Checked):
    """How strongly pairs are rescaled, and how SAGGS is set."""

    factor: Factor = 16.0
    """A <- factor A, B <- B / factor, for every pair. Powers of two change no mantissa."""
    every: Count = 50
    """Steps T between balancings."""
    damping: Annotated[float, Real(0.0, 1.0, include_low=False)] = 0.5
    """Damping of soft SAGGS; hard has 1."""
    kinds: Annotated[tuple[str, ...], Some(KINDS)] = KINDS
    """Pairs that are rescaled and balanced: query/key, value/output, the two of the MLP."""
    per: str = "matrix"
    """One pair for each matrix, or for each (key) head: matrix or head."""

    def check(self) -> None:
        super().check()
        if self.per not in ("matrix", "head"):
            raise ValueError(f"per must be matrix or head; got {self.per!r}. Use per=matrix.")

    def key(self, arm: Arm, factor: float) -> dict:
        """What an arm's numbers depend on, and nothing else."""
        key = {"pairs": list(self.kinds), "per": self.per} | arm.treated
        if arm.rescaled:
            key["factor"] = factor
        if arm.saggs:
            key |= {"every": self.every, "damping": self.damping_of(arm)}
        return key

    def damping_of(self, arm: Arm) -> float:
        return 1.0 if arm.saggs == "hard" else self.damping


def run_arm(
    arm: Arm,
    trainer: Trainer,
    treatment: Treatment,
    factor: float,
    steps: int,
    held_out: np.ndarray,
) -> dict:
    """Treat the trainer's model as the arm says and train it on.

    Returns
    -------
    dict
        losses: of every step; held_out: nats a token at the end, None if diverged; restart_change:
        of the held-out loss by all that was done before the first step; left: of SAGGS, the part of
        the log-ratios of norms that one balancing leaves, None where the pairs are balanced;
        diverged: bool; seconds: of a step and of a balancing (not reproducible).
    """
    pairs = find_pairs(trainer.model, treatment.per, treatment.kinds)
    probes = held_out[:PROBES]
    before = held_out_loss(trainer.model, probes)
    if arm.rescaled:
        for pair in pairs:
            optimizer = trainer.optimizer if arm.moments else None
            rescale_pair(pair, factor, optimizer)
    if arm.saggs:
        _wrap(arm, trainer, pairs, treatment)
    if arm.exact:
        _replace(trainer, pairs)
    found = {"restart_change": abs(held_out_loss(trainer.model, probes) - before)}
    if arm.saggs:
        change, found["left"] = _balanced(trainer, pairs, probes, before)
        if arm.at_start:
            found["restart_change"] = max(found["restart_change"], change)
    began = time.perf_counter()
    losses = trainer.run(steps)
    seconds = {"step": (time.perf_counter() - began) / len(losses)}
    after = held_out_loss(trainer.model, held_out) if math.isfinite(losses[-1]) else math.nan
    diverged = not math.isfinite(after)
    if arm.saggs:
        seconds["balance"] = _seconds_of_balancing(trainer.optimizer)
    return found | {
        "losses": losses,
        "held_out": None if diverged else after,
        "diverged": diverged,
        "seconds": seconds,
    }


def _wrap(arm: Arm, trainer: Trainer, pairs: FoundPairs, treatment: Treatment) -> None:
    damping = treatment.damping_of(arm)
    trainer.optimizer = SAGGS(trainer.optimizer, pairs, treatment.every, damping, arm.at_start)


def _replace(trainer: Trainer, pairs: FoundPairs) -> None:
    """Go on by GaugeAdamW, from the groups and averages of AdamW."""
    exact = GaugeAdamW([{"params": g["params"]} for g in trainer.optimizer.param_groups], pairs)
    exact.load_state_dict(trainer.optimizer.state_dict())
    trainer.optimizer = exact


def _balanced(
    trainer: Trainer, pairs: FoundPairs, held_out: np.ndarray, before: float
) -> tuple[float, float | None]:
    """How the loss moves when SAGGS balances, and the part of the imbalance that it leaves.

    The model is put back, bit by bit.
    """
    kept, first = trainer.checkpoint(), _imbalance(pairs)
    trainer.optimizer.balance()
    change, left = abs(held_out_loss(trainer.model, held_out) - before), _imbalance(pairs)
    trainer.restore(kept)
    return change, left / first if first > 1e-3 else None


@torch.no_grad()
def _imbalance(pairs: FoundPairs) -> float:
    """Mean size of the log-ratios of Frobenius norms, by norms of its own."""
    logs = [[float(torch.log(side.matrix.block.double().norm())) for side in p] for p in pairs]
    return float(np.mean([abs(first - second) for first, second in logs]))


def _seconds_of_balancing(optimizer: SAGGS) -> float:
    """The fastest of a few; after training, where it can do no harm."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        optimizer.balance()
        times.append(time.perf_counter() - began)
    return min(times)
