"""A boundary experiment's findings as text."""

from __future__ import annotations

from .methods import METHODS
from .results import PAPER, BoundaryResult


def summary(result: BoundaryResult) -> str:
    """The paper's figures beside ours, the methods, and the figures known beforehand."""
    return "\n".join(
        [*_data(result), "", *_beside_the_paper(result), "", *_methods(result), "",
         *_widths(result), "", *_windows(result)]
    )  # fmt: skip


def _data(result: BoundaryResult) -> list[str]:
    corpus, setting = result.corpus, result.setting
    counts = ", ".join(f"{count} {name}" for name, count in corpus["reviews"].items())
    return [
        f"{corpus['source']}: {counts}; no movie in two parts; larger class of test "
        f"{100 * corpus['majority']['test']:.1f} %",
        f"{setting.steps} steps of {setting.corpus.batch} reviews, {setting.seeds} seeds "
        f"(weights and order, the same for all methods); brackets are 95 % intervals over seeds",
        f"every method tried at lr {', '.join(f'{lr:g}' for lr in setting.lrs)}; the one with the "
        "best validation accuracy at the last step is shown",
    ]


def _beside_the_paper(result: BoundaryResult) -> list[str]:
    lines = ["AdamW, all layers but key projections    paper (IMDb)    here"]
    adamw = result.methods.get("adamw")
    if adamw:
        for name in ("R1", "R2", "R3"):
            lines.append(f"{name:<40} {PAPER[name]:<15g} {adamw.quantities[name].text('.3g')}")
    for method in ("adamw", "sbo"):
        if method in result.methods:
            label = f"test accuracy, {METHODS[method].label}, %"
            paper = 100 * PAPER[f"accuracy {method}"]
            lines.append(f"{label:<40} {paper:<15.2f} {_percent(result.methods[method].test)}")
    return [*lines, "(the paper: one seed, longer reviews, another model size)"]


def _methods(result: BoundaryResult) -> list[str]:
    names = ("R1", "R2", "R3", "energy", "bias", "drift")
    head = f"{'method':<26}{'lr':>7}  {'test, last step':<22}{'test, best val.':<22}"
    lines = [head + f"{'minus AdamW, points':<24}" + "".join(f"{name:>9}" for name in names)]
    for method, found in result.methods.items():
        gap = "" if found.difference is None else _percent(found.difference, "+.1f")
        line = f"{METHODS[method].label:<26}{found.lr:>7g}  {_percent(found.test):<22}"
        line += f"{_percent(found.test_best):<22}{gap:<24}"
        lines.append(line + "".join(f"{found.quantities[name].mean:>9.3g}" for name in names))
        if found.diverged:
            lines.append(f"  {found.diverged} of {result.setting.seeds} seeds diverged")
    return lines


def _widths(result: BoundaryResult) -> list[str]:
    steps = result.setting.early
    return [f"R2 of AdamW in the first {steps} steps"] + [
        f"  width {width}: {estimate.text('.3g')}" for width, estimate in result.early.items()
    ]


def _windows(result: BoundaryResult) -> list[str]:
    lines = ["Figures known from a prototype (d = 64, 560 steps, lr 3e-3):"]
    return lines + [f"  {window.text()}" for window in result.windows()]


def _percent(estimate, form: str = ".1f") -> str:
    scale = type(estimate)(
        100 * estimate.mean,
        None if estimate.low is None else 100 * estimate.low,
        None if estimate.high is None else 100 * estimate.high,
        tuple(100 * value for value in estimate.values),
    )
    return scale.text(form)
