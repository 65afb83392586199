"""What a study found: numbers with intervals, tables, figures, one sentence; and its files."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ipslimit.measure.rates import RateFit, Share, Trend

from ..frame.outcome import Outcome
from ..provenance import provenance
from ..store import DamagedFile, require_form
from ..together import read_json, read_together

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = "finding.json"
# What the page shows of a finding, for reading it back.
FORM = {
    **dict.fromkeys(("study", "title", "design", "theory", "sentence"), str),
    "notes": [str],
    "settings": dict,
    "versions": dict,
    "measured": [dict.fromkeys(("what", "theory", "text", "kind"), str)],
    "tables": [{"title": str, "columns": [str], "rows": [dict]}],
    "pictures": [{"file": str, "caption": str}],
}
PNG = b"\x89PNG\r\n\x1a\n"


@dataclasses.dataclass(frozen=True)
class Measured:
    """One line of the report: what was measured, what theory says, the value and its interval."""

    what: str
    theory: str
    value: float
    interval: tuple[float, float] | None = None
    kind: str = "95 % interval"
    verdict: str = ""

    @classmethod
    def fit(
        cls, what: str, theory: str, fit: RateFit | Trend, share: Share | None = None
    ) -> Measured:
        """Of a fit; with its share, a fluctuation's says how it stands to -1/2."""
        if isinstance(fit, Trend):
            return cls(what, theory, fit.slope, tuple(fit.interval))
        kind = cls.kind if fit.kind == "confidence interval" else fit.kind
        verdict = "" if share is None else str(share)
        return cls(what, theory, fit.exponent, tuple(fit.interval), kind, verdict)

    @classmethod
    def row(
        cls, what: str, theory: str, row: dict, of: str = "exponent", kind: str = ""
    ) -> Measured:
        """Of a table's row that has `of` with its "low" and "high"."""
        interval = None if row["low"] is None else (row["low"], row["high"])
        return cls(what, theory, row[of], interval, kind or cls.kind)

    def __str__(self) -> str:
        return f"{self.number}: {self.verdict}" if self.verdict else self.number

    @property
    def number(self) -> str:
        """The value and its interval as text."""
        return number(self.value, *(self.interval or (None, None)))


def number(value: float, low: float | None = None, high: float | None = None) -> str:
    """A value and its interval as text: "-0.51 [-0.55, -0.47]"."""
    if low is None or high is None:
        return f"{value:.3g}"
    # as many digits as the interval deserves, at least two decimals
    width = high - low
    digits = 2 if not 0 < width < 0.02 else min(4, 1 - math.floor(math.log10(width)))
    # + 0.0: no minus sign before a zero
    value, low, high = (f"{round(v, digits) + 0.0:.{digits}f}" for v in (value, low, high))
    return f"{value} [{low}, {high}]"


def number_of(fit: RateFit | Trend) -> str:
    """A fit's exponent or slope and its interval as text."""
    return Measured.fit("", "", fit).number


def number_in(row: dict, of: str = "exponent") -> str:
    """What a table's row has at `of`, with its "low" and "high", as text."""
    return number(row[of], row["low"], row["high"])


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text and numbers under a title; written as CSV, shown in the report."""

    name: str
    title: str
    rows: list[dict]

    @property
    def columns(self) -> list[str]:
        """The names of the first row's values, which every row has."""
        return list(self.rows[0]) if self.rows else []


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure with the text that belongs under it."""

    name: str
    figure: Figure
    caption: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finished study.

    Attributes
    ----------
    study, title, theory : str
    design : str
        How it is measured, and what is held fixed.
    sentence : str
        What was found, composed from the numbers.
    measured : list of Measured
    tables : list of Table
    pictures : list of Picture
    numbers : dict
        Everything else that belongs into the JSON file.
    settings : dict
        All that decides the numbers.
    notes : list of str
        Diverged runs, missed tolerances, damaged cells, refused fits: what a reader must know.
    """

    study: str
    title: str
    design: str
    theory: str
    sentence: str
    measured: list[Measured]
    tables: list[Table]
    pictures: list[Picture]
    numbers: dict
    settings: dict
    notes: list[str]


def counted_steps(count: int) -> str:
    """ "1 step", "5 steps"."""
    return f"{count} step" if count == 1 else f"{count} steps"


def outcome(finding: Finding, device: object = "auto") -> Outcome:
    """finding.json, a CSV per table, a PNG and a PDF per figure, and the summary.

    `device` computed the numbers.
    """
    return Outcome(
        "finding",
        as_dict(finding) | provenance(device),
        summary(finding),
        {picture.name: lambda own=picture: own.figure for picture in finding.pictures},
        tables={table.name: (table.rows, table.columns) for table in finding.tables},
    )


def read_finding(folder: Path) -> dict:
    """What the `outcome` of a study wrote: finding.json, with the "content" of every picture.

    Raises
    ------
    ValueError
        If there is none, or any of its files is not what was written, or it has another form.
    """
    remedy = "Run the study again; finished cells are kept."
    try:
        files = read_together(folder, "finding")
        if FILE not in files:
            raise DamagedFile(f"finding.sha256 does not name {FILE}")
        finding = read_json(files[FILE])
        require_form(finding, FORM, FILE)
        for picture in finding["pictures"]:
            content = files.get(picture["file"], b"")
            if not content.startswith(PNG):
                raise ValueError(f"{picture['file']!r} is no picture that finding.sha256 names")
            picture["content"] = content
    except ValueError as error:
        reason = str(error)
        if not os.path.exists(folder / FILE):
            reason, remedy = f"it has no {FILE}", f"Run `ipslimit study NAME --out {folder}`."
        raise ValueError(
            f"folders must hold finished studies; {str(folder)!r} does not: {reason}. {remedy}"
        ) from None
    return finding


def as_dict(finding: Finding) -> dict:
    """The content of finding.json, but for what it was made with."""
    names = "study title design theory sentence notes settings numbers".split()
    return {name: getattr(finding, name) for name in names} | {
        "measured": [dataclasses.asdict(m) | {"text": str(m)} for m in finding.measured],
        "tables": [
            {"name": t.name, "title": t.title, "columns": t.columns, "rows": t.rows}
            for t in finding.tables
        ],
        "pictures": [{"file": f"{p.name}.png", "caption": p.caption} for p in finding.pictures],
    }


def summary(finding: Finding) -> str:
    """The finding as text a person can read."""
    lines = [finding.title, f"theory: {finding.theory}", ""]
    width = max((len(m.what) for m in finding.measured), default=0)
    for m in finding.measured:
        kind = "" if m.kind == Measured.kind else f"  ({m.kind})"
        lines.append(f"  {m.what.ljust(width)}  {m}{kind}  theory: {m.theory}")
    lines += ["", finding.sentence]
    lines += [f"note: {note}" for note in finding.notes]
    return "\n".join(lines)
