"""Chaos: how fast N tokens drawn of a law are as good as the law, beside depth and heads."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, ClassVar

import numpy as np

from ipslimit.checks import require_int, require_real
from ipslimit.measure.errors import root_mean_square
from ipslimit.measure.rates import Parts, equivalence, fit_parts, fit_trend

from ..frame.task import Task
from ..settings import Flat, Sizes
from .base import UNTIED, ClauseStudy, is_theta, require_distinct
from .chaos_cells import (
    DEPTHS,
    LAW_FORM,
    NORMS,
    ROWS_FORM,
    SHARES,
    WHOLE,
    Comparison,
    LawSetting,
    draw_cell,
    joint_cell,
    law_cell,
    law_rows,
)
from .chaos_figure import figure
from .finding import Finding, Measured, Picture, Table, counted_steps, number, number_in
from .tokens import MASKS

FREE, MASKED = MASKS
COUNTS = tuple(2**i for i in range(3, 12))
# The evaluations of a field that a coarse limit takes, its points included, and a pair of tokens.
EVALUATIONS, SECONDS_A_PAIR = 1000, 1e-9
MODELS = ("quadrature", "sum")


@dataclasses.dataclass(frozen=True)
class Chaos(ClauseStudy):
    """N tokens drawn i.i.d. of a law, against the law itself.

    A context is a law of tokens, a mixture of Gaussians; its limit is taken over Sobol nodes, the
    mean of several scramblings, whose own error is shown beside. Errors are those of what the law
    alone decides, at points of a ball that are the same for all: the flow map and its costate
    (over points and contexts, at the worst of five depths: rms, and sup), the heads, and the loss;
    of the limit, L = H = infinity, trained on N tokens, before and after training. Every draw has
    tokens of its own; of more than 512 tokens there are fewer draws, at least 8. Exponents in N are
    called like -1/2 if their 95 % interval lies within 0.1 of it.

    Under a mask the law is that of (position, token), the position a share of the context, and the
    nodes are of both; points see the context up to a quarter, half, all of it. A token is among
    those that it sees, which moves the nodes by about (log n) / n in the mean: what scramblings do
    not tell.

    Then all three at once: particles with L layers, H heads and N tokens, all drawn, without a
    mask. Their error is fitted as a/L + b (L H)^-1/2 + c N^-1/2, and as the root of the sum of the
    squares, as independent parts would give. The p-value is that of the misfit, were all else
    noise.
    """

    setting: Annotated[LawSetting, Flat] = LawSetting()
    tol: float = 1e-2
    """Largest error in depth wanted of the limit's x and p; it is common to draws and law but for a
    thousandth of what is measured."""
    token_counts: tuple[int, ...] | None = None
    """Numbers of tokens N of the limit (default: by size)."""
    joint_counts: tuple[int, ...] | None = None
    """Numbers of tokens N of particles (default: 16, 64 and 256)."""
    token_nodes: int | None = None
    """Nodes of the law of tokens (default: by size)."""
    scramblings: int = 4
    """Independent scramblings of the nodes."""
    points: int = 32
    """Points of the ball."""
    radius: float = 1.5
    """Radius of the ball."""

    NAME: ClassVar[str] = "chaos"
    CANNOT: ClassVar[dict[str, str]] = {"memory": "which trains one seed at a time"}
    WITHOUT: ClassVar[dict[str, str]] = UNTIED
    VARIED: ClassVar[dict[str, str]] = {
        "tokens": "Use --token-counts.",
        "causal": "It runs with and without mask.",
    }
    TITLE: ClassVar[str] = "Propagation of chaos: tokens drawn of a law"
    THEORY: ClassVar[str] = (
        "The limit is an equation of the law of tokens, with constants free of N. Our argument: "
        "what depends smoothly on a law differs by N^-1/2 for N draws of it, after training too "
        "(heads by N^-1/4 while the noise of the gradient exceeds eps, where it changes sign); and "
        "draws of tokens and of heads are independent: their parts add in squares."
    )
    QUICK: ClassVar[Sizes] = Sizes((4, 8, 32), (1, 16, 256), 12)
    FULL: ClassVar[Sizes] = Sizes((4, 16, 64), (1, 16, 256), 24)

    @property
    def counts(self) -> tuple[int, ...]:
        return self.chosen("token_counts", COUNTS[:5], COUNTS)

    @property
    def particle_counts(self) -> tuple[int, ...]:
        return (16, 64, 256) if self.joint_counts is None else self.joint_counts

    @property
    def node_count(self) -> int:
        return self.chosen("token_nodes", 512, 1024)

    def seeds_at(self, count: int) -> int:
        """Draws of so many tokens: fewer of very many, which take long."""
        return min(self.sizes.seeds, max(8, self.sizes.seeds * 512 // count))

    def check(self) -> None:
        super().check()
        for name, counts in (
            ("token_counts", self.counts),
            ("joint_counts", self.particle_counts),
            ("depths", self.sizes.depths),
            ("heads", self.sizes.heads),
        ):
            if len(counts) < 3:
                raise ValueError(
                    f"{name} must be three or more, for an exponent or the misfit of one; got "
                    f"{list(counts)}. Add some."
                )
            for count in counts:
                require_int(name, count)
            require_distinct(name, counts)
        if wrong := [depth for depth in self.sizes.depths if depth % (len(DEPTHS) - 1)]:
            raise ValueError(
                f"depths must be multiples of {len(DEPTHS) - 1}, where they are compared; got "
                f"{wrong[0]}. Use {list(self.QUICK.depths)}."
            )
        require_int("token_nodes", self.node_count, self.setting.components)
        require_int("scramblings", self.scramblings, 2, 1000)
        require_int("points", self.points)
        require_real("radius", self.radius, 0.0, include_low=False)
        if not self.setting.exact:
            raise ValueError(f"law must be atoms; got {self.setting.law!r}. Leave --law out.")

    def comparison(self, mask: str) -> Comparison:
        return Comparison(
            self.setting.varied(causal=MASKS[mask]),
            self.points,
            self.radius,
            self.node_count,
            self.tol,
            self.root_seed,
            self.place,
        )

    def find(self, progress: bool = True) -> Finding:
        tasks = {}
        for mask in MASKS:
            tasks |= self._tasks(mask)
        tasks |= self._joint_tasks()
        done, damaged = self.computed(self.NAME, tasks, progress)
        rows, laws, joint = [], [], []
        for (kind, *which), content in done.items():
            names = {"draw": ("mask", "N"), "joint": ("L", "H", "N")}.get(kind)
            if names:
                about = dict(zip(names, which, strict=False))
                found = [about | row for row in content["rows"]]
                (rows if kind == "draw" else joint).extend(found)
        for mask in MASKS:
            own = [done["law", mask, i] for i in range(self.scramblings)]
            laws += [{"mask": mask} | row for row in law_rows(own, self.comparison(mask))]
        exponents = exponent_rows(rows, laws)
        parts, refused = part_rows(joint)
        several = [
            self.comparison(mask).setting.varied(tokens=i + 1) for i, mask in enumerate(MASKS)
        ]
        words = f"{self.words(*several)}; radius {self.radius:g}"
        return self.finding(
            sentence(exponents, parts, self.setting.recorded[-1]),
            measured=measured(exponents, parts, self.setting.recorded[-1]),
            tables=[
                Table("exponents", "Exponents in N of draws against the law", exponents),
                Table("parts", "Particles: a/L, b (L H)^-1/2 and c N^-1/2", parts),
            ],
            pictures=[
                Picture(
                    "chaos",
                    figure(rows, laws, joint, parts, self.setting.recorded, words),
                    "Errors of N drawn tokens against their law (points: root mean square over "
                    "draws; open: sup over points), at L = H = infinity; dotted: the error of the "
                    "law's own nodes. Above without mask, below left with one, by the share of the "
                    "context that points see. Below right: particles of every L, H and N beside "
                    "the model of three parts added in squares.",
                )
            ],
            numbers={"errors": rows, "joint": joint, "law": laws},
            settings={
                "token_counts": self.counts,
                "joint_counts": self.particle_counts,
                "token_nodes": self.node_count,
            },
            notes=damaged + refused + _coarse(exponents),
        )

    def _tasks(self, mask: str) -> dict:
        """The limits over nodes, and of every draw."""
        of = self.comparison(mask)
        work = EVALUATIONS * SECONDS_A_PAIR * self.setting.contexts * self.setting.stored
        half = 0.5 if MASKS[mask] else 1.0
        nodes = [("law", mask, i) for i in range(self.scramblings)]
        tasks: dict = {
            key: Task(
                f"law-{mask}-{key[-1]}".replace(" ", "-"),
                law_cell,
                (of, key[-1]),
                of.key,
                LAW_FORM,
                cost=half * self.node_count**2 + 1e3,
                seconds=half * work * self.node_count**2,
            )
            for key in nodes
        }
        for count in self.counts:
            for seed in range(self.seeds_at(count)):
                tasks["draw", mask, count, seed] = Task(
                    f"draw-{mask}-N{count}-{seed}".replace(" ", "-"),
                    draw_cell,
                    (of, count, seed),
                    (of.key, self.scramblings),
                    ROWS_FORM,
                    cost=half * count**2 + 1e3,
                    after=tuple(nodes),
                    seconds=half * work * count**2 + 0.2,
                )
        return tasks

    def _joint_tasks(self) -> dict:
        of, seeds = self.comparison(FREE), range(self.sizes.seeds)
        size = len(seeds) * (self.setting.steps + 2) * self.setting.contexts
        return {
            ("joint", depth, heads, count): Task(
                f"joint-L{depth}-H{heads}-N{count}",
                joint_cell,
                (of, depth, heads, count, seeds),
                (of.key, self.scramblings, len(seeds)),
                ROWS_FORM,
                cost=len(seeds) * (depth * count**2 / 500 + 100),
                after=tuple(("law", FREE, i) for i in range(self.scramblings)),
                seconds=4e-9 * size * depth * min(heads, self.setting.stored) * count**2 + 0.5,
            )
            for depth in self.sizes.depths
            for heads in self.sizes.heads
            for count in self.particle_counts
        }


def variables_in(rows: list[dict]) -> list[tuple[int, str]]:
    """(step, variable) of rows that have errors: parameters have none before the first step."""
    found = dict.fromkeys((row["step"], row["variable"]) for row in rows)
    return [key for key in found if not (key[0] == 0 and is_theta(key[1]))]


def errors_of(rows: list[dict], *sizes: str, **about) -> dict[tuple, list[float]]:
    """Errors of the seeds by sizes, of the rows that these values have."""
    found: dict[tuple, list[float]] = {}
    for row in rows:
        if all(row[name] == value for name, value in about.items()):
            found.setdefault(tuple(row[size] for size in sizes), []).append(row["error"])
    return found


def exponent_rows(rows: list[dict], laws: list[dict]) -> list[dict]:
    """Exponents in N, with what the law's own nodes are off."""
    table = []
    for mask in MASKS:
        for step, variable in variables_in(rows):
            for share in SHARES if MASKS[mask] else (WHOLE,):
                for norm in NORMS:
                    about = {"mask": mask, "share": share, "step": step}
                    about |= {"variable": variable, "norm": norm}
                    errors = errors_of(rows, "N", **about)
                    if not errors:
                        continue
                    counts, most = [count for (count,) in errors], max(map(len, errors.values()))
                    padded = [e + [math.nan] * (most - len(e)) for e in errors.values()]
                    fit = fit_trend(counts, padded, shared_draws=False)
                    (low, high), theory = fit.interval, -0.5
                    last = max(counts)
                    (law,) = errors_of(laws, **about).values()
                    table.append(
                        about
                        | {"theory": theory, "exponent": fit.slope, "low": low, "high": high}
                        | {"verdict": equivalence((low - theory, high - theory))}
                        | {"at the last N": root_mean_square(errors[last,])}
                        | {"of the nodes": root_mean_square(law)}
                    )
    return table


