"""What the runs say: perplexity gaps with intervals over seeds, and the figures asked for."""

from __future__ import annotations

import dataclasses
import math
from math import inf

import numpy as np

from ..frame.window import Window
from ..intervals import over_seeds
from .arms import ARMS, BASE, BY_NAME, Arm
from .experiment import RebalanceCell, RebalanceSetting

# The abstract of the paper, on a model of 123.8M parameters and another text: perplexity gaps of a
# resumed, rescaled checkpoint. Ours are not the same quantity: perplexity is per token, and
# depends on the tokens, the text and how far the model is trained.
PAPER = {"rescaled": "+3.78 ± 0.42", "rescaled-hard": "within 0.02"}
PAPER_INTERVAL = (3.78 - 0.42, 3.78 + 0.42)
PAPER_PARAMETERS = "123.8M"
FIRST_STEPS = 10
COLUMNS = ["variant", "arm", "seed", "perplexity", "gap", "restart_change", "diverged"]


@dataclasses.dataclass(frozen=True)
class Gap:
    """Perplexity of an arm minus that of a reference, seed by seed.

    mean and interval (95 %, Student's t over the seeds that did not diverge) are None without
    enough of them.
    """

    variant: str
    arm: str
    against: str
    perplexity: float | None
    gaps: tuple[float | None, ...]
    mean: float | None
    interval: tuple[float, float] | None
    diverged: int


class RebalanceResult:
    """Gaps, figures asked for, and timings, out of finished runs."""

    def __init__(self, setting: RebalanceSetting, cells: dict[RebalanceCell, dict]):
        self.setting, self.cells = setting, cells
        self.gaps = [
            self.gap(variant, arm, against)
            for variant in setting.variants
            for arm in ARMS
            for against in _references(arm)
        ]
        self.checks = [w for variant in setting.variants for w in self._windows(variant)]

    def perplexity(self, variant: str, seed: int, name: str) -> float:
        """NaN if the run diverged."""
        loss = self.cells[variant, seed, name]["held_out"]
        return math.nan if loss is None else math.exp(loss)

    def checkpoint_perplexity(self, variant: str) -> list[float]:
        """Of the checkpoints, seed by seed."""
        found = [
            self.cells[variant, seed, BASE.name]["checkpoint"] for seed in range(self.setting.seeds)
        ]
        return [math.nan if loss is None else math.exp(loss) for loss in found]

    def gap(self, variant: str, arm: Arm, against: str) -> Gap:
        seeds = range(self.setting.seeds)
        own = np.array([self.perplexity(variant, seed, arm.name) for seed in seeds])
        other = np.array([self.perplexity(variant, seed, against) for seed in seeds])
        estimate = over_seeds(own - other)
        return Gap(
            variant,
            arm.name,
            against,
            float(own[np.isfinite(own)].mean()) if np.isfinite(own).any() else None,
            tuple(gap if math.isfinite(gap) else None for gap in estimate.values),
            estimate.mean if math.isfinite(estimate.mean) else None,
            None if estimate.low is None else (estimate.low, estimate.high),
            int(np.isnan(own).sum()),
        )

    def find(self, variant: str, arm: str, against: str | None = None) -> Gap:
        against = against or BY_NAME[arm].control
        key = (variant, arm, against)
        return next(gap for gap in self.gaps if (gap.variant, gap.arm, gap.against) == key)

    def _windows(self, variant: str) -> list[Window]:
        seeds = range(self.setting.seeds)
        treated = [a for a in ARMS if a.resumed and (a.rescaled or a.saggs)]
        changes = [self.cells[variant, s, a.name]["restart_change"] for s in seeds for a in treated]
        change = float(np.max(changes))  # NaN if one is
        apart = {
            how: max(
                _largest_difference(
                    *(
                        self.cells[variant, s, f"{n}-{how}"]["losses"]
                        for n in ("rescaled", "control")
                    )
                )
                for s in seeds
            )
            for how in ("hard", "exact")
        }
        rescaled = self.find(variant, "rescaled").mean
        fair, exact = (
            self.find(variant, f"rescaled-{how}", f"control-{how}").mean for how in apart
        )
        whole = self.find(variant, "rescaled-hard").mean
        share = None if None in (rescaled, whole) or not rescaled else abs(whole / rescaled)
        alike = f"rescaled against control, first {FIRST_STEPS} steps, nats"
        return [
            Window("loss changed by rescaling and balancing, nats", -inf, 1e-5, change, variant),
            Window(f"hard, {alike}", -inf, 1e-5, apart["hard"], variant),
            Window("gap of the rescaled checkpoint, PPL", 1.0, inf, rescaled, variant),
            Window("gap of hard SAGGS against control then hard, PPL", -0.1, 0.1, fair, variant),
            Window("gap of hard SAGGS against control, PPL", -0.1, 0.1, whole, variant),
            Window("its size over the rescaled gap", -inf, 0.1, share, variant),
            Window(f"GaugeAdamW, {alike}", -inf, 1e-5, apart["exact"], variant),
            Window("gap of GaugeAdamW against control then it, PPL", -0.1, 0.1, exact, variant),
        ]

    def timings(self) -> list[dict]:
        """Milliseconds of a step and of a balancing, medians over runs; not reproducible."""
        rows = []
        for variant in self.setting.variants:
            seconds = [cell["seconds"] for (v, _, _), cell in self.cells.items() if v == variant]
            step = float(np.median([s["step"] for s in seconds]))
            balance = float(np.median([s["balance"] for s in seconds if "balance" in s]))
            every = self.setting.treatment.every
            rows.append(
                {"variant": variant, "step_ms": 1e3 * step, "balance_ms": 1e3 * balance}
                | {"overhead": balance / (every * step), "every": every}
            )
        return rows

    def rows(self) -> list[dict]:
        """One a run, for perplexities.csv."""
        rows = []
        for (variant, seed, name), cell in self.cells.items():
            perplexity = self.perplexity(variant, seed, name)
            gap = perplexity - self.perplexity(variant, seed, BY_NAME[name].control)
            rows.append(
                {"variant": variant, "arm": name, "seed": seed, "perplexity": perplexity}
                | {"gap": gap, "restart_change": cell["restart_change"]}
                | {"diverged": cell["diverged"]}
            )
        return rows

    def as_dict(self) -> dict:
        """The content of rebalance.json."""
        return {
            "paper": {"gaps_ppl": PAPER, "parameters": PAPER_PARAMETERS, "source": "abstract"},
            "checkpoint_perplexity": {
                v: self.checkpoint_perplexity(v) for v in self.setting.variants
            },
            "gaps": [dataclasses.asdict(gap) for gap in self.gaps],
            "checks": [
                {"variant": window.of, "what": window.what, "value": window.measured}
                | {"window": _expected(window), "inside": window.inside}
                for window in self.checks
            ],
            "timing": self.timings(),
        }


