"""The limit as tables, see `LimitRun.to_frame`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ipslimit.checks import require_choice
from ipslimit.frames import contexts_of, frame_of, joined, token_columns
from ipslimit.model.run_state import RECORDED

from .grid import require_depths

if TYPE_CHECKING:  # a run asks here for its frame
    from pandas import DataFrame

    from .limit_run import LimitRun


def limit_frame(run: LimitRun, what: str, s) -> DataFrame:
    """`LimitRun.to_frame`."""
    require_choice("what", what, ("loss", *RECORDED))
    return frame_of(_losses(run) if what == "loss" else _tokens(run, what, s))


def _losses(run: LimitRun) -> dict[str, np.ndarray]:
    steps = len(run.loss)
    columns = {"step": np.arange(steps), "loss": run.loss.detach().cpu().numpy()}
    columns["loss_error"] = run.loss_error.cpu().numpy()
    probes = {"probe_loss": run.probe_loss, "probe_loss_error": run.probe_loss_error}
    for name, found in probes.items():
        columns[name] = np.full(steps, np.nan)
        columns[name][list(found)] = [float(value) for value in found.values()]
    return columns


def _tokens(run: LimitRun, what: str, s) -> dict[str, np.ndarray]:
    s = torch.tensor(run.grid.edges, dtype=torch.float64) if s is None else require_depths("s", s)
    s, parts = s.reshape(-1), []
    for step in run.steps:
        values = getattr(run, what)(step, s)
        contexts, tokens = values.shape[1:3]
        own = contexts_of(run, what, step, contexts)
        axes = {"s": s.numpy(), "context": own, "token": range(tokens)}
        found = token_columns(what[-1], values, axes)
        error = run.error_at(what, step, s).cpu().numpy().repeat(contexts * tokens)
        where = {name: found.pop(name) for name in axes}
        parts.append({"step": step} | where | {"error": error} | found)
    return joined(parts)