def part_rows(joint: list[dict]) -> tuple[list[dict], list[str]]:
    """a, b and c of both models, and fits that could not be had."""
    table, refused = [], []
    for step, variable in variables_in(joint):
        for norm in NORMS:
            errors = errors_of(
                joint, "L", "H", "N", step=step, variable=variable, norm=norm, share=WHOLE
            )
            if not errors:
                continue
            about = {"step": step, "variable": variable, "norm": norm}
            L, H, N = np.array([*errors], dtype=float).T
            rates = {"a": 1 / L, "b": (L * H) ** -0.5, "c": N**-0.5}
            sizes = {"L": L, "H": H, "N": N}
            try:
                fits = [fit_parts(sizes, rates, [*errors.values()], model) for model in MODELS]
            except ValueError as why:
                refused.append(f"step {step} {variable} {norm}: no parts, {why}")
                continue
            best = min(fits, key=lambda fit: fit.residual)
            table += [about | _part_row(fit) | {"better": fit is best} for fit in fits]
    return table, refused


def _coarse(exponents: list[dict]) -> list[str]:
    """Where the error of the law's own nodes is no small part of what was measured."""
    near = [row for row in exponents if row["of the nodes"] > row["at the last N"] / 3]
    named = sorted({f"{row['variable']} ({row['mask']})" for row in near})
    if not near:
        return []
    return [
        "the error of the law's nodes exceeds a third of that of the most tokens in "
        f"{len(near)} of {len(exponents)} cases: {', '.join(named)}; raise token_nodes"
    ]


