"""Laws: the rates for heads drawn from a density, whose limit is an integral over nodes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar

from ipslimit.measure.errors import root_mean_square

from ..frame.plot import label
from ..plots import NAMES, biases, cells_of, fluctuations, legend_below, log_axes
from ..settings import Flat, Setting, Sizes
from ..sweep import SweepResult
from .base import BOUND, NORMS, find_fit, notes_of, told
from .finding import Finding, Picture, Table, counted_steps
from .panels import page
from .varied import VariedStudy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Laws(VariedStudy):
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
    VARY: ClassVar[str] = "law"
    VALUES: ClassVar[tuple[str, ...]] = ("xavier", "truncated-normal")
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
        results = self.results(progress)
        *_, step = self.setting.recorded
        floors = [
            floor_row(name, result, step, v, n)
            for name, result in results.items()
            for step in self.setting.recorded
            for v in "xp"
            for n in NORMS
        ]
        nodes = ", ".join(f"{name} {result.limit['nodes']}" for name, result in results.items())
        title = "Quadrature error, and the smallest fluctuation measured"
        return self.compared(
            results,
            sentence(results, step, floors),
            tables=[Table("floors", title, floors)],
            pictures=[
                Picture(
                    "laws",
                    figure(results, step, self.words(*self.settings().values())),
                    f"Bias and fluctuation at step {step} (rms). Dotted: the quadrature error of "
                    f"the limit's nodes ({nodes}); grey: three times it, below which fluctuations "
                    "are not fitted (the bias, of which it moves the constant only, may lie "
                    "there). Bands are the middle half of the seeds, lines the fits.",
                )
            ],
            notes=notes_of(results, variables="xp"),
        )


def quadrature(result: SweepResult, step: int, variable: str, norm: str = "rms") -> float:
    """The quadrature error as the fits use it: root mean square over scramblings."""
    (errors,) = cells_of(result.rows, step, variable, norm)["quadrature"].values()
    return root_mean_square(errors)


def floor_row(name: str, result: SweepResult, step: int, variable: str, norm: str) -> dict:
    cells = cells_of(result.rows, step, variable, norm)["fluctuation"]
    smallest = min(map(root_mean_square, cells.values()))
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
        fits = [find_fit(result, step, "x", *what) for what in BOUND]
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
    cells, floor = cells_of(result.rows, step, variable), quadrature(result, step, variable)
    fits = result.fits.select(step=step, variable=variable, norm="rms", set="train")
    for axis, of in zip(axes, "LH", strict=True):
        sizes = fluctuations(axis, cells, fits, of)
        if of == "L":
            biases(axis, cells, fits)
        log_axes(axis, sizes)
        axis.axhline(floor, color="0.4", lw=0.8, ls=":", label="quadrature error")
        legend_below(axis, columns=2)
        axis.axhspan(axis.get_ylim()[0], 3 * floor, color="0.93", lw=0, zorder=0)
        label(axis, y=f"{NAMES[variable]}\nrms error", title=name)
