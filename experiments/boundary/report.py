"""The tables of a boundary experiment as text, at most 110 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator

import numpy as np

from ..intervals import SeedMean
from .methods import METHODS
from .results import PAPER, BoundaryResult, TaskResult
from .runs import RATIOS

WIDTH = 110


def summary(result: BoundaryResult) -> str:
    """Every task, the paper's figures beside ours, the verdict, and what was known beforehand."""
    parts = []
    for name, task in result.tasks.items():
        parts += [_data(task), _scores(task), _motion(task)]
        if name == "reviews":
            parts += [_beside_the_paper(task), _widths(result)]
    parts += [_verdict(result), _windows(result)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _data(task: TaskResult) -> list[str]:
    data, plan, setting = task.baselines.data, task.plan, task.setting
    lines = [f"== {task.task} =="]
    if task.task == "reviews":
        counts = ", ".join(
            f"{round(np.mean([one['reviews'][name] for one in data]))} {name}"
            for name in data[0]["reviews"]
        )
        shared = sum(one["shared_movies"] for one in data)
        lines.append(
            f"{data[0]['source']}; every seed splits them by movie in its own way, on average "
            f"{counts}; {shared} movies in two parts"
        )
        size = f"{setting.reviews.corpus.batch} reviews"
    else:
        counts = ", ".join(f"{count} {name}" for name, count in data[0]["windows"].items())
        tokens, source = data[0]["tokens"], setting.language.language_data
        lines.append(
            f"{source}: {tokens['train']} + {tokens['held_out']} tokens; windows: {counts} (every "
            "second held-out one)"
        )
        size = f"{setting.language.language_batch} windows"
    lines.append(
        f"{plan.steps} steps of {size}; {setting.seeds} seeds of weights, order and dropout, the "
        "same for all methods"
    )
    lines.append(
        "each method at its own best learning rate, that of the best validation, the mean of "
        f"{plan.tuning_seeds} of the seeds"
    )
    return [line for text in lines for line in textwrap.wrap(text, WIDTH)]


def _scores(task: TaskResult) -> list[str]:
    what, form = task.criterion.what, task.criterion.form
    lines = [
        f"{what:<20}{'lr':>9}  {'validation':<11}{'test':<24}{'test,':<9}{'test minus AdamW,':<26}",
        f"{'':<31}{'at the best validation step':<35}{'last':<9}{task.criterion.difference}",
    ]
    for found in task.methods.values():
        gap = "" if found.difference is None else found.difference.text("+" + form)
        lines.append(
            f"{found.label:<20}{found.lr:>9g}{' ' if found.inside else '*'} "
            f"{found.validation.mean:<11{form}}{_text(found.test, form):<24}"
            f"{found.last.mean:<9{form}}{gap:<26}".rstrip()
        )
    for name, values in task.baselines.values.items():
        lines.append(f"{name:<20}{'':>9}  {values['validation']:<11{form}}{values['test']:{form}}")
    return lines + list(_remarks(task))


def _remarks(task: TaskResult) -> Iterator[str]:
    edges = [found.label for found in task.methods.values() if not found.inside]
    if edges:
        words = f"(* at the edge of the learning rates that were tried: {', '.join(edges)})"
        yield from textwrap.wrap(words, WIDTH)
    for found in task.methods.values():
        if found.diverged:
            yield f"({found.label}: {found.diverged} of {task.setting.seeds} seeds diverged)"
    form = task.criterion.form
    beside = (f"{found.label} {found.above.text('+' + form)}" for found in task.methods.values())
    yield from textwrap.wrap(f"beside the {task.baselines.bar}: {', '.join(beside)}", WIDTH)


def _motion(task: TaskResult) -> list[str]:
    names = {
        "R1": "R1",
        "R2": "R2",
        "R3": "R3",
        "energy": "energy",
        "bias": "|b|",
        "effective_bias": "|b + W mu|",
        "drift": "drift",
    }
    head = "medians of R1, R2, R3 over layers (no keys) and steps"
    lines = [head, f"{'':<20}" + "".join(f"{word:>12}" for word in names.values())]
    for found in task.methods.values():
        values = (f"{found.medians[name].mean:>12.3g}" for name in names)
        lines.append(f"{found.label:<20}" + "".join(values))
    return lines


def _beside_the_paper(task: TaskResult) -> list[str]:
    lines = [f"{'':<46}{'paper (IMDb)':<16}here"]
    row: Callable[[str, str, str], str] = "{:<46}{:<16}{}".format
    adamw = task.methods.get("adamw")
    if adamw:
        for name in RATIOS:
            ours = _text(adamw.medians[name], ".3g")
            lines.append(row(f"AdamW, median {name}", f"{PAPER[name]:g}", ours))
    for part, words in (("validation", "validation, best step"), ("test", "test, that step")):
        for method, paper in PAPER[part].items():
            if method in task.methods:
                ours = getattr(task.methods[method], part)
                name = f"{METHODS[method].label}: {words}, %"
                lines.append(row(name, f"{paper:.2f}", _text(ours, ".2f")))
    return [*lines, "(the paper: one seed, longer reviews, a model whose width we do not know)"]


def _widths(result: BoundaryResult) -> list[str]:
    if not result.widths:
        return []
    lines = [
        f"median R2 of AdamW by width (the paper's, of an unknown width: {PAPER['R2']:g})",
        f"{'width':>8}   {'first ' + str(result.setting.early) + ' steps':<26}all steps",
    ]
    for found in result.widths:
        early, whole = _text(found.early, ".3g"), _text(found.whole, ".3g")
        lines.append(f"{found.width:>8}   {early:<26}{whole}")
    return lines


def _verdict(result: BoundaryResult) -> list[str]:
    text = result.verdict()
    lines = textwrap.wrap(f"Verdict: {text[0].upper()}{text[1:]}", WIDTH)
    lines.append("(each interval is 95 % by itself: of many, some miss by chance)")
    setting = result.setting
    if setting.extensions == 0:
        lines.append("(no search beyond the first learning rates: a method may have a better one)")
    return lines


def _windows(result: BoundaryResult) -> list[str]:
    lines = ["What a wrong implementation would miss:"]
    for window in result.windows():
        lines += textwrap.wrap(
            f"{window.of}, {window.text()}", WIDTH, initial_indent="  ", subsequent_indent="    "
        )
    return lines


def _text(estimate: SeedMean, form: str) -> str:
    """With its interval, as short as it goes."""
    return estimate.text(form)
