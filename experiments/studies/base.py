"""What every study of a clause of the theorem shares: its command, its sizes, its sweeps."""

from __future__ import annotations

import abc
import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, ClassVar

from ipslimit.checks import require_int, require_real, shown
from ipslimit.measure.parameters import theta_names
from ipslimit.measure.rates import RateFit, RateFits, Share, equivalence

from ..frame.command import Command
from ..frame.fields import Distinct
from ..frame.outcome import Outcome
from ..plots import caption
from ..settings import Flat, Setting, Sizes, SweepSetting
from ..sweep import Sweep, SweepResult, run_sweeps
from .finding import Finding, Measured, number_of, outcome

NORMS = ("rms", "sup")
# Of [GR], after training: (term, in) -> the bound as text, and the exponents that are drawn.
BOUND = {
    ("bias", "L"): "at most -1",
    ("fluctuation", "L"): "at most -1/3",
    ("fluctuation", "H"): "at most -1/2",
}
GUIDES = {
    ("bias", "L"): (-1.0,),
    ("fluctuation", "L"): (-0.5, -1 / 3),
    ("fluctuation", "H"): (-0.5,),
}
UNKNOWN = "no statement known to us"
# Of tied layers: a draw is the same in all of them.
SHARED = "0, as layers share one draw"
# Why a study does not take them.
UNTIED = {"tied": "whose theory is of layers that draw for themselves"}


@dataclasses.dataclass(frozen=True)
class ClauseStudy(Command):
    """Settings and sizes of one study; sizes that are not given follow from `quick`."""

    quick: bool = False
    """Sizes that end in about a minute on two cores (default: in at most ten)."""
    setting: Annotated[Setting, Flat] = Setting()
    depths: tuple[int, ...] | None = None
    """Depths L (default: by size)."""
    heads: tuple[int, ...] | None = None
    """Heads per layer H (default: by size)."""
    seeds: int | None = None
    """Independent draws of the heads (default: by size)."""
    root_seed: int = 0
    """The draws of a seed depend on (root seed, L, H, seed) alone."""
    tol: float = 1e-6
    """Largest error wanted of the limit's x and p."""

    TITLE: ClassVar[str]
    THEORY: ClassVar[str]
    LEAST_SEEDS: ClassVar[int] = 2  # seeds are what intervals come from
    VARIED: ClassVar[dict[str, str]] = {}  # settings that are not one number here -> what to do
    WITHOUT: ClassVar[dict[str, str]] = {}  # settings that it does not take -> why
    QUICK: ClassVar[Sizes]
    FULL: ClassVar[Sizes]

    @classmethod
    def design(cls) -> str:
        """How it is measured, and what is held fixed: the docstring of the study."""
        return inspect.getdoc(cls)

    @property
    def sizes(self) -> Sizes:
        """The transformers compared with the limit."""
        size = self.QUICK if self.quick else self.FULL
        given = {"depths": self.depths, "heads": self.heads, "seeds": self.seeds}
        given = {name: value for name, value in given.items() if value is not None}
        # cells besides the product belong to the sizes they were chosen for
        more = () if "depths" in given or "heads" in given else size.more or ()
        return dataclasses.replace(size, **given, root_seed=self.root_seed, more=more)

    def chosen(self, name: str, quick, full):
        """A field's value, or by size where it is None."""
        value = getattr(self, name)
        return value if value is not None else (quick if self.quick else full)

    def check(self) -> None:
        """Refuse bad values with a ValueError or TypeError that names the setting."""
        default = type(self).__dataclass_fields__["setting"].default
        for name, remedy in self.VARIED.items():
            if not self.setting.has(name):
                raise ValueError(
                    f"rule must have the option {name}, which the study {self.NAME} varies; got "
                    f"{shown(self.setting.rule)}. Use {default.rule}."
                )
            if self.setting.option(name) != default.option(name):
                raise ValueError(
                    f"{name} must be left out of the study {self.NAME}, which compares several; "
                    f"got {shown(self.setting.option(name))}. {remedy}"
                )
        self.setting.check()
        reasons = {n: f"of the study {self.NAME}, {why}" for n, why in self.WITHOUT.items()}
        self.setting.leave_out({n: (why, "the study rates") for n, why in reasons.items()})
        self.sizes.check()
        require_int("seeds", self.sizes.seeds, self.LEAST_SEEDS)
        require_int("root_seed", self.root_seed, 0)
        require_real("tol", self.tol, 0.0, include_low=False)
        super().check()

    def measure(self, progress: bool = True) -> Outcome:
        return outcome(self.find(progress), self.device)

    @abc.abstractmethod
    def find(self, progress: bool = True) -> Finding:
        """Measure; writes nothing but the cells."""

    def study(
        self, setting: Setting, sizes: Sizes | None = None, constant: bool = False
    ) -> SweepSetting:
        """A sweep's study in this one's sizes."""
        return SweepSetting(setting, sizes or self.sizes, self.tol, constant)

    def sweep(self, studies: list[SweepSetting], progress: bool = True) -> list[SweepResult]:
        """All of the studies, behind one progress bar."""
        where = (self.folder, self.device, self.chosen_engine(), self.memory_bytes)
        sweeps = [Sweep(study, *where) for study in studies]
        return run_sweeps(sweeps, self.NAME, progress)

    def finding(self, sentence: str, **parts) -> Finding:
        """A `Finding` of this study; tables without rows are left out."""
        settings = dataclasses.asdict(self) | dataclasses.asdict(self.sizes)
        settings["setting"] = self.setting.as_dict(without=self.VARIED)
        where = {f.name for f in dataclasses.fields(Command)} - {"quick"}  # decides no number
        settings = {k: v for k, v in settings.items() if k not in where}
        settings |= parts.pop("settings", {})
        parts = {"tables": [], "pictures": [], "numbers": {}, "notes": []} | parts
        parts["tables"] = [table for table in parts["tables"] if table.rows]
        return Finding(
            self.NAME, self.TITLE, self.design(), self.THEORY, sentence, settings=settings, **parts
        )

    def words(self, *settings: Setting) -> str:
        """The heading of figures: what is fixed, which is what these settings share."""
        return f"{shared_caption(settings or (self.setting,))}; {self.sizes.seeds} seeds"


