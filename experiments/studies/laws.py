"""Laws: the rates for heads drawn from a density, whose limit is an integral over nodes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar

from ..plots import BIAS, NAMES, caption, cells_of, legend_below, log_axes, look, series
from ..study import Flat, Setting, Sizes
from ..sweep import SweepResult
from .base import ClauseStudy, find_fit, fit_rows, measured_fit, sweep_notes, told
from .finding import Finding, Picture, Table, counted_steps
from .panels import label, page, rms
from .rates import refusals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAWS = ("xavier", "truncated-normal")
TERMS = {
    ("bias", "L"): "at most -1",
    ("fluctuation", "L"): "at most -1/3",
    ("fluctuation", "H"): "at most -1/2",
}


@dataclasses.dataclass(frozen=True)
class Laws(ClauseStudy):
    """Do laws with a density show the rates that laws of finitely many atoms show?

    Their limit is taken over scrambled-Sobol nodes in antithetic pairs, whose error is estimated
    from independent scramblings in the norm of the errors, drawn as the floor, and respected by
    the fits (see `ipslimit.fit_rates`): so quadrature_tol, of the largest component, is wide here.
    At step 0 the mean field of these laws is zero, so the bias is measured from step 1 on.
    """

    setting: Annotated[Setting, Flat] = Setting(
        steps=5, record=(1, 5), probes=0, law="xavier", nodes=1024, quadrature_tol=0.3
    )
    tol: float = 1e-5
    """Largest error wanted of the limit's x and p."""

    NAME: ClassVar[str] = "laws"
    VARIED: ClassVar[dict[str, str]] = {"law": "It runs xavier and truncated-normal."}
    TITLE: ClassVar[str] = "Rates for sampled laws"
    THEORY: ClassVar[str] = (
        "The theorem asks of the initial law compact support only, so the rates are those of any "
        "law: L^-1 for the bias, at most L^-1/3 H^-1/2 for the fluctuation."
    )
    QUICK: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64), (1, 2, 4, 8), 16)
    FULL: ClassVar[Sizes] = Sizes((4, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16), 32)

    def check(self) -> None:
        super().check()
        if 0 in self.setting.recorded:
            raise ValueError(
                "record must leave out step 0, where the mean field of these laws is zero and the "
                f"bias with it; got {list(self.setting.recorded)}. Begin with step 1."
            )

    def find(self, progress: bool = True) -> Finding:
        settings = [self.setting.varied(law=law) for law in LAWS]
        found = self.sweep([self.study(setting) for setting in settings], progress)
        results = dict(zip(LAWS, found, strict=True))
        steps = self.setting.recorded
        columns, rows = fit_rows(results, "law")
        floors = [
            floor_row(name, result, step, v, n)
            for name, result in results.items()
            for step in steps
            for v in "xp"
            for n in ("rms", "sup")
        ]
        measured = []
        for name, result in results.items():
            for (term, size), theory in TERMS.items():
                for variable in "xp":
                    if fit := find_fit(result, steps[-1], variable, term, size):
                        what = f"{name}: {term} in {size}, {variable}, rms, step {steps[-1]}"
                        measured.append(measured_fit(result.fits, what, theory, fit))
        nodes = ", ".join(f"{name} {result.limit['nodes']}" for name, result in results.items())
        words = caption(settings[0]).replace("; xavier", "") + f"; {self.sizes.seeds} seeds"
        return self.finding(
            sentence(results, steps[-1], floors),
            measured=measured,
            tables=[
                Table("exponents", "Exponents", columns, rows),
                Table(
                    "floors",
                    "Quadrature error, and the smallest fluctuation measured",
                    list(floors[0]),
                    floors,
                ),
            ],
            pictures=[
                Picture(
                    "laws",
                    figure(results, steps[-1], words),
                    (
                        f"Bias and fluctuation at step {steps[-1]} (rms). Dotted: the quadrature "
                        "error of "
                        f"the limit's nodes ({nodes}); grey: three times it, below which "
                        "fluctuations are "
                        "not fitted (the bias, of which it moves the constant only, may lie "
                        "there). "
                        "Bands are the middle half of the seeds, lines the fits."
                    ),
                )
            ],
            numbers={name: result.as_dict() for name, result in results.items()},
            notes=sweep_notes(results)
            + [
                f"{name}: {why}"
                for name, result in results.items()
                for why in refusals(result, variables="xp")
            ],
        )


