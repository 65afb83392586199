"""The default `ipslimit sweep` against the same study in plain PyTorch, and its cost against H."""

from __future__ import annotations

import dataclasses
import tempfile
import time

import numpy as np
import torch
from scipy.optimize import nnls

from ipslimit import train_particles
from ipslimit.experiments.settings import Sizes, SweepSetting
from ipslimit.experiments.sweep import Sweep

from . import plain
from .timing import interleave, relative_error

TOLERANCE = 1e-9
VERIFIED = (8, 8, 2)  # L, H, seeds of the cell whose numbers are compared
# (L, H) of the cells that are timed in plain PyTorch; the rest is extrapolated from them.
TIMED = ((4, 1), (32, 1), (4, 8), (16, 8), (4, 64), (8, 64), (2, 512), (1, 4096))
FLAT = (1, 4, 16, 64, 256, 1024, 16384, 1048576)


def run(quick: bool = False, progress=print) -> dict:
    study = SweepSetting()
    if quick:
        study = dataclasses.replace(study, sizes=Sizes((4, 8, 16), (1, 8, 64), 4))
    difference = verify(study)
    progress(f"plain PyTorch agrees to {difference:.1e}")
    cells = [_time_cell(study, *cell) for cell in (TIMED[::2][:3] if quick else TIMED)]
    model = fit(cells)
    progress(f"a plain layer: {model}")
    ours = _time_ours(study)
    progress(f"ipslimit sweep: {ours:.1f} s")
    rows = [{"L": L, "H": H, "seconds": predict(model, study, L, H)} for L, H in study.sizes.cells]
    whole = sum(
        L * (model["layer"] + model["head"] * study.setting.stored) for L in study.sizes.all_depths
    )
    plain_seconds = sum(row["seconds"] for row in rows) + whole
    progress(f"plain PyTorch, extrapolated: {plain_seconds:.0f} s, x{plain_seconds / ours:.0f}")
    return {
        "difference": difference,
        "timed": cells,
        "model": model,
        "cells": rows,
        "ours": ours,
        "plain": plain_seconds,
        "ratio": plain_seconds / ours,
        "flat": _flat(study, quick),
    }


def verify(study: SweepSetting) -> float:
    """Largest relative difference of x and p, on contexts and probes, in one small cell."""
    depth, heads, seeds = VERIFIED
    setting = study.setting
    problem, rule = setting.make_problem(), setting.make_rule()
    run = train_particles(
        problem, rule, depth, heads, setting.steps, seeds, record=setting.recorded
    )
    matrices = plain.draw_heads(problem, run.counts)
    other = plain.train(problem, rule, matrices, setting.steps, setting.recorded)
    difference = max(
        relative_error(getattr(other, name)[k], getattr(run, name)[k])
        for name in ("x", "p", "probe_x", "probe_p")
        for k in setting.recorded
    )
    if not difference <= TOLERANCE:
        raise AssertionError(f"plain PyTorch disagrees with train_particles by {difference:.1e}")
    return difference


def _time_cell(study: SweepSetting, depth: int, heads: int) -> dict:
    """Median seconds of one batch of seeds of a cell."""
    setting = study.setting
    problem, rule = setting.make_problem(), setting.make_rule()
    batch = plain.seeds_together(heads, study.sizes.seeds)
    counts = torch.from_numpy(
        np.random.default_rng(0).multinomial(
            heads, np.full(setting.stored, 1.0 / setting.stored), size=(batch, depth)
        )
    )
    matrices = plain.draw_heads(problem, counts)
    samples = interleave(
        {"plain": lambda: plain.train(problem, rule, matrices, setting.steps, setting.recorded)},
        budget=8.0,
    )
    return {
        "L": depth,
        "H": heads,
        "batch": batch,
        "seconds": float(np.nanmedian(samples["plain"])),
    }