def variables_of(setting: Setting) -> tuple[str, ...]:
    """What errors are measured of: x, p, and the parameters of each family of units."""
    return ("x", "p", *theta_names(setting.families).values())


def is_theta(variable: str) -> bool:
    """Whether a variable is the parameters, of one family or of all."""
    return variable.partition("_")[0] == "theta"


def require_distinct(name: str, values: Sequence[float]) -> None:
    """Refuse values that are not positive, or named twice, or none at all."""
    for value in values:
        require_real(name, value, 0.0, include_low=False)
    Distinct().check(name, values)


def shared_caption(settings: Sequence[Setting]) -> str:
    """The settings in one line, without what they differ in."""
    first, *others = (caption(setting) for setting in settings)
    others = [re.split("[,;] ", other) for other in others]
    groups = (
        [part for part in group.split(", ") if all(part in other for other in others)]
        for group in first.split("; ")
    )
    return "; ".join(", ".join(group) for group in groups if group)


def notes_of(
    results: dict[str, SweepResult], sizes="LH", variables: Sequence[str] = ()
) -> list[str]:
    """What went wrong, and fits that could not be had, by the name of the sweep."""
    return sweep_notes(results) + [
        (f"{name}: " if name else "") + why
        for name, result in results.items()
        for why in refusals(result, sizes, variables)
    ]


def sweep_notes(results: dict[str, SweepResult]) -> list[str]:
    """What went wrong, by the name of the sweep."""
    notes = []
    for name, result in results.items():
        prefix = f"{name}: " if name else ""
        if result.limit["status"] != "converged":
            notes.append(f"{prefix}limit: {result.limit['message']}")
        if result.runs["diverged"]:
            diverged, total = result.runs["diverged"], result.runs["total"]
            notes.append(f"{prefix}{diverged} of {total} runs diverged; they are left out of means")
        notes += [prefix + text for text in result.not_linear()]
        notes += [f"{prefix}damaged result file: {text}" for text in result.damaged]
    return notes


