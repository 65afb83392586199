"""Scaling: residual branches scaled by L^-alpha, for alpha between 1/2 and 1."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
import torch

from ipslimit import Atoms, Law, train_particles
from ipslimit.checks import require_real
from ipslimit.measure.errors import root_mean_square
from ipslimit.measure.rates import RateFit, RateFits, fit_rates

from ..cells import FORM as CELL
from ..cells import SECONDS_A_UNIT, cell_cost
from ..frame.plot import label
from ..frame.task import Task
from ..plots import along, bars, cells_of, legend_below, log_axes, look, shade
from ..settings import Flat, Setting, Sizes
from .base import NORMS, UNTIED, ClauseStudy, measured_fit, share_columns
from .finding import Finding, Picture, Table, number_in
from .panels import legend, page, scatter

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Seeds trained at a time: their heads, not their states, are what takes memory.
TOGETHER = 32
# What a cell holds, for reading it back.
FORM = {"rows": CELL["rows"], "diverged": int}


@dataclasses.dataclass(frozen=True, init=False)
class SymmetricSetting(Setting):
    """Atoms in pairs of equal weight, (Q, K, V, O) and (Q, K, V, -O): their mean field is zero.

    Of perceptrons W_out and b_out change their sign.
    """

    def law_of(self, family: str, kind: Callable[..., Law]) -> Law:
        units = super().law_of(family, kind).heads
        mirrored = units.packed.clone()
        for name in units.mirror:
            if name in units.layout.slices:
                mirrored[units.layout.slices[name]].neg_()
        packed = torch.cat([units.packed, mirrored], dim=-1)
        weights = torch.cat([units.weights, units.weights]) / 2
        return Atoms(units.from_packed(packed, weights, units.layout))

    def check(self) -> None:
        super().check()
        if self.law != "atoms":
            raise ValueError(f"law must be atoms; got {self.law!r}. Leave --law out.")


@dataclasses.dataclass(frozen=True)
class Scaling(ClauseStudy):
    """The spread of x over seeds at initialisation when branches are scaled by L^-alpha.

    With a law of zero mean field nothing drifts, and x_r is a sum of r random fields of size
    L^-alpha H^-1/2: its spread over seeds goes like L^(1/2 - alpha) H^-1/2. At alpha = 1 it
    vanishes like (L H)^-1/2 around the ODE limit X = X(0); at alpha = 1/2 it stays: the limit in L
    is random (an SDE in depth), and there is no X to measure a distance to. So the spread is
    reported, the deviation from the mean over seeds.
    """

    setting: Annotated[SymmetricSetting, Flat] = SymmetricSetting(steps=0, record=(0,), probes=0)
    alphas: tuple[float, ...] | None = None
    """Exponents alpha of the residual scaling (default: by size)."""

    NAME: ClassVar[str] = "scaling"
    CANNOT: ClassVar[dict[str, str]] = {"memory": "which trains a few seeds at a time anyway"}
    WITHOUT: ClassVar[dict[str, str]] = UNTIED
    TITLE: ClassVar[str] = "Other residual scalings"
    THEORY: ClassVar[str] = (
        "At initialisation with zero mean field the spread over seeds goes like L^(1/2 - alpha): "
        "it vanishes like L^-1/2 at alpha = 1 and does not vanish at alpha = 1/2."
    )
    QUICK: ClassVar[Sizes] = Sizes((8, 16, 32, 64, 128), (1, 4), 256)
    FULL: ClassVar[Sizes] = Sizes((8, 16, 32, 64, 128, 256, 512), (1, 4, 16), 256)

    @property
    def values(self) -> tuple[float, ...]:
        return self.chosen("alphas", (0.5, 0.75, 1.0), (0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 1.0))

    def check(self) -> None:
        super().check()
        for alpha in self.values:
            require_real("alphas", alpha, 0.0, 2.0)

    def find(self, progress: bool = True) -> Finding:
        alphas = sorted(set(self.values))
        wanted = [
            (alpha, depth, heads)
            for alpha in alphas
            for depth in self.sizes.depths
            for heads in self.sizes.heads
        ]
        tasks = {cell: self._task(*cell) for cell in wanted}
        done, damaged = self.computed(self.NAME, tasks, progress)
        rows = {a: [row for w in wanted if w[0] == a for row in done[w]["rows"]] for a in alphas}
        fits = {alpha: fit_rates(table) for alpha, table in rows.items()}
        diverged = sum(content["diverged"] for content in done.values())
        found = [(a, norm, fit) for a in alphas for norm in NORMS if (fit := _fit(fits[a], norm))]
        slopes = [_slope(a, norm, fit, fits[a]) for a, norm, fit in found]
        spread = [
            {"alpha": alpha, "L": depth, "H": heads, "spread": root_mean_square(errors)}
            for alpha, depth, heads in wanted
            for errors in [_errors(done[alpha, depth, heads]["rows"])]
        ]
        words = (
            f"{self.setting.stored} atoms in sign-symmetric pairs, d={self.setting.d}, "
            f"N={self.setting.tokens}, step 0; {self.sizes.seeds} seeds"
        )
        return self.finding(
            sentence(slopes),
            measured=[
                measured_fit(
                    fits[a],
                    f"slope in L of the spread of x, {norm}, alpha = {a:g}",
                    f"{0.5 - a:g}",
                    fit,
                )
                for a, norm, fit in found
            ],
            tables=[
                Table("slopes", "Slopes of the spread in L", slopes),
                Table("spread", "Spread of x over seeds (rms)", spread),
            ],
            pictures=[
                Picture(
                    "scaling",
                    figure(rows, slopes, words),
                    "Left: spread of x over seeds (rms over contexts, tokens and seeds, largest "
                    f"over layers) against depth; filled: H = {min(self.sizes.heads)}, open: H = "
                    f"{max(self.sizes.heads)}. Right: its slope against alpha with 95 % intervals; "
                    "line: 1/2 - alpha.",
                )
            ],
            numbers={"fits": {f"{a:g}": fit.as_dict() for a, fit in fits.items()}},
            settings={"alphas": alphas},
            notes=damaged + ([f"{diverged} runs diverged"] if diverged else []),
        )

    def _task(self, alpha: float, depth: int, heads: int) -> Task:
        # draws of its own for every alpha, so that their intervals are independent
        cell, count = (alpha, depth, heads), self.sizes.seeds
        first = round(1000 * alpha) * count
        study = self.study(self.setting, Sizes((depth,), (heads,), count))
        return Task(
            f"spread-a{alpha:g}-L{depth}-H{heads}",
            spread,
            (self.setting, *cell, range(first, first + count), self.root_seed, self.place),
            (*cell, self.setting.key, count, self.root_seed),
            FORM,
            cost=depth * heads,
            seconds=SECONDS_A_UNIT * cell_cost(study, depth, heads),
        )


def spread(
    setting: Setting,
    alpha: float,
    depth: int,
    heads: int,
    seeds: Sequence[int],
    root_seed: int,
    device: object,
) -> dict:
    """Deviations from the mean over seeds, as rows of a table of errors."""
    problem, states = setting.make_problem(), []
    for start in range(0, len(seeds), TOGETHER):
        run = train_particles(
            problem,
            setting.make_rule(),
            depth,
            heads,
            0,
            seeds[start : start + TOGETHER],
            root_seed,
            residual_exponent=alpha,
            device=device,
        )
        states.append(run.x[0][~run.diverged])
    x = torch.cat(states)
    count, rows = len(x), []
    if count > 1:
        # a sample's mean lies nearer to it than the true one does
        gap = (x - x.mean(0)) * math.sqrt(count / (count - 1))
        square = gap.square().sum(-1).flatten(2)  # (seeds, layers, tokens)
        mean = square.mean(-1)
        errors = {"rms": mean[:, int(mean.mean(0).argmax())], "sup": square.flatten(1).amax(1)}
        rows = [
            {"step": 0, "variable": "x", "term": "fluctuation", "norm": norm, "set": "train"}
            | {"L": depth, "H": float(heads), "seed": seed, "error": error}
            for norm, values in errors.items()
            for seed, error in enumerate(values.sqrt().tolist())
        ]
    return {"rows": rows, "diverged": len(seeds) - count}


def _fit(fits: RateFits, norm: str) -> RateFit | None:
    found = fits.select(size="L", at="all", norm=norm)
    return found[0] if found else None


def _errors(rows: list[dict]) -> list[float]:
    return [row["error"] for row in rows if row["norm"] == "rms"]


def _slope(alpha: float, norm: str, fit: RateFit, fits: RateFits) -> dict:
    return {
        "alpha": alpha,
        "norm": norm,
        "theory": 0.5 - alpha,
        "slope": fit.exponent,
        "low": fit.interval[0],
        "high": fit.interval[1],
        **share_columns(fits.share(fit)),
        "note": fit.note,
    }


def sentence(slopes: list[dict]) -> str:
    chosen = [row for row in slopes if row["norm"] == "rms"]
    if not chosen:
        return "No slope could be fitted: add depths or seeds."
    parts = [f"{number_in(row, 'slope')} at alpha = {row['alpha']:g}" for row in chosen]
    held = sum(row["low"] <= row["theory"] <= row["high"] for row in chosen)
    return (
        f"The spread of x over seeds goes with L to the power {', '.join(parts)}; 1/2 - alpha lies "
        f"in {held} of {len(chosen)} intervals."
    )


def figure(rows: dict, slopes: list[dict], words: str) -> Figure:
    out, axes = page(1, 2, 3.0, words, width_ratios=(1.3, 1))
    left, right = axes[0]
    sizes = [cells_of(table, 0, "x").get("fluctuation", {}) for table in rows.values()]
    every = sorted({heads for cells in sizes for _, heads in cells})
    faces = {every[-1]: "white", every[0]: None}
    for i, (alpha, cells) in enumerate(zip(rows, sizes, strict=True)):
        style = {"color": shade(i, len(rows)), "marker": "o", "ms": 3.5, "lw": 0.8}
        for heads, face in faces.items():
            points = {d: root_mean_square(e) for d, e in along(cells, "L", heads).items()}
            name = f"α = {alpha:g}" if heads == every[0] else None
            scatter(left, points, style | {"mfc": face or style["color"]}, name)
    grey = {"color": "0.3", "marker": "o", "ms": 3.5, "lw": 0.8}
    for heads, face in faces.items():
        scatter(left, {}, grey | {"mfc": face or "0.3"}, f"H={heads:g}")
    log_axes(left, sorted({depth for cells in sizes for depth, _ in cells}))
    legend_below(left, columns=3)
    label(left, x="depth L", y="spread of x over seeds")
    ends = np.array([min(rows) - 0.03, max(rows) + 0.03])
    right.plot(ends, 0.5 - ends, color="0.4", lw=0.8, label="1/2 − α")
    for i, norm in enumerate(NORMS):
        own = [row for row in slopes if row["norm"] == norm]
        places = [row["alpha"] + 0.008 * (2 * i - 1) for row in own]
        values = [row["slope"] for row in own]
        bars(right, places, values, [(r["low"], r["high"]) for r in own], look(i), norm, ms=3.5)
    label(right, x="residual exponent α", y="slope of the spread in L")
    legend(right)
    return out
