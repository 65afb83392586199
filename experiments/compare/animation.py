"""The cloud of tokens on its way through depth: every seed over the limit, and the limit's flow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ipslimit.measure.errors import root_mean_square
from ipslimit.measure.wasserstein import wasserstein2
from ipslimit.model.company import company_of

from ..frame.film import Film
from ..plots import COLOURS, SMALL, TEXT, caption
from .comparison import PAIRS, Comparison

if TYPE_CHECKING:  # matplotlib is slow to import
    from matplotlib.axes import Axes

PICTURES = 41
ARROWS = 13  # along the longer side
DISCRETE, SMOOTH, FLOW = COLOURS[0], "black", COLOURS[1]


class FlowFilm(Film):
    """The tokens of the first context, before and after training.

    Seen on the plane of the first two principal axes of the limit's tokens, of all depths and
    panels, through their mean. Between layers tokens are drawn on the line from one to the next,
    the polygon of Euler's scheme. An arrow is the limit's dX/ds of a tracer put on the plane, as it
    is seen there; under a mask, of one that sees all tokens.

    Parameters
    ----------
    comparisons : list of Comparison
        Of tokens in two dimensions or more.
    """

    def __init__(self, comparisons: list[Comparison]):
        first = comparisons[0].setting
        start, end = first.recorded[0], first.recorded[-1]
        # before training all rules are one
        before = comparisons if start else comparisons[:1]
        shown = [(comparison, start) for comparison in before] if start < end else []
        shown += [(comparison, end) for comparison in comparisons]
        self.depths = torch.linspace(0, 1, PICTURES, dtype=torch.float64)
        limits = [c.limit.x(step, self.depths)[:, 0].double().cpu() for c, step in shown]
        self.plane = plane = Plane(torch.cat([x.flatten(0, 1) for x in limits]))
        runs = [between_layers(c, step, self.depths) for c, step in shown]
        grid = Grid(plane, [plane.seen(x) for x in (*limits, *runs)])
        self.panels = [
            Panel(comparison, step, self.depths, plane, grid, x, run)
            for (comparison, step), x, run in zip(shown, limits, runs, strict=True)
        ]
        self.pictures = PICTURES
        run = comparisons[0].run
        self.title = f"Tokens through depth: L={run.depth}, H={run.head_count:g} on the limit"
        speed = max(np.quantile(panel.speeds, 0.95) for panel in self.panels)
        # so much of depth that arrows do not overlap; no more than there is
        self.time = min(1.0, float(0.9 * grid.spacing / max(speed, 1e-300)))
        self.words = (
            f"Tokens of one context at depth s: {len(run.seeds)} runs (dots) on the limit (rings, "
            f"with their paths). Arrows: the limit's flow, how far a token put there moves in "
            f"{self.time:.2g} of depth. Axes: the first two principal ones of the limit's tokens, "
            f"with {100 * plane.share:.0f} % of their variance. {caption(first)}."
        )
        self._draw(comparisons)

    def _draw(self, comparisons: list[Comparison]) -> None:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D

        columns = min(len(self.panels), 3)
        rows = -(-len(self.panels) // columns)
        width, height = self.panels[0].grid.high - self.panels[0].grid.low
        size = 3.6 * columns, (3.3 * height / width + 0.55) * rows + 0.7
        self.figure = Figure(figsize=size, layout="constrained")
        axes = self.figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for axis in axes.flat[len(self.panels) :]:
            axis.set_axis_off()
        for panel, axis in zip(self.panels, axes.flat, strict=False):
            panel.draw(axis, self.time, alone=len(comparisons) == 1)
        look = {"ls": "", "color": FLOW, "marker": r"$\rightarrow$", "ms": 10}
        flow = Line2D([], [], **look, label=f"flow of the limit, in {self.time:.2g} of depth")
        keys = [*axes.flat[0].get_legend_handles_labels()[0], flow]
        self.figure.legend(
            handles=keys, fontsize=SMALL, frameon=False, loc="outside lower center", ncols=3
        )
        self.figure.suptitle("s = 0.00", fontsize=TEXT + 2)
        self.figure.draw_without_rendering()  # laid out once: all pictures have the same axes
        self.figure.set_layout_engine("none")

    def show(self, picture: int) -> None:
        self.figure.suptitle(f"depth s = {float(self.depths[picture]):.2f}", fontsize=TEXT + 2)
        for panel in self.panels:
            panel.show(picture)


class Plane:
    """The plane of the first two principal axes of points (n, d), through their mean.

    Attributes
    ----------
    share : float
        Of the points' variance that is seen on it.
    """

    def __init__(self, points: torch.Tensor):
        self.mean = points.mean(0)
        variances, axes = torch.linalg.eigh(torch.cov(points.T))
        self.axes = axes[:, -2:].flip(-1)  # (d, 2)
        # an axis has no direction of its own
        largest = self.axes.gather(0, self.axes.abs().argmax(0, keepdim=True))
        self.axes = self.axes * largest.sign()
        self.share = float(variances[-2:].sum() / variances.sum().clamp(min=1e-300))

    def seen(self, points: torch.Tensor) -> np.ndarray:
        """Where points (..., d) are seen, (..., 2)."""
        return ((points - self.mean) @ self.axes).numpy()

    def points(self, places: np.ndarray) -> torch.Tensor:
        """Points (..., d) of the plane that are seen there."""
        return self.mean + torch.from_numpy(places) @ self.axes.T


class Grid:
    """Places (n, 2) evenly over all that is seen.

    Attributes
    ----------
    low, high : arrays (2,)
        The corners.
    """

    def __init__(self, plane: Plane, seen: list[np.ndarray]):
        everything = np.concatenate([places.reshape(-1, 2) for places in seen])
        low, high = everything.min(0), everything.max(0)
        span = max(float((high - low).max()), 1e-9)
        middle, half = (low + high) / 2, np.maximum(high - low, 0.6 * span) / 2 + 0.08 * span
        self.low, self.high = middle - half, middle + half
        self.spacing = float((2 * half).max()) / ARROWS
        sides = [np.arange(self.spacing / 2, width, self.spacing) - width / 2 for width in 2 * half]
        self.places = middle + np.stack(np.meshgrid(*sides), axis=-1).reshape(-1, 2)
        self.points = plane.points(self.places)


class Panel:
    """One rule at one step."""

    def __init__(
        self,
        comparison: Comparison,
        step: int,
        depths: torch.Tensor,
        plane: Plane,
        grid: Grid,
        limit: torch.Tensor,
        run: torch.Tensor,
    ):
        self.comparison, self.step, self.grid = comparison, step, grid
        self.limit, self.run = plane.seen(limit), plane.seen(run)
        velocities = tracer_velocities(comparison, step, depths, limit, grid.points)
        self.arrows = (velocities @ plane.axes).numpy()
        self.speeds = np.linalg.norm(self.arrows, axis=-1)
        self.distances = [
            root_mean_square([wasserstein2(y, x, largest=PAIRS).distance for y in cloud])
            for cloud, x in zip(run.movedim(1, 0), limit, strict=True)
        ]

    def draw(self, axis: Axes, time: float, alone: bool) -> None:
        """The first picture; an arrow is the move in `time`."""
        axis.set_xlim(self.grid.low[0], self.grid.high[0])
        axis.set_ylim(self.grid.low[1], self.grid.high[1])
        axis.set_aspect("equal")
        axis.tick_params(labelsize=SMALL)
        axis.set_xlabel("first principal axis", fontsize=SMALL)
        axis.set_ylabel("second", fontsize=SMALL)
        axis.label_outer()
        trained = f"after {self.step} steps" if self.step else "before training"
        self.name = trained if alone or not self.step else f"{trained}, {self.comparison.rule}"
        self.quiver = axis.quiver(
            *self.grid.places.T,
            *self.arrows[0].T,
            angles="xy",
            scale_units="xy",
            scale=1 / time,
            color=FLOW,
            width=0.004,
            headwidth=4,
        )
        self._paths = [
            axis.plot([], [], color=SMOOTH, lw=0.7, alpha=0.6)[0]
            for _ in range(self.limit.shape[1])
        ]
        (self.dots,) = axis.plot(
            [], [], ls="", marker="o", ms=2.6, mec="none", color=DISCRETE, alpha=0.6
        )
        (self.rings,) = axis.plot([], [], ls="", marker="o", ms=6, mfc="none", color=SMOOTH)
        run = self.comparison.run
        self.dots.set_label(f"L={run.depth}, H={run.head_count:g}, every seed")
        self.rings.set_label("limit")
        self.axis = axis
        self.show(0)

    def show(self, picture: int) -> None:
        """Everything at this depth."""
        self.axis.set_title(f"{self.name}: W2 = {self.distances[picture]:.2g}", fontsize=TEXT)
        self.quiver.set_UVC(*self.arrows[picture].T)
        self.rings.set_data(*self.limit[picture].T)
        self.dots.set_data(*self.run[:, picture].reshape(-1, 2).T)
        for i, path in enumerate(self._paths):
            path.set_data(*self.limit[: picture + 1, i].T)


def between_layers(comparison: Comparison, step: int, depths: torch.Tensor) -> torch.Tensor:
    """Tokens (seeds, S, N, d) of the first context, on lines from layer to layer."""
    run = comparison.run
    x = run.x[step][~run.diverged][:, :, 0].double().cpu()
    layer = (depths * run.depth).floor().long().clamp(max=run.depth - 1)
    part = (depths * run.depth - layer)[:, None, None]
    return torch.lerp(x[:, layer], x[:, layer + 1], part)


def tracer_velocities(
    comparison: Comparison, step: int, depths: torch.Tensor, x: torch.Tensor, points: torch.Tensor
) -> torch.Tensor:
    """dX/ds (S, n, d) of tracers at points (n, d), moved by the limit's tokens x (S, N, d)."""
    problem, limit = comparison.run.problem, comparison.limit
    branch = problem.block.branch(limit.units(step, depths))
    batch = problem.examples[:1].to(branch.device)
    company = company_of(problem, batch, points.to(problem.dtype), None)
    tokens = batch.ordered(x[:, None].to(company.points))
    field = branch.field(company.join(tokens, company.points), company.sight)
    return company.of_points(field)[:, 0].double().cpu()