def refusals(result: SweepResult, sizes: str, variables: Sequence[str]) -> list[str]:
    """Fits over all cells that could not be had, with the reason, in the sizes that were varied.

    Of these variables, or of all.
    """
    return [
        f"step {r['step']} {r['variable']} {r['term']} in {r['in']} ({r['norm']}, {r['set']}): "
        f"no fit, {r['reason']}"
        for r in result.fits.refused
        if r["at"] in ("all", "inf")
        and r["in"] in sizes
        and (not variables or r["variable"] in variables)
        # parameters have no error before the first step
        and not (r["step"] == 0 and is_theta(r["variable"]))
    ]


# What a table says of an exponent of a fluctuation besides: how it stands to -1/2.
SHARES = ("verdict", "share bound", "expected bound", "bend")


def share_columns(share: Share | None) -> dict:
    """Verdict, bound on the slower part's share at the largest L, the bound expected, the bend."""
    if share is None:
        return dict.fromkeys(SHARES)
    bounds = (share.upper[2], share.expected[2]) if share.upper else (None, None)
    return dict(zip(SHARES, (share.verdict, *bounds, share.bend), strict=True))


def held_against(fit: RateFit, theory: float) -> dict:
    """What a table says of an exponent and of how its interval stands to the one of theory."""
    low, high = fit.interval
    found = {"theory": theory, "exponent": fit.exponent, "low": low, "high": high}
    return found | {"verdict": equivalence((low - theory, high - theory))}


def tally(rows: Sequence[dict]) -> str:
    """Of rows of `held_against`, term by term: whose intervals hold it, and what they decide."""
    parts = []
    for term, size in BOUND:
        own = [row for row in rows if (row["term"], row["in"]) == (term, size)]
        held = sum(row["low"] <= row["theory"] <= row["high"] for row in own)
        counts = Counter(row["verdict"] for row in own).most_common()
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts)
        if own:
            theory = f"{own[0]['theory']:g} lies in {held} of {len(own)} intervals"
            parts.append(f"{term} in {size}: {theory} ({told})")
    return "; ".join(parts) or "none could be fitted"


def measured_fit(fits: RateFits, what: str, theory: str, fit: RateFit) -> Measured:
    """The line of the report on a fit; of a fluctuation's it says how it stands to -1/2."""
    return Measured.fit(what, theory, fit, fits.share(fit))


def measured_fits(
    result: SweepResult, step: int, variables: Sequence[str], about: str = ""
) -> list[Measured]:
    """Lines of the report on the exponents over all cells after training (rms)."""
    return [
        measured_fit(
            result.fits,
            f"{about}{term} in {size}, {variable}, rms, step {step}",
            bound_of(result, variable, term, size),
            fit,
        )
        for term, size in BOUND
        for variable in variables
        if (fit := find_fit(result, step, variable, term, size))
    ]


def bound_of(result: SweepResult, variable: str, term: str, size: str) -> str:
    """What bounds an exponent after training, as text."""
    if is_theta(variable):
        return UNKNOWN
    return SHARED if result.proved[term, size] == 0.0 else BOUND[term, size]


def told(fits: RateFits, fit: RateFit) -> str:
    """A fit in a sentence: of a fluctuation's the verdict stands behind the interval."""
    share = fits.share(fit)
    return number_of(fit) if share is None else f"{number_of(fit)} ({share.brief})"


def fit_rows(results: dict[str, SweepResult], key: str = "") -> list[dict]:
    """Rows of a table of all fits that take in every cell; `key` is what the sweeps differ in."""
    rows = []
    for name, result in results.items():
        for fit in result.fits.fits:
            if fit.at not in ("all", "inf"):
                continue
            row = {key: name} if key else {}
            row |= {c: getattr(fit, c) for c in "step variable term norm set".split()}
            row |= {"in": fit.size, "exponent": fit.exponent}
            row |= {"low": fit.interval[0], "high": fit.interval[1], "interval": fit.kind}
            row |= {"window": f"{fit.window[0]:g}..{fit.window[-1]:g}", "seeds": fit.seeds}
            rows.append(row | share_columns(result.fits.share(fit)) | {"note": fit.note})
    return rows


def find_fit(
    result: SweepResult, step: int, variable: str, term: str, size: str, norm="rms", where="train"
):
    """The fit over all cells, or None where it was refused."""
    at = "inf" if term == "bias" else "all"
    found = result.fits.select(
        step=step, variable=variable, term=term, size=size, norm=norm, set=where, at=at
    )
    return found[0] if found else None
