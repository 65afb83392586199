"""What `ipslimit backbone` prints."""

from __future__ import annotations

import math

from ..intervals import SeedMean
from .quantities import QUANTITIES, Comparison
from .results import DIVERGED, PAPER_SHARES, UNTRAINED, BackboneResult

NAME, MEAN = 20, 26  # characters


def summary(result: BackboneResult) -> str:
    """Tables of the runs on text and on the particle model, each number beside its null."""
    parts = (_text(result), _quantities(result), _groups(result), _matched(result))
    return "\n\n".join("\n".join(lines) for lines in (*parts, _particles(result)) if lines)


def _text(result: BackboneResult) -> list[str]:
    text = result.setting.text
    few = " (two: intervals are wide)" if text.seeds == 2 else ""
    lines = [
        f"{result.corpus['source']}: {text.steps} steps of {text.corpus.batch}, a point every "
        f"{text.every}, {text.seeds} seeds{few}; parameters of all blocks; [95 % over seeds]",
        "null: the same runs with every gradient replaced by white noise of its size; above, below "
        "or within it by the",
        "interval of run minus null, seed by seed. walk: white noise under momentum alone, where "
        "parameters are many, for",
        "SGD; and with the correction of Adam's first moment. One comparison in twenty is above or "
        "below by chance",
        f"{'':<{NAME}}{f'loss (classes: {result.entropy:.3f})':<{MEAN}}{'test %':<22}",
    ]
    for name, found in result.text.items():
        notes = []
        if found.diverged_at:
            steps = ", ".join(str(step) for step in found.diverged_at)
            notes.append(f"{len(found.diverged_at)} of {text.seeds} seeds diverged, at {steps}")
        if count := found.states.count(UNTRAINED):
            notes.append(f"{count} of {text.seeds} seeds did not train")
        test = found.test.times(100).text(".1f") if found.test.values else ""
        loss = found.loss.text(".3f") if found.loss.values else ""
        line = f"{result.label(name):<{NAME}}{loss:<{MEAN}}{test:<22}{'; '.join(notes)}"
        lines.append(line.rstrip())
    return lines


def _quantities(result: BackboneResult) -> list[str]:
    text = result.setting.text
    lines = [f"{'':<{NAME}}{'run':<{MEAN}}{'null':<{MEAN}}{'run - null':<{MEAN + 3}}"]
    for quantity in QUANTITIES:
        title = quantity.title.format(every=text.every, late=text.late_step)
        if quantity.name == "share":
            paper = " and ".join(f"{share:.3f}" for share in PAPER_SHARES)
            walk = result.walks["paper"]["adam"]["share"]
            title += f"; the paper's {paper}, where a walk has {walk:.3f}"
        lines.append(title)
        for name, found in result.text.items():
            comparison = found.quantities[quantity.name]
            if comparison.run.values:
                row = _row(comparison, quantity.form)
            else:
                state = UNTRAINED if UNTRAINED in found.states else DIVERGED
                row = f"{state:<{MEAN}}{_mean(comparison.null, quantity.form)}"
            lines.append(f"  {result.label(name):<{NAME - 2}}{row}".rstrip())
        sgd, adam = (result.walks["text"][kind][quantity.name] for kind in ("sgd", "adam"))
        walks = f"{sgd:{quantity.form}}, {adam:{quantity.form}}"
        lines.append(f"  {'walk (SGD, Adam)':<{NAME - 2 + MEAN}}{walks}")
    return lines


def _row(found: Comparison, form: str) -> str:
    difference = _mean(found.difference, f"+{form}")
    return (
        f"{_mean(found.run, form):<{MEAN}}{_mean(found.null, form):<{MEAN}}"
        f"{difference:<{MEAN + 3}}{found.verdict}"
    )


def _mean(found: SeedMean, form: str) -> str:
    return found.text(form) if found.values else "diverged"


def _groups(result: BackboneResult) -> list[str]:
    names = list(next(iter(result.text.values())).blocks)
    lines = ["share by group (its null)   " + "".join(f"{name:>16}" for name in names)]
    for name, found in result.text.items():
        if any(found.blocks[group].run.values for group in names):
            pairs = (found.blocks[group] for group in names)
            shares = (f"{pair.run.mean:.3f} ({pair.null.mean:.3f})" for pair in pairs)
            lines.append(f"{result.label(name):<28}" + "".join(f"{s:>16}" for s in shares))
    return lines if len(lines) > 1 else ["no run on text was usable"]


def _matched(result: BackboneResult) -> list[str]:
    loss = result.matched["loss"]
    if not math.isfinite(loss):
        return []
    lines = [
        f"share up to training loss {loss:.3f}, which all reached that trained (first point, then "
        "share, its null up to the same point, and their difference)"
    ]
    for name, found in result.matched["runs"].items():
        steps = "step " + "/".join(str(step) for step in found["step"])
        lines.append(f"  {result.label(name):<{NAME - 2}}{steps:<26}{_row(found['share'], '.3f')}")
    return lines


def _particles(result: BackboneResult) -> list[str]:
    particles = result.setting.particles
    lines = [
        f"particle model and its limit: {particles.particle_steps} steps, all recorded; angle: "
        "sine of the angle between a seed's backbone and the limit's (1 for directions that have "
        "nothing to do with each other)"
    ]
    for name, found in result.particles.items():
        if found["limit"] is None:
            lines.append(f"{result.label(name)}: {found['message']}")
            continue
        geometry = found["limit"]["geometry"]
        lines.append(
            f"{result.label(name)}: limit's share {geometry['share']:.4f} (depth quadrature "
            f"{found['limit']['quadrature']:.0e}; limit {found['limit']['status']}, error "
            f"{found['limit']['error']:.0e}; walk {result.walk(name, 'particles')['share']:.3f}), "
            f"loss {found['limit']['loss'][0]:.3f} -> {found['limit']['loss'][-1]:.3f}"
        )
        for row in result.sizes(name):
            note = f"  ({row['diverged']} seeds diverged)" if row["diverged"] else ""
            lines.append(
                f"  L={row['L']:<4} H={row['H']:<5} share {row['share'].text('.4f'):<26} "
                f"angle {row['angle'].text('.3f')}{note}"
            )
    return lines
