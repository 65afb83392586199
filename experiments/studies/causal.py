"""Causal: does the mask change the rates?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar

from ..frame.plot import label
from ..plots import NAMES, along, cells_of, legend_below, log_axes, look, triangle
from ..settings import Flat, Setting, Sizes
from ..sweep import SweepResult
from .base import NORMS, find_fit, told
from .finding import Finding, Measured, Picture, Table, counted_steps
from .panels import curve, page
from .varied import VariedStudy, differences, verdicts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Causal(VariedStudy):
    """The same study with and without causal mask: same contexts, targets, atoms and draws.

    Exponents of the fluctuation are compared with the draws paired. They are called alike if the
    95 % interval of their difference lies within +- 0.1, which is fixed beforehand: -1/2 and -1/3
    lie 1/6 apart. An interval that holds 0 and is wider than that decides nothing.
    """

    setting: Annotated[Setting, Flat] = Setting(steps=5, record=(0, 5), probes=0)

    NAME: ClassVar[str] = "causal"
    VARY: ClassVar[str] = "causal"
    CALLED: ClassVar[str] = "mask"
    VALUES: ClassVar[dict[str, bool]] = {"no mask": False, "causal": True}
    TITLE: ClassVar[str] = "Rates with a causal mask"
    THEORY: ClassVar[str] = (
        "With a mask the limit is no McKean-Vlasov equation over tokens but a forward-backward "
        "system for finitely many of them; the rates in L and H are the same, the constants may "
        "depend on the number of tokens."
    )
    QUICK: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64), (1, 16, 256, 4096), 24)
    FULL: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64, 128, 256), (1, 16, 256, 4096), 64)

    def find(self, progress: bool = True) -> Finding:
        results = self.results(progress)
        gaps = differences(results, self.setting.recorded, self.called)
        step = self.setting.recorded[-1]
        words = self.words(*self.settings().values())
        return self.compared(
            results,
            sentence(results, gaps, step),
            measured=[
                Measured.row(
                    f"{g['term']} in {g['in']}, {g['variable']}, {g['norm']}, step {step}: "
                    "exponent with mask minus without",
                    "0",
                    g,
                    "difference",
                    g["interval"],
                )
                for g in gaps
                if g["step"] == step
            ],
            tables=[Table("differences", "Exponent with mask minus without", gaps)],
            pictures=[
                Picture(
                    "curves",
                    curves_figure(results, step, words),
                    f"Fluctuation and bias at step {step} with and without mask, against depth; "
                    "bands are the middle half of the seeds.",
                ),
                self.exponents(results, words),
                self.differences(gaps, words),
            ],
        )


def sentence(results: dict[str, SweepResult], gaps: list[dict], step: int) -> str:
    x = next(
        (g for g in gaps if tuple(g.values())[:5] == (step, "x", "rms", "fluctuation", "L")), None
    )
    fits = {name: find_fit(r, step, "x", "fluctuation", "L") for name, r in results.items()}
    if x is None or None in fits.values():
        return verdicts(gaps, step) or "No exponent could be compared: add depths, heads or seeds."
    free, masked = (told(results[name].fits, fit) for name, fit in fits.items())
    return (
        f"After {counted_steps(step)} the fluctuation of x falls in L with exponent {masked} with "
        f"mask and {free} without; their ratio gives a difference of {x['difference']:+.3f} +- "
        f"{x['half-width']:.3f}. {verdicts(gaps, step)}"
    )


def curves_figure(results: dict[str, SweepResult], step: int, words: str) -> Figure:
    figure, axes = page(2, 2, 2.6, words)
    for row, variable in zip(axes, "xp", strict=True):
        for axis, norm in zip(row, NORMS, strict=True):
            for (name, result), line, face in zip(
                results.items(), ("--", "-"), ("white", None), strict=True
            ):
                cells = cells_of(result.rows, step, variable, norm)
                heads, style = (
                    sorted({h for _, h in cells["fluctuation"]}),
                    {"ls": line, "mfc": face},
                )
                for i, h in enumerate((heads[0], heads[len(heads) // 2], heads[-1])):
                    points = along(cells["fluctuation"], "L", h)
                    curve(axis, points, look(i), f"H={h:g}, {name}", **style)
                points = along(cells["bias"], "L", float("inf"))
                curve(axis, points, {"color": "black", "marker": "x"}, f"bias, {name}", ls=line)
            log_axes(axis, sorted(points))
            label(axis, y=f"{NAMES[variable]}\n{norm} error", title=f"step {step}, {norm}")
            legend_below(axis, columns=2)
            triangle(axis, (-1 / 3, -1 / 2))
    for axis in axes[-1]:
        label(axis, x="depth L")
    return figure
