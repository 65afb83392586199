"""A backbone experiment's findings as text."""

from __future__ import annotations

import math

from ..intervals import over_seeds
from .results import PAPER, BackboneResult


def summary(result: BackboneResult) -> str:
    """Tables of the runs on text and on the particle model, with what chance alone would give."""
    return "\n".join(
        [*_text(result), "", *_groups(result), "", *_matched(result), "", *_particles(result)]
    )


def _text(result: BackboneResult) -> list[str]:
    text = result.setting.text
    lines = [
        f"{result.corpus['source']}: {text.steps} steps of {text.corpus.batch}, a point every "
        f"{text.every}, {text.seeds} seeds; parameters of all blocks; [95 % over seeds]",
        f"share of the backbone: mean squared cosine of displacements from initialisation with it; "
        f"a random walk has {result.random:.3f}; the paper: {PAPER}",
        f"cosines: means of |.| with the backbone; a random direction has {result.noise:.4f}",
        "new optimizer after step "
        f"{text.late_step}: motion to the end, over that of the run going on (across), and its "
        "excess along the backbone in units of the way so far",
        f"{'':<20}{'share':<22}{'dim.':>6}{'window cos':>11}{'gradient':>10}{'update':>8}"
        f"{f'{text.every} steps':>10}{'across x':>10}{'along +':>9}{'loss':>8}{'test %':>8}",
    ]
    for name, found in result.text.items():
        if len(found.diverged_at) == text.seeds:
            steps = ", ".join(str(step) for step in found.diverged_at)
            lines.append(f"{result.label(name):<20}all seeds diverged, at steps {steps}")
            continue
        lines.append(
            f"{result.label(name):<20}{found.share.text('.3f'):<22}{found.dimension.mean:>6.2f}"
            f"{found.previous.mean:>11.3f}{found.gradients.mean:>10.4f}{found.updates.mean:>8.3f}"
            f"{found.intervals.mean:>10.3f}{found.across.mean:>10.2f}{found.along.mean:>9.3f}"
            f"{found.loss.mean:>8.3f}{100 * found.test.mean:>8.1f}"
        )
        if found.diverged_at:
            lines.append(f"  {len(found.diverged_at)} of {text.seeds} seeds diverged, left out")
    return lines


def _groups(result: BackboneResult) -> list[str]:
    usable = {n: f for n, f in result.text.items() if f.share.values}
    if not usable:
        return ["no run on text was usable"]
    names = list(next(iter(usable.values())).blocks)
    lines = ["share by group   " + "".join(f"{name:>12}" for name in names)]
    for name, found in usable.items():
        shares = "".join(f"{found.blocks[group].mean:>12.3f}" for group in names)
        lines.append(f"{result.label(name):<17}{shares}")
    return lines


def _matched(result: BackboneResult) -> list[str]:
    loss = result.matched["loss"]
    if not math.isfinite(loss):
        return []
    lines = [
        f"share up to training loss {loss:.3f}, which all reached that went below the entropy of "
        "the classes (first point, then share)"
    ]
    for name, found in result.matched["runs"].items():
        if found["share"]:
            steps = "/".join(str(step) for step in found["step"])
            lines.append(
                f"  {result.label(name):<18} step {steps}: {over_seeds(found['share']).text('.3f')}"
            )
    return lines


def _particles(result: BackboneResult) -> list[str]:
    particles = result.setting.particles
    lines = [
        f"particle model and its limit: {particles.particle_steps} steps, all recorded; angle: "
        "sine of the angle between a seed's backbone and the limit's"
    ]
    for name, found in result.particles.items():
        if found["limit"] is None:
            lines.append(f"{result.label(name)}: {found['message']}")
            continue
        geometry = found["limit"]["geometry"]
        lines.append(
            f"{result.label(name)}: limit's share {geometry['share']:.4f} (depth quadrature "
            f"{found['limit']['quadrature']:.0e}; limit {found['limit']['status']}, error "
            f"{found['limit']['error']:.0e}; random walk {geometry['random']:.3f}), loss "
            f"{found['limit']['loss'][0]:.3f} -> {found['limit']['loss'][-1]:.3f}"
        )
        for row in result.sizes(name):
            note = f"  ({row['diverged']} seeds diverged)" if row["diverged"] else ""
            lines.append(
                f"  L={row['L']:<4} H={row['H']:<5} share {row['share'].text('.4f'):<26} "
                f"angle {row['angle'].text('.3f')}{note}"
            )
    return lines