def _part_row(fit: Parts) -> dict:
    row: dict[str, object] = {"model": fit.model}
    for name, value in fit.constants.items():
        low, high = fit.intervals[name]
        row |= {name: value, f"{name} low": low, f"{name} high": high}
    return row | {"misfit": fit.residual, "worst": fit.worst, "p": fit.p_value}


def measured(exponents: list[dict], parts: list[dict], step: int) -> list[Measured]:
    found = []
    for row in exponents:
        where = row["mask"] + ("" if row["mask"] == FREE else f" at share {row['share']:g}")
        what = f"{row['variable']} in N, {where}, {row['norm']}, step {row['step']}"
        theory = (
            "-1/4 while the noise exceeds eps, then -1/2" if is_theta(row["variable"]) else "-1/2"
        )
        found.append(dataclasses.replace(Measured.row(what, theory, row), verdict=row["verdict"]))
    for row in parts:
        if row["step"] == step and row["norm"] == "rms" and row["better"]:
            for name, rate in zip("abc", ("1/L", "(L H)^-1/2", "N^-1/2"), strict=True):
                what = f"{name} of {rate}, {row['variable']}, rms, {row['model']}, step {step}"
                ends = (row[f"{name} low"], row[f"{name} high"])
                found.append(Measured(what, "> 0", row[name], ends))
    return found


