"""The table at the top of a report: clause, theory, what was measured, and how they agree."""

from __future__ import annotations

import html
import math
import re
from typing import NamedTuple

# Lines of a study at most: its section has them all.
MOST = 6
# Pixels of a bar, and what exponents lie within, so that their bars can be compared.
WIDTH, HEIGHT, EDGE = 170, 18, 4
EXPONENTS = (-1.25, 0.25)
HEAD = """<tr><th>clause</th><th>quantity</th><th>theory</th><th>measured</th>
<th>interval against theory</th><th>verdict</th></tr>"""


class Theory(NamedTuple):
    """A number that theory names: a value ("") or a bound ("at most", "at least")."""

    kind: str
    value: float


def head_table(named: dict[str, dict]) -> str:
    """Of findings by the names of their sections."""
    rows = [row for anchor, finding in named.items() for row in _rows(anchor, finding)]
    return f'<div class="wide"><table class="head">{HEAD}\n' + "\n".join(rows) + "</table></div>"


def chosen(measured: list[dict]) -> list[dict]:
    """One line of each quantity, and of its steps the last: the first one that is of that."""
    best: dict[str, tuple[int, dict]] = {}
    for line in measured:
        quantity = line["what"].partition(",")[0]
        step = re.search(r"\bstep (\d{1,9})\b", line["what"])
        key = int(step[1]) if step else -1
        if quantity not in best or key > best[quantity][0]:
            best[quantity] = key, line
    return [line for _, line in best.values()][:MOST]


def theory_of(text: str) -> Theory | None:
    """The number in the words of theory, or None where there is none."""
    number = r"([-+]?\d{1,9}(?:\.\d{1,9})?)(?:/(\d{1,9}))?"
    found = re.fullmatch(rf"(at most|at least|)\s*{number}(?:,.*)?", text.strip(), re.S)
    if found is None or (found[3] and not int(found[3])):
        return None
    return Theory(found[1], float(found[2]) / int(found[3] or 1))


def verdict(theory: Theory | None, interval: tuple[float, float] | None, words: str = "") -> str:
    """How the interval stands to theory, and the study's own verdict behind it."""
    judged = ""
    if theory is not None and interval is not None:
        low, high = interval
        if theory.kind == "":
            judged = "agrees" if low <= theory.value <= high else "departs"
        else:
            sign = 1.0 if theory.kind == "at most" else -1.0
            low, high = sorted((sign * (low - theory.value), sign * (high - theory.value)))
            judged = "holds" if high <= 0.0 else "consistent" if low <= 0.0 else "exceeded"
    return "; ".join(filter(None, (judged, words.partition(" (")[0])))


def bar(theory: Theory | None, value: float, interval: tuple[float, float] | None) -> str:
    """A point with its interval against theory's dashed line, as SVG; a bound's side is shaded."""
    low, high = interval or (value, value)
    points = [low, high, value, *([theory.value] if theory else [])]
    left, right = min(points), max(points)
    if EXPONENTS[0] <= left and right <= EXPONENTS[1]:
        left, right = EXPONENTS
    else:
        margin = 0.15 * (right - left) or 1.0
        left, right = left - margin, right + margin

    def at(number: float) -> str:
        share = (number - left) / (right - left)
        return f"{EDGE + (WIDTH - 2 * EDGE) * share:.1f}"

    middle, drawn = HEIGHT / 2, []
    if theory is not None:
        line = at(theory.value)
        if theory.kind:
            start = 0.0 if theory.kind == "at most" else float(line)
            width = float(line) if theory.kind == "at most" else WIDTH - start
            drawn.append(f'<rect x="{start:.1f}" y="0" width="{width:.1f}" height="{HEIGHT}"/>')
        drawn.append(f'<line class="theory" x1="{line}" x2="{line}" y1="0" y2="{HEIGHT}"/>')
    drawn.append(f'<line x1="{at(low)}" x2="{at(high)}" y1="{middle}" y2="{middle}"/>')
    drawn.append(f'<circle cx="{at(value)}" cy="{middle}" r="3"/>')
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg class="bar" role="img" {size}>{"".join(drawn)}</svg>'


def _rows(anchor: str, finding: dict) -> list[str]:
    lines, escape = chosen(finding["measured"]), html.escape
    clause = f'<a href="#{escape(anchor)}">{escape(finding["title"])}</a>'
    if not lines:
        return [f'<tr><td>{clause}</td><td colspan="5">nothing could be measured</td></tr>']
    rows = []
    for i, line in enumerate(lines):
        theory, value = theory_of(line["theory"]), _number(line.get("value"))
        interval = _interval(line.get("interval"))
        words = line.get("verdict")
        cells = [escape(line["what"]), escape(line["theory"])]
        cells += [escape(line["text"].partition(":")[0])]
        cells += ["" if value is None else bar(theory, value, interval)]
        cells += [escape(verdict(theory, interval, words if isinstance(words, str) else ""))]
        first = "" if i else f'<td rowspan="{len(lines)}">{clause}</td>'
        rows.append(f"<tr>{first}" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return rows


def _number(value: object) -> float | None:
    """What is a finite number of moderate size; files may hold anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and abs(value) < 1e15 else None


def _interval(value: object) -> tuple[float, float] | None:
    ends = [_number(end) for end in value] if isinstance(value, list) else []
    return tuple(sorted(ends)) if len(ends) == 2 and None not in ends else None