def fit(cells: list[dict]) -> dict[str, float]:
    """Cost of a batch = L (layer + head H batch), fitted to equal relative errors.

    `layer` is what a layer costs however small, `head` one head of one seed, for the whole
    training run of the study with all that it records.
    """
    rows = np.array([[c["L"], c["L"] * c["H"] * c["batch"]] for c in cells], float)
    seconds = np.array([c["seconds"] for c in cells])
    (layer, head), _ = nnls(rows / seconds[:, None], np.ones(len(cells)))
    worst = np.abs(rows @ np.array([layer, head]) / seconds - 1.0).max()
    return {"layer": float(layer), "head": float(head), "worst_misfit": float(worst)}


def predict(model: dict[str, float], study: SweepSetting, depth: int, heads: int) -> float:
    """Seconds of all seeds of a cell."""
    seeds = study.sizes.seeds
    batch = plain.seeds_together(heads, seeds)
    batches = -(-seeds // batch)
    return depth * (batches * model["layer"] + model["head"] * heads * seeds)


def _time_ours(study: SweepSetting) -> float:
    """Seconds of the command's work: limit, all cells, the predicted constant, all fits."""
    with tempfile.TemporaryDirectory() as folder:  # compiles whatever is not compiled yet
        small = dataclasses.replace(study, sizes=Sizes((4, 8, 16), (1, 8, 64), 4))
        Sweep(small, folder).run(progress=False)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        Sweep(study, folder).run(progress=False)
        return time.perf_counter() - start


def _flat(study: SweepSetting, quick: bool) -> dict:
    """Seconds of a run against H at L = 32, 16 seeds; of plain PyTorch where it is affordable."""
    depth, seeds, setting = 32, 16, study.setting
    problem, rule = setting.make_problem(), setting.make_rule()
    calls = {
        str(H): lambda H=H: train_particles(problem, rule, depth, H, setting.steps, seeds)
        for H in FLAT
    }
    samples = interleave(calls, 5 if quick else 7, budget=20.0)
    return {
        "L": depth,
        "seeds": seeds,
        "atoms": setting.stored,
        "H": list(FLAT),
        "seconds": [float(np.nanmedian(samples[str(H)])) for H in FLAT],
    }


def table(result: dict) -> str:
    """Markdown."""
    model, flat = result["model"], result["flat"]
    lines = [
        "| study | seconds |",
        "|---|---|",
        f"| `ipslimit sweep`, measured | {result['ours']:.1f} |",
        f"| plain PyTorch, extrapolated | {result['plain']:.0f} |",
        f"| ratio | **{result['ratio']:.0f}** |",
        "",
        f"Plain PyTorch gives the same numbers (to {result['difference']:.0e} in a cell). Its "
        f"cells cost L ({1e3 * model['layer']:.3g} ms a batch + {1e6 * model['head']:.3g} us a "
        f"head and seed), fitted to {len(result['timed'])} timed cells (worst misfit "
        f"{100 * model['worst_misfit']:.0f} %), and were added up; the limit, the constant and "
        "the fits, which our time includes, were given to it for free.",
        "",
        f"Cost of a run against H (L = {flat['L']}, {flat['seeds']} seeds, {flat['atoms']} atoms): "
        + ", ".join(
            f"{H}: {1e3 * t:.3g} ms" for H, t in zip(flat["H"], flat["seconds"], strict=True)
        )
        + ".",
    ]
    return "\n".join(lines)


def figures(result: dict, folder) -> None:
    """heads.png: cost of a run against H."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    flat, model = result["flat"], result["model"]
    figure, ax = plt.subplots(figsize=(5, 3.6), layout="constrained")
    H = np.array(flat["H"], float)
    ax.loglog(H, flat["seconds"], "o-", label="ipslimit")
    cost = flat["L"] * (model["layer"] + model["head"] * H * flat["seeds"])
    ax.loglog(H, cost, "--", color="C1", label="plain PyTorch (cost model)")
    ax.axvline(flat["atoms"], color="0.7", linewidth=0.8)
    ax.annotate(
        "atoms",
        (flat["atoms"], ax.get_ylim()[0]),
        xytext=(3, 3),
        textcoords="offset points",
        color="0.4",
    )
    ax.set_xlabel("heads per layer H")
    ax.set_ylabel(f"seconds, L = {flat['L']}, {flat['seeds']} seeds")
    ax.legend()
    figure.savefig(folder / "heads.png", dpi=150)
    plt.close(figure)
