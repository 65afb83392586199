"""What is compared: ways to start, rescale and balance, run along one order of the data."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Annotated

import numpy as np

from ipslimit.optim import SAGGS, FoundPairs, GaugeAdamW, find_pairs, rescale_pair

from ..frame.fields import Checked, Count, Real, Some
from ..text.training import Trainer, held_out_loss


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes
    ----------
    name, label : str
        In files, and in the table.
    resumed : bool
        From the trained checkpoint, or from the initial model.
    rescaled : bool
        Every pair is multiplied by the factor before the first step.
    moments : bool
        The optimizer's moments are transformed with it.
    saggs : "" or "hard" or "soft"
    at_start : bool
        SAGGS balances before the first step too.
    exact : bool
        GaugeAdamW goes on in the place of AdamW.
    fair : str
        The arm that differs from this one by the rescaling alone, if that is not the control.
    """

    name: str
    label: str
    resumed: bool = True
    rescaled: bool = True
    moments: bool = True
    saggs: str = ""
    at_start: bool = True
    exact: bool = False
    fair: str = ""

    @property
    def control(self) -> str:
        return "control" if self.resumed else "base"


# The model trained from its own initial law: the checkpoint, and the control of other starts.
BASE = Arm("base", "initial model", resumed=False, rescaled=False)
ARMS = (
    Arm("control", "control", rescaled=False),
    Arm("rescaled", "rescaled"),
    Arm("untouched", "rescaled, moments untouched", moments=False),
    Arm("rescaled-hard", "rescaled, then hard SAGGS", saggs="hard", fair="control-hard"),
    Arm("rescaled-soft", "rescaled, then soft SAGGS", saggs="soft"),
    Arm("rescaled-late", "rescaled, soft, not at restart", saggs="soft", at_start=False),
    Arm("control-hard", "control, then hard SAGGS", rescaled=False, saggs="hard"),
    Arm("rescaled-exact", "rescaled, then GaugeAdamW", exact=True, fair="control-exact"),
    Arm("control-exact", "control, then GaugeAdamW", rescaled=False, exact=True),
    Arm("start", "imbalanced start", resumed=False),
    # to rounding, this is also what hard SAGGS makes of the initial model itself
    Arm("start-hard", "imbalanced start, hard SAGGS", resumed=False, saggs="hard"),
    Arm("start-exact", "imbalanced start, GaugeAdamW", resumed=False, exact=True),
)
KINDS = ("qk", "vo", "mlp")  # of pairs
# Held-out windows that show whether what is done before the first step changes the loss.
PROBES = 32
BY_NAME = {arm.name: arm for arm in (BASE, *ARMS)}


@dataclasses.dataclass(frozen=True)
class Treatment(Checked):
    """How strongly pairs are rescaled, and how SAGGS is set."""

    # beyond these float32 moments, which scale with the square, leave their range
    factor: Annotated[float, Real(2.0**-20, 2.0**20)] = 16.0
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


def run_arm(
    arm: Arm, trainer: Trainer, treatment: Treatment, steps: int, held_out: np.ndarray
) -> dict:
    """Treat the trainer's model as the arm says and train it on.

    Returns
    -------
    dict
        losses: of every step; held_out: nats a token at the end, None if diverged; restart_change:
        of the held-out loss by all that was done before the first step; diverged: bool; seconds:
        of a step and of a balancing (not reproducible).
    """
    pairs = find_pairs(trainer.model, treatment.per, treatment.kinds)
    probes = held_out[:PROBES]
    before = held_out_loss(trainer.model, probes)
    if arm.rescaled:
        for pair in pairs:
            optimizer = trainer.optimizer if arm.moments else None
            rescale_pair(pair, treatment.factor, optimizer)
    if arm.saggs:
        _wrap(arm, trainer, pairs, treatment)
    if arm.exact:
        _replace(trainer, pairs)
    change = abs(held_out_loss(trainer.model, probes) - before)
    if arm.saggs and arm.at_start:
        change = max(change, _change_by_balancing(trainer, probes, before))
    began = time.perf_counter()
    losses = trainer.run(steps)
    seconds = {"step": (time.perf_counter() - began) / len(losses)}
    diverged = not math.isfinite(losses[-1])
    after = math.nan if diverged else held_out_loss(trainer.model, held_out)
    diverged = diverged or not math.isfinite(after)
    if arm.saggs:
        seconds["balance"] = _seconds_of_balancing(trainer.optimizer)
    return {
        "losses": losses,
        "held_out": None if diverged else after,
        "restart_change": change,
        "diverged": diverged,
        "seconds": seconds,
    }


def _wrap(arm: Arm, trainer: Trainer, pairs: FoundPairs, treatment: Treatment) -> None:
    damping = 1.0 if arm.saggs == "hard" else treatment.damping
    trainer.optimizer = SAGGS(trainer.optimizer, pairs, treatment.every, damping, arm.at_start)


def _replace(trainer: Trainer, pairs: FoundPairs) -> None:
    """Go on by GaugeAdamW, from the groups and averages of AdamW."""
    exact = GaugeAdamW([{"params": g["params"]} for g in trainer.optimizer.param_groups], pairs)
    exact.load_state_dict(trainer.optimizer.state_dict())
    trainer.optimizer = exact


def _change_by_balancing(trainer: Trainer, held_out: np.ndarray, before: float) -> float:
    """How the loss moves when SAGGS balances; the model is put back, bit by bit."""
    kept = trainer.checkpoint()
    trainer.optimizer.balance()
    change = abs(held_out_loss(trainer.model, held_out) - before)
    trainer.restore(kept)
    return change


def _seconds_of_balancing(optimizer: SAGGS) -> float:
    """The fastest of a few; after training, where it can do no harm."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        optimizer.balance()
        times.append(time.perf_counter() - began)
    return min(times)
