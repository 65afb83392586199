"""What the runs of `ipslimit language` say: gaps, their fits, best learning rates, the claim."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import scipy

from ipslimit.measure.errors import root_mean_square
from ipslimit.measure.rates.choices import FLOOR, LEAST_SIZES

from ..store import numbers
from ..text.characters import CharacterWindows
from .experiment import (
    LIMIT,
    LanguageCell,
    compared,
    own_cells,
    plain_cells,
    rounding_cell,
    size_cells,
)
from .setting import EXPONENTS, LanguageSetting

# Bits per character by which models must be below the bigram before anything is claimed of them.
BELOW_BIGRAM = 0.1
# Part of the limit's loss within which it predicts a model's.
WITHIN = 0.01
# Half an interval of an exponent beyond which it says nothing.
WIDEST = 1.0
# Names of the residual factors.
FACTORS = {1.0: "1/L", 0.5: "1/√L", 0.0: "1"}
LOSS_COLUMNS = ["L", "H", "seed", "step", "bits", "limit", "limit_error"]
RATE_COLUMNS = ["factor", "L", "H", "lr", "bits"]


@dataclasses.dataclass(frozen=True)
class BestRate:
    """The best learning rate of one residual factor and depth.

    Attributes
    ----------
    lr : float or None
        Least point of the parabola in log lr through the best rate tried and its neighbours; the
        best one tried where that is at an end of those tried, None where every run diverged.
    low, high : float or None
        The neighbours, between which it lies.
    at_end : str
        "", or "lowest" or "highest": the best may lie beyond it.
    """

    exponent: float
    depth: int
    lr: float | None
    low: float | None
    high: float | None
    at_end: str

    @classmethod
    def of(cls, exponent: float, depth: int, lrs: list[float], losses: list[float]) -> BestRate:
        """Of losses by learning rate, rising; those that are not finite are worse than all."""
        values = np.where(np.isfinite(losses), losses, math.inf)
        i = int(values.argmin())
        if not math.isfinite(values[i]):
            return cls(exponent, depth, None, None, None, "")
        ends = {0: "lowest", len(lrs) - 1: "highest"}
        if i in ends:
            low, high = lrs[max(i - 1, 0)], lrs[min(i + 1, len(lrs) - 1)]
            return cls(exponent, depth, lrs[i], low, high, ends[i])
        best, three = lrs[i], values[i - 1 : i + 2]
        if np.isfinite(three).all():
            square, slope, _ = np.polyfit(np.log(np.divide(lrs[i - 1 : i + 2], best)), three, 2)
            best *= math.exp(-slope / (2.0 * square)) if square > 0.0 else 1.0
        return cls(exponent, depth, best, lrs[i - 1], lrs[i + 1], "")


@dataclasses.dataclass(frozen=True)
class Held:
    """One of two models that are held against each other: its best of the learning rates tried.

    Attributes
    ----------
    depth, parameters : int
    lr, bits : float
        Final held-out loss; NaN where every run diverged.
    at_end : bool
        Whether lr is an end of those tried, beyond which there may be better ones.
    """

    depth: int
    parameters: int
    lr: float
    bits: float
    at_end: bool

    @classmethod
    def of(cls, depth: int, parameters: int, losses: dict[float, float]) -> Held:
        """Of losses by learning rate."""
        lr = min(losses, key=lambda lr: losses[lr] if math.isfinite(losses[lr]) else math.inf)
        at_end = len(losses) > 1 and lr in (min(losses), max(losses))
        return cls(depth, parameters, lr, losses[lr], at_end)


@dataclasses.dataclass(frozen=True)
class PowerLaw:
    """Least squares of log gap against log size, every (L, H) a point: its rms over seeds.

    All points have the same weight: as many seeds give all of them the same relative noise.

    Attributes
    ----------
    slope : float
    interval : (float, float)
        95 %, by Student's t over the points; not less than the noise of so few seeds alone makes.
    constant : float
        C of gap ~ C size^slope.
    """

    slope: float
    interval: tuple[float, float]
    constant: float

    @classmethod
    def of(cls, points: Sequence[tuple[int, float]], seeds: int | None) -> PowerLaw:
        """Of sizes and gaps, each of so many seeds; None where nothing is random.

        Raises
        ------
        ValueError
            If there are too few sizes, or the points allow no exponent.
        """
        sizes = len({size for size, _ in points})
        if sizes < LEAST_SIZES:
            raise ValueError(f"{sizes} size(s), {LEAST_SIZES} or more are needed")
        size, gap = np.log(np.array(points, dtype=float)).T
        fit = scipy.stats.linregress(size, gap)
        slope = float(fit.slope)
        half = float(scipy.stats.t.ppf(0.975, len(size) - 2) * fit.stderr)
        if seeds is not None:  # the log of an rms over n normal numbers deviates by (2 n)^-1/2
            noise = (2.0 * seeds * len(size)) ** -0.5 / size.std()
            half = max(half, float(scipy.stats.norm.ppf(0.975)) * float(noise))
        if not half <= WIDEST:
            raise ValueError(f"the seeds allow no more than {slope:.1f} ± {half:.1f}")
        return cls(slope, (slope - half, slope + half), math.exp(fit.intercept))


def _size_of(gaps: np.ndarray) -> float:
    """Root mean square of what is finite; NaN where nothing is."""
    kept = gaps[np.isfinite(gaps)]
    return root_mean_square(kept) if len(kept) else math.nan


class LanguageResult:
    """Tables of the runs of a setting.

    Parameters
    ----------
    setting : LanguageSetting
    text : CharacterWindows
    found : dict LanguageCell -> what its run returned

    Attributes
    ----------
    limit : dict
        What `limit_run` returned, "bits" and "error" as arrays (steps,).
    bits : dict (L, H) -> array (seeds, steps)
        Held-out loss in bits per character; H = inf is the whole law, of one seed.
    rounding : float
        What the other dtype changes of the final loss of one run, in bits per character.
    fits : dict H -> PowerLaw or None
        Of the gap of the final loss to the limit's, in L.
    in_product : PowerLaw or None
        Of the gap to the whole law at the same depth, in L H.
    own, plain : Held
        The model of the whole law and a plain Transformer, at equal parameters.
    refused : list of str
        Fits that the data do not allow, with the reason.
    """

    def __init__(
        self, setting: LanguageSetting, text: CharacterWindows, found: dict[LanguageCell, dict]
    ):
        self.setting, self.text = setting, text
        self.found = {
            # of what is text nothing is a number
            cell: content
            | {n: numbers(content[n]) for n in ("bits", "error", "x_error") if n in content}
            for cell, content in found.items()
        }
        self.steps = setting.evaluated
        limit = self.found[LIMIT]
        self.limit = limit | {name: np.array(limit[name], float) for name in ("bits", "error")}
        self.bits = {
            (cell.depth, cell.heads or math.inf): np.array(self.found[cell]["bits"], float)
            for cell in size_cells(setting)
        }
        cell = rounding_cell(setting)
        other = self.found[cell]["bits"][0][0]
        self.rounding = abs(other - float(self.bits[cell.depth, cell.heads][0, -1]))
        self.depths, self.heads = sorted(setting.models.depths), sorted(setting.models.heads)
        self.refused: list[str] = []
        self.fits = {heads: self._fit_gap(heads) for heads in (*self.heads, math.inf)}
        self.in_product = self._fit_product()
        self.rates = list(self._best_rates())
        self.own, self.plain = self._held()

    @property
    def final(self) -> float:
        """The limit's loss after the last step."""
        return float(self.limit["bits"][-1])

    @property
    def floor(self) -> float:
        """What gaps of the final loss to the limit's cannot be told from."""
        return float(self.limit["error"][-1]) + self.rounding

    def gaps(self, depth: int, heads: float) -> np.ndarray:
        """Final loss less the limit's, by seed."""
        return self.bits[depth, heads][:, -1] - self.final

    def fluctuation(self, depth: int, heads: float) -> np.ndarray:
        """Final loss less that of the whole law at the same depth, by seed."""
        return self.bits[depth, heads][:, -1] - self.bits[depth, math.inf][0, -1]

    # ------------------------------------------------------------------ fits

    def _fit_gap(self, heads: float) -> PowerLaw | None:
        """Of the gap to the limit at one H, in L."""
        gaps = [(depth, _size_of(self.gaps(depth, heads))) for depth in self.depths]
        seeds = None if math.isinf(heads) else self.setting.models.seeds
        return self._power_law(f"H = {heads:g} in L", gaps, self.floor, seeds)

    def _fit_product(self) -> PowerLaw | None:
        """Of the gap to the whole law at the same depth, in L H."""
        cells = itertools.product(self.depths, self.heads)
        gaps = [(L * H, _size_of(self.fluctuation(L, H))) for L, H in cells]
        return self._power_law("all H in L H", gaps, self.rounding, self.setting.models.seeds)

    def _power_law(
        self, name: str, gaps: list[tuple[int, float]], floor: float, seeds: int | None
    ) -> PowerLaw | None:
        """Of what stands clear of the floor; or None, and why in `refused`."""
        # not what is NaN, nor anything above a floor that is
        clear = [(size, gap) for size, gap in gaps if gap >= FLOOR * floor and gap > 0.0]
        try:
            return PowerLaw.of(clear, seeds)
        except ValueError as reason:
            left = f" ({len(gaps) - len(clear)} cell(s) below {FLOOR:g} x {floor:.1e} left out)"
            self.refused.append(f"{name}: no fit, {reason}{left if len(clear) < len(gaps) else ''}")
            return None

    def _held(self) -> tuple[Held, Held]:
        """The model of the whole law, and the plain Transformer with about as many parameters."""

        def losses(cells: list[LanguageCell]) -> dict[float, float]:
            return {cell.lr: float(self.found[cell]["bits"][0][0]) for cell in cells}

        held, plain = compared(self.setting), plain_cells(self.setting)
        model, characters = self.setting.model, len(self.text.characters)
        own = {model.option("lr"): float(self.bits[held.depth, math.inf][0, -1])}
        own |= losses(own_cells(self.setting))
        ends = (2 * characters + model.tokens) * model.d
        return (
            Held.of(held.depth, held.parameters + ends, own),
            Held.of(plain[0].depth, self.found[plain[0]]["parameters"], losses(plain)),
        )

    def _best_rates(self) -> Iterator[BestRate]:
        lrs = self.setting.rates.rates(self.setting.model.option("lr"))
        for exponent in EXPONENTS:
            for depth in sorted(self.setting.rates.rate_depths):
                yield BestRate.of(exponent, depth, lrs, self.rate_losses(exponent, depth))

    def rate_losses(self, exponent: float, depth: int) -> list[float]:
        """Final losses by learning rate, rising."""
        rates = self.setting.rates
        lrs = rates.rates(self.setting.model.option("lr"))
        cells = (LanguageCell("rate", depth, rates.rate_heads, exponent, lr) for lr in lrs)
        return [self.found[cell]["bits"][0][0] for cell in cells]

    def rate_span(self, exponent: float) -> float | None:
        """By which factor the best learning rate changes from the least depth to the largest."""
        own = [best for best in self.rates if best.exponent == exponent]
        if len(own) < 2 or any(best.lr is None for best in own):
            return None
        return own[-1].lr / own[0].lr

    # ------------------------------------------------------------------ what the limit predicts

    def horizon(self, depth: int, heads: float) -> list[int | None]:
        """By seed, the last measured step up to which every loss is within 1 % of the limit's.

        The last step of all where that is so throughout; None where it is not even before training.
        """
        within = np.abs(self.bits[depth, heads] - self.limit["bits"]) <= WITHIN * np.abs(
            self.limit["bits"]
        )
        found = []
        for seed in within:
            count = len(seed) if seed.all() else int(seed.argmin())
            found.append(self.steps[count - 1] if count else None)
        return found

    @property
    def below_bigram(self) -> float:
        """By how much the limit and the worst size (mean over seeds) are below the bigram."""
        means = [losses[:, -1].mean() for losses in self.bits.values()]
        return self.text.bigram - float(np.max([*means, self.final]))  # NaN if one is

    @property
    def claims(self) -> bool:
        """Whether the models are good enough for anything to be said of them."""
        return self.below_bigram >= BELOW_BIGRAM  # not if it is NaN

    @property
    def limit_cost(self) -> float:
        """Evaluations of layers for the limit, in those of one deepest model of the whole law."""
        whole = LanguageCell("size", self.depths[-1], None)
        return self.limit["fields"] / self.found[whole]["fields"]

    def loss_rows(self) -> list[dict]:
        """One a size, seed and measured step, for losses.csv."""
        return [
            {"L": depth, "H": heads if math.isinf(heads) else int(heads), "seed": seed}
            | {"step": step, "bits": loss, "limit": limit, "limit_error": error}
            for (depth, heads), losses in self.bits.items()
            for seed, own in enumerate(losses.tolist())
            for step, loss, limit, error in zip(
                self.steps,
                own,
                self.limit["bits"].tolist(),
                self.limit["error"].tolist(),
                strict=True,
            )
        ]

    def rate_rows(self) -> list[dict]:
        """One a learning rate, for learning_rates.csv."""
        lrs = self.setting.rates.rates(self.setting.model.option("lr"))
        return [
            {"factor": FACTORS[best.exponent], "L": best.depth}
            | {"H": self.setting.rates.rate_heads, "lr": lr, "bits": loss}
            for best in self.rates
            for lr, loss in zip(lrs, self.rate_losses(best.exponent, best.depth), strict=True)
        ]

    def as_dict(self) -> dict:
        """The content of language.json."""
        return {
            "text": self.text.describe(),
            "limit": self.limit
            | {name: self.limit[name].tolist() for name in ("bits", "error")}
            | {"steps": list(self.steps), "cost": self.limit_cost},
            "rounding": self.rounding,
            "below_bigram": self.below_bigram,
            "claims": self.claims,
            "sizes": [
                {"L": depth, "H": heads, "bits": losses[:, -1].tolist()}
                | {"gaps": self.gaps(depth, heads).tolist()}
                | {"within": self.horizon(depth, heads)}
                for (depth, heads), losses in self.bits.items()
            ],
            "fits": [
                {"H": heads} | dataclasses.asdict(fit)
                for heads, fit in self.fits.items()
                if fit is not None
            ],
            "in_product": dataclasses.asdict(self.in_product) if self.in_product else None,
            "held": {
                name: dataclasses.asdict(held)
                for name, held in (("own", self.own), ("plain", self.plain))
            },
            "rates": [dataclasses.asdict(best) for best in self.rates],
            "rate_spans": {FACTORS[e]: self.rate_span(e) for e in EXPONENTS},
            "refused": self.refused,
        }
