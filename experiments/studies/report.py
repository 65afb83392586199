"""One self-contained HTML page of what several studies found."""

from __future__ import annotations

import base64
import dataclasses
import html
import json
from pathlib import Path

import tyro

from ..settings import StudyError
from ..store import prepare_folder, replacing
from .finding import Measured, read_finding
from .report_head import head_table

# Characters of a finding that is read at once.
SHORT = 300
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #1a1a1a; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 3rem; border-top: 1px solid #ccc; padding-top: 1rem; }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; height: auto; }
figcaption, .note, .theory { color: #444; font-size: 0.9rem; }
.found { border-left: 4px solid #0072B2; padding-left: 0.8rem; }
.scroll { overflow-x: auto; max-height: 32rem; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.15rem 0.6rem; text-align: left; border-bottom: 1px solid #e3e3e3; }
th { position: sticky; top: 0; background: #fff; }
.wide { overflow-x: auto; } .head td { vertical-align: middle; } .head th { white-space: nowrap; }
.bar { display: block; } .bar line { stroke: #0072B2; stroke-width: 2; } .bar rect { fill: #eee; }
.bar .theory { stroke: #555; stroke-width: 1; stroke-dasharray: 3 2; }
.bar circle { fill: #0072B2; }
pre { font-size: 0.8rem; overflow-x: auto; } summary { cursor: pointer; margin: 0.5rem 0; }
@media print { details { display: none; } .scroll { max-height: none; } }
"""


@dataclasses.dataclass(frozen=True)
class ReportCommand:
    """One self-contained HTML page of figures, tables and settings of finished studies."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders that `ipslimit study` has written."""
    out: Path = Path("report.html")
    """The page."""

    def check(self) -> None:
        if not self.folders:
            raise ValueError(
                "folders must name at least one study's folder; got none. Run `ipslimit study` "
                "first, and give its --out."
            )
        for folder in self.folders:
            read_finding(folder)
        if self.out.is_dir():
            raise ValueError(
                f"out must be a file; got the folder {str(self.out)!r}. Use e.g. "
                f"--out {self.out / 'report.html'}."
            )
        prepare_folder(self.out.parent)

    def run(self) -> None:
        print(self.written())

    def written(self) -> str:
        """A line of what it has written."""
        try:
            findings = [read_finding(folder) for folder in self.folders]
        except ValueError as error:  # since they were checked
            raise StudyError(str(error)) from None
        text = report(findings)
        with replacing(self.out) as file:
            file.write(text)
        return f"written: {self.out} ({len(self.folders)} studies, {len(text) / 1e6:.1f} MB)"


def report(findings: list[dict]) -> str:
    """The page, with its figures inside."""
    named = {_anchor(i, finding): finding for i, finding in enumerate(findings)}
    sections = "\n".join(_section(*parts) for parts in named.items())
    versions = sorted({f"{k} {v}" for f in findings for k, v in f["versions"].items()})
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ipslimit: the theorem, clause by clause</title>
<style>{STYLE}</style>
</head>
<body>
<h1>The large-depth limit of transformers, clause by clause</h1>
<p>How trained transformers with branches scaled by 1/L approach their mean-field limit.</p>
{head_table(named)}
<p class="note">A line of every quantity, after the last step; sections have them all, with figures
and settings. Dots are values and lines their intervals (95 %, or of the kind that the section
names), dashes what theory says, shades the side that its bound allows. Made with
{_text(", ".join(versions))}.</p>
{sections}
</body>
</html>
"""


def _anchor(i: int, finding: dict) -> str:
    """A name of its own, even where a study comes twice."""
    return f"{finding['study']}-{i + 1}"


def _section(anchor: str, finding: dict) -> str:
    pictures = "\n".join(
        f'<figure><img src="data:image/png;base64,{_encoded(picture["content"])}" '
        f'alt="{_text(picture["caption"])}"><figcaption>{_text(picture["caption"])}</figcaption>'
        "</figure>"
        for picture in finding["pictures"]
    )
    measured = [
        {
            "quantity": m["what"],
            "theory": m["theory"],
            "measured": m["text"],
            "interval": "95 %" if m["kind"] == Measured.kind else m["kind"],
        }
        for m in finding["measured"]
    ]
    notes = "".join(f'<p class="note">Note: {_text(note)}</p>' for note in finding["notes"])
    tables = "\n".join(
        f"<details><summary>{_text(table['title'])} ({len(table['rows'])} rows)</summary>"
        f"{_table(table['columns'], table['rows'])}</details>"
        for table in finding["tables"]
    )
    settings = json.dumps(finding["settings"], indent=1)
    return f"""<section id="{_text(anchor)}">
<h2>{_text(finding["title"])}</h2>
<p class="theory">Theory: {_text(finding["theory"])}</p>
{_table(["quantity", "theory", "measured", "interval"], measured)}
{_in_words(finding["sentence"])}
{pictures}
{notes}
{tables}
<details><summary>How it is measured</summary><pre>{_text(finding["design"])}</pre></details>
<details><summary>Settings</summary><pre>{_text(settings)}</pre></details>
</section>"""


def _in_words(sentence: str) -> str:
    """What was found; folded where it is mostly numbers that the table above has."""
    text = f'<p class="found">{_text(sentence)}</p>'
    if len(sentence) <= SHORT:
        return text
    return f"<details><summary>In words</summary>{text}</details>"


def _table(columns: list[str], rows: list[dict]) -> str:
    head = "".join(f"<th>{_text(column)}</th>" for column in columns)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{_text(_shown(row.get(c)))}</td>" for c in columns) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>'


def _shown(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _text(value: object) -> str:
    return html.escape(str(value))


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()