def summary(result: RebalanceResult, source: dict) -> str:
    """The gaps, and the figures asked for, as text; `source` is that of config.json."""
    head = f"{source['text']}: {source['train_tokens']} tokens to train on\n"
    return "\n".join([head, table(result, source["parameters"]), check_lines(result)])


def table(result: RebalanceResult, parameters: dict[str, int]) -> str:
    """The gaps as text, the paper's figures beside them."""
    lines = []
    for variant in result.setting.variants:
        checkpoint = np.mean(result.checkpoint_perplexity(variant))
        control = result.find(variant, "rescaled")
        against = [g for g in control.gaps if g is not None]
        control_ppl = control.perplexity - float(np.mean(against)) if against else math.nan
        lines += [
            f"{variant}: {parameters[variant] / 1e6:.2f}M parameters, perplexity {checkpoint:.1f} "
            f"at the checkpoint, {control_ppl:.1f} after {result.setting.resumed_steps} more steps",
            f"  {'':<34}{'PPL gap [95 %]':>26}   paper ({PAPER_PARAMETERS})",
        ]
        for gap in result.gaps:
            if gap.variant != variant:
                continue
            label = BY_NAME[gap.arm].label
            if gap.against != BY_NAME[gap.arm].control:
                label = f"  against {BY_NAME[gap.against].label}"
            paper = PAPER.get(gap.arm, "") if gap.against == "control" else ""
            diverged = f"  ({gap.diverged} diverged)" if gap.diverged else ""
            lines.append(f"  {label:<34}{shown_gap(gap):>26}   {paper}{diverged}".rstrip())
        lines.append("")
    return "\n".join(lines)


def shown_gap(gap: Gap) -> str:
    if gap.mean is None:
        return "diverged"
    digits = 2 if abs(gap.mean) < 100 else 1
    text = f"{gap.mean:+.{digits}f}"
    if gap.interval is not None:
        text += f" [{gap.interval[0]:+.{digits}f}, {gap.interval[1]:+.{digits}f}]"
    return text


def check_lines(result: RebalanceResult) -> str:
    lines = []
    for window in result.checks:
        value = "diverged" if window.measured is None else f"{window.measured:.3g}"
        verdict = "" if window.inside else "   OUTSIDE"
        lines.append(
            f"  {window.of:<8}{window.what:<58}{value:>10}  ({_expected(window)}){verdict}"
        )
    for row in result.timings():
        what = f"one balancing, ms (share of the time at T = {row['every']})"
        lines.append(
            f"  {row['variant']:<8}{what:<58}"
            f"{row['balance_ms']:>10.2f}  ({100 * row['overhead']:.3f} %)"
        )
    return "\n".join(lines)


def _references(arm: Arm) -> list[str]:
    if arm.name == "control":
        return []
    return [arm.control, *([arm.fair] if arm.fair else [])]


def _largest_difference(a: list[float], b: list[float]) -> float:
    """Of the first losses; infinite if one run did not get so far."""
    if min(len(a), len(b)) < min(FIRST_STEPS, max(len(a), len(b))):
        return inf
    first = np.array(a[:FIRST_STEPS]) - np.array(b[:FIRST_STEPS])
    return float(np.abs(first).max()) if np.isfinite(first).all() else math.inf


def _expected(window: Window) -> str:
    return f"within {window.high:g}" if window.low == -window.high else window.expected