def sentence(exponents: list[dict], parts: list[dict], step: int) -> str:
    def told(mask: str, variable: str, norm: str, share: float = WHOLE) -> str:
        (row,) = (
            r
            for r in exponents
            if (r["mask"], r["step"], r["variable"]) == (mask, step, variable)
            and (r["norm"], r["share"]) == (norm, share)
        )
        return number_in(row)

    alike = sum(row["verdict"].startswith("alike") for row in exponents)
    text = (
        f"After {counted_steps(step)} the limit of N drawn tokens goes to that of their law like "
        f"N to the power {told(FREE, 'x', 'rms')} (flow, rms), {told(FREE, 'x', 'sup')} (sup over "
        f"the points), {told(FREE, 'p', 'rms')} (costate) and {told(FREE, 'loss', 'rms')} (loss); "
        f"under a mask {told(MASKED, 'x', 'rms', SHARES[0])} and "
        f"{told(MASKED, 'x', 'rms', WHOLE)} (flow of points that see {SHARES[0]:g} and all of the "
        f"context). {alike} of {len(exponents)} exponents are within 0.1 of -1/2 with their whole "
        "95 % interval. "
    )
    chosen = [r for r in parts if (r["step"], r["norm"]) == (step, "rms")]
    for row in chosen:
        if row["variable"] == "x" and row["better"]:
            a, b, c = (number(row[n], row[f"{n} low"], row[f"{n} high"]) for n in "abc")
            other = next(r for r in chosen if r["variable"] == "x" and r["model"] != row["model"])
            text += (
                f"With L layers, H heads and N tokens the flow's error is {a}/L, {b} (L H)^-1/2 "
                f"and {c} N^-1/2, added in {'squares' if row['model'] == MODELS[0] else 'size'}: "
                f"misfit {100 * row['misfit']:.0f} % (p = {row['p']:.2g}), of the other way "
                f"{100 * other['misfit']:.0f} %."
            )
    return text