def quadrature(result: SweepResult, step: int, variable: str, norm: str = "rms") -> float:
    """The quadrature error as the fits use it: root mean square over scramblings."""
    (errors,) = cells_of(result.rows, step, variable, norm)["quadrature"].values()
    return rms(errors)


def floor_row(name: str, result: SweepResult, step: int, variable: str, norm: str) -> dict:
    cells = cells_of(result.rows, step, variable, norm)["fluctuation"]
    smallest = min(rms(errors) for errors in cells.values())
    floor = quadrature(result, step, variable, norm)
    return {
        "law": name,
        "step": step,
        "variable": variable,
        "norm": norm,
        "quadrature error": floor,
        "smallest fluctuation": smallest,
        "ratio": smallest / floor if floor else None,
    }


def sentence(results: dict[str, SweepResult], step: int, floors: list[dict]) -> str:
    parts = []
    for name, result in results.items():
        fits = [find_fit(result, step, "x", *what) for what in TERMS]
        if None in fits:
            parts.append(f"{name}: not all exponents of x could be fitted")
            continue
        bias, depth, heads = (told(result.fits, fit) for fit in fits)
        parts.append(f"{name}: bias {bias} in L, fluctuation {depth} in L and {heads} in H")
    ratios = [row["ratio"] for row in floors if row["norm"] == "rms" and row["ratio"]]
    least = f"{min(ratios):.1f}" if ratios else "many"
    return (
        f"Exponents of x (rms) after {counted_steps(step)}: {'; '.join(parts)}. The "
        f"smallest fluctuation measured is {least} times the quadrature error."
    )


def figure(results: dict[str, SweepResult], step: int, words: str) -> Figure:
    out, axes = page(4, 2, 2.3, words)
    for i, (name, result) in enumerate(results.items()):
        for j, variable in enumerate("xp"):
            _draw(axes[2 * i + j], result, step, variable, name)
    label(axes[-1, 0], x="depth L")
    label(axes[-1, 1], x="heads H")
    return out


def _draw(axes, result: SweepResult, step: int, variable: str, name: str) -> None:
    """One law and variable: in L with the bias, and in H."""
    cells = cells_of(result.rows, step, variable)
    every = cells["fluctuation"]
    fits = result.fits.select(step=step, variable=variable, norm="rms", term="fluctuation")
    depths, heads = (sorted(set(column)) for column in zip(*every, strict=True))
    floor = quadrature(result, step, variable)
    for axis, of, other, sizes in ((axes[0], "L", "H", heads), (axes[1], "H", "L", depths)):
        for i, at in enumerate(sizes):
            points = {
                (d if of == "L" else h): e
                for (d, h), e in every.items()
                if (h if of == "L" else d) == at
            }
            fit = [f for f in fits if (f.size, f.at) == (of, at)]
            series(axis, points, fit[0] if fit else None, look(i), f"{other}={at:g}")
        if of == "L":
            bias = {depth: e for (depth, _), e in cells["bias"].items()}
            series(axis, bias, find_fit(result, step, variable, "bias", "L"), BIAS, "bias")
        log_axes(axis, depths if of == "L" else heads)
        axis.axhline(floor, color="0.4", lw=0.8, ls=":", label="quadrature error")
        legend_below(axis, columns=2)
        axis.axhspan(axis.get_ylim()[0], 3 * floor, color="0.93", lw=0, zorder=0)
        label(axis, y=f"{NAMES[variable]}\nrms error", title=name)
