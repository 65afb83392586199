"""Runs of particles as tables, see `ParticleRun.to_frame`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..checks import require_choice
from ..frames import contexts_of, frame_of, joined, token_columns
from .run_state import RECORDED

if TYPE_CHECKING:  # a run asks here for its frame
    from pandas import DataFrame

    from .runs import ParticleRun


def run_frame(run: ParticleRun, what: str) -> DataFrame:
    """`ParticleRun.to_frame`."""
    require_choice("what", what, ("loss", *RECORDED))
    sizes = {"L": run.depth, "H": float(run.head_count)}
    if len(set(run.unit_numbers.values())) > 1:
        sizes |= {f"H_{family}": float(number) for family, number in run.unit_numbers.items()}
    columns = _losses(run) if what == "loss" else _tokens(run, what)
    return frame_of({name: np.full(len(columns["seed"]), n) for name, n in sizes.items()} | columns)


def _losses(run: ParticleRun) -> dict[str, np.ndarray]:
    count, steps = len(run.seeds), run.loss.shape[1]
    probe_loss = run.loss.new_full(run.loss.shape, torch.nan)
    for step, loss in run.probe_loss.items():
        probe_loss[:, step] = loss
    columns = {
        "seed": np.repeat(run.seeds, steps),
        "step": np.tile(np.arange(steps), count),
        "loss": _flat(run.loss),
        "probe_loss": _flat(probe_loss),
        "diverged": np.repeat(_flat(run.diverged), steps),
    }
    reached = columns["step"] <= run.last  # a callback may have stopped it
    return {name: column[reached] for name, column in columns.items()}


def _tokens(run: ParticleRun, what: str) -> dict[str, np.ndarray]:
    recorded = getattr(run, what)
    if not recorded:
        raise ValueError(
            f"what must be recorded by the run; got {what!r}, which is not. Pass record= to "
            "train_particles (probes: give the problem some)."
        )
    parts = []
    for step, values in recorded.items():
        layers, contexts, tokens = values.shape[1:4]
        own = contexts_of(run, what, step, contexts)
        axes = {"seed": run.seeds, "layer": range(layers), "context": own, "token": range(tokens)}
        found = token_columns(what[-1], values, axes)
        parts.append({"step": step} | found | {"s": found["layer"] / run.depth})
    columns = joined(parts)
    order = ["step", "seed", "layer", "s", "context", "token"]
    return {name: columns[name] for name in (*order, *(n for n in columns if n not in order))}


def _flat(t: torch.Tensor) -> np.ndarray:
    return t.detach().cpu().numpy().ravel()
