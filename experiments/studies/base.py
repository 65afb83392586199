"""What every study of a clause of the theorem shares: its command, its sizes, its sweeps."""

from __future__ import annotations

import abc
import dataclasses
import inspect
from typing import Annotated, ClassVar

from ipslimit.checks import require_int, require_real, shown
from ipslimit.measure.rates import RateFit, RateFits, Share

from ..frame.command import Command
from ..frame.outcome import Outcome
from ..study import Flat, Setting, Sizes, Study
from ..sweep import Sweep, SweepResult, run_sweeps
from .finding import Finding, Measured, outcome


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
            if getattr(self.setting, name) != getattr(default, name):
                raise ValueError(
                    f"{name} must be left out of the study {self.NAME}, which compares several; "
                    f"got {shown(getattr(self.setting, name))}. {remedy}"
                )
        self.setting.check()
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

    def study(self, setting: Setting, sizes: Sizes | None = None, constant: bool = False) -> Study:
        """A sweep's study in this one's sizes."""
        return Study(setting, sizes or self.sizes, self.tol, constant)

    def sweep(self, studies: list[Study], progress: bool = True) -> list[SweepResult]:
        """All of the studies, behind one progress bar."""
        where = (self.folder, self.device, self.chosen_engine(), self.memory_bytes)
        sweeps = [Sweep(study, *where) for study in studies]
        return run_sweeps(sweeps, self.NAME, progress)

    def finding(self, sentence: str, **parts) -> Finding:
        """A `Finding` of this study."""
        settings = dataclasses.asdict(self) | dataclasses.asdict(self.sizes)
        settings["setting"] = {k: v for k, v in settings["setting"].items() if k not in self.VARIED}
        where = {f.name for f in dataclasses.fields(Command)} - {"quick"}  # decides no number
        settings = {k: v for k, v in settings.items() if k not in where}
        settings |= parts.pop("settings", {})
        parts = {"tables": [], "pictures": [], "numbers": {}, "notes": []} | parts
        return Finding(
            self.NAME, self.TITLE, self.design(), self.THEORY, sentence, settings=settings, **parts
        )


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


# What a table says of an exponent of a fluctuation besides: how it stands to -1/2.
SHARES = ("verdict", "share bound", "expected bound", "bend")


def share_columns(share: Share | None) -> dict:
    """Verdict, bound on the slower part's share at the largest L, the bound expected, the bend."""
    if share is None:
        return dict.fromkeys(SHARES)
    bounds = (share.upper[2], share.expected[2]) if share.upper else (None, None)
    return dict(zip(SHARES, (share.verdict, *bounds, share.bend), strict=True))


def measured_fit(fits: RateFits, what: str, theory: str, fit: RateFit) -> Measured:
    """The line of the report on a fit; of a fluctuation's it says how it stands to -1/2."""
    return Measured.fit(what, theory, fit, fits.share(fit))


def told(fits: RateFits, fit: RateFit) -> str:
    """A fit in a sentence: of a fluctuation's the verdict stands behind the interval."""
    share = fits.share(fit)
    number = Measured.fit("", "", fit).number
    return number if share is None else f"{number} ({share.brief})"


def fit_rows(results: dict[str, SweepResult], key: str) -> tuple[list[str], list[dict]]:
    """Columns and rows of all fits that take in every cell, for a table; `key` names the sweeps."""
    columns = [
        key,
        "step",
        "variable",
        "term",
        "norm",
        "set",
        "in",
        "exponent",
        "low",
        "high",
        "interval",
        "window",
        "seeds",
        *SHARES,
        "note",
    ]
    rows = []
    for name, result in results.items():
        for fit in result.fits.fits:
            if fit.at not in ("all", "inf"):
                continue
            row = {c: getattr(fit, c) for c in ("step", "variable", "term", "norm", "set", "note")}
            row |= {key: name, "in": fit.size, "exponent": fit.exponent, "low": fit.interval[0]}
            row |= {"high": fit.interval[1], "interval": fit.kind, "seeds": fit.seeds}
            row |= {"window": f"{fit.window[0]:g}..{fit.window[-1]:g}"}
            rows.append(row | share_columns(result.fits.share(fit)))
    return columns, rows


def find_fit(
    result: SweepResult, step: int, variable: str, term: str, size: str, norm="rms", where="train"
):
    """The fit over all cells, or None where it was refused."""
    at = "inf" if term == "bias" else "all"
    found = result.fits.select(
        step=step, variable=variable, term=term, size=size, norm=norm, set=where, at=at
    )
    return found[0] if found else None
