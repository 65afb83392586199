"""The table at the top of a report: a line a quantity, a bar where it belongs, and the verdict."""

from html.parser import HTMLParser

import pytest

from ipslimit.experiments.studies.report import report
from ipslimit.experiments.studies.report_head import Theory, bar, chosen, theory_of, verdict


def measured(what, theory, value=-0.5, interval=(-0.6, -0.4), verdict=""):
    text = f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
    text += f": {verdict}" if verdict else ""
    parts = {"what": what, "theory": theory, "value": value, "interval": list(interval)}
    return parts | {"kind": "95 % interval", "verdict": verdict, "text": text}


LINES = [
    measured("bias in L, x, rms, step 0", "-1", -1.0, (-1.01, -0.99)),
    measured("bias in L, x, rms, step 5", "at most -1", -0.9, (-0.91, -0.89)),
    measured("bias in L, p, rms, step 5", "at most -1", -0.99, (-1.01, -0.97)),
    measured("fluctuation in L, x, rms, step 5", "at most -1/3", verdict="-1/2 held (at 9 %)"),
    measured("fluctuation in L, theta, rms, step 5", "no statement known to us"),
    measured("distance of sums", "0, as layers share one draw", 0.2, (0.1, 0.3)),
]
FINDING = {
    "study": "rates",
    "title": "Rates & depth",
    "design": "design",
    "theory": "theory",
    "sentence": "numbers, " * 99,
    "notes": [],
    "settings": {},
    "versions": {"ipslimit": "1"},
    "measured": LINES,
    "tables": [],
    "pictures": [],
}


class Page(HTMLParser):
    """Cells of the first table, and what stands in front of everything else."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.tables, self.shapes, self.before, self.inside = [], 0, [], 0, False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tables += tag == "table"
        self.before += tag == "p" and not self.tables
        if tag == "tr" and self.tables == 1:
            self.rows.append([])
            self.shapes.append([])
        if tag in ("td", "th") and self.tables == 1:
            self.rows[-1].append("")
            self.inside = True
        if tag in ("line", "circle", "rect"):
            self.shapes[-1].append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] += data.strip()


def test_a_page_begins_with_its_table():
    page = Page(report([FINDING]))
    assert page.before == 1  # what it is about, in one sentence
    head, *rows = page.rows
    names = "clause, quantity, theory, measured, interval against theory, verdict"
    assert head == names.split(", ")
    assert [row[-1] for row in rows[:3]] == ["exceeded", "holds; -1/2 held", "departs"]
    assert rows[0][:4] == [
        "Rates & depth",
        "bias in L, x, rms, step 5",
        "at most -1",
        "-0.90 [-0.91, -0.89]",
    ]
    assert len(rows) == 3 and [len(row) for row in rows] == [6, 5, 5]
    assert [len(shapes) for shapes in page.shapes[1:]] == [4, 4, 3]  # a bound has its side


def test_long_words_are_folded_and_short_ones_are_not():
    assert "<summary>In words</summary>" in report([FINDING])
    assert "<summary>In words</summary>" not in report([FINDING | {"sentence": "short"}])


def test_one_line_of_each_quantity_after_the_last_step():
    assert [line["what"] for line in chosen(LINES)] == [LINES[i]["what"] for i in (1, 3, 5)]
    many = [measured(f"quantity {i}", "-1") for i in range(20)]
    assert chosen(many) == many[:6]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-1", Theory("", -1.0)),
        ("-1/2", Theory("", -0.5)),
        ("at most -1/3", Theory("at most", -1 / 3)),
        ("at least 0.25", Theory("at least", 0.25)),
        ("0, as layers share one draw", Theory("", 0.0)),
        ("no statement known to us", None),
        ("-1 or less", None),
        ("1/0", None),
        ("", None),
    ],
)
def test_the_number_of_theory(words, expected):
    assert theory_of(words) == expected


@pytest.mark.parametrize(
    ("theory", "interval", "expected"),
    [
        (Theory("", -0.5), (-0.6, -0.4), "agrees"),
        (Theory("", -0.5), (-0.4, -0.3), "departs"),
        (Theory("at most", -0.5), (-0.7, -0.6), "holds"),
        (Theory("at most", -0.5), (-0.6, -0.4), "consistent"),
        (Theory("at most", -0.5), (-0.4, -0.3), "exceeded"),
        (Theory("at least", -0.5), (-0.4, -0.3), "holds"),
        (Theory("at least", -0.5), (-0.7, -0.6), "exceeded"),
        (Theory("", -0.5), None, ""),
        (None, (-0.4, -0.3), ""),
    ],
)
def test_verdicts(theory, interval, expected):
    assert verdict(theory, interval) == expected
    assert verdict(theory, interval, "no bend (at 2)") == "; ".join(
        filter(None, (expected, "no bend"))
    )


def places(svg):
    return [shape[1] for shape in Page(f"<table><tr>{svg}</tr></table>").shapes[0]]


def test_a_bar_stands_where_its_numbers_are():
    theory, line, dot = places(bar(Theory("", -0.5), -0.75, (-1.0, -0.5)))
    assert theory["x1"] == line["x2"] and float(line["x1"]) < float(dot["cx"]) < float(line["x2"])
    assert float(dot["cx"]) == pytest.approx((float(line["x1"]) + float(line["x2"])) / 2, abs=0.11)
    # exponents have one scale, all else its own
    assert places(bar(None, -0.5, None))[1]["cx"] == places(bar(None, -0.5, (-1, 0)))[1]["cx"]
    assert all(0 <= float(p["cx"]) <= 170 for p in places(bar(None, 7e9, (1.0, 1e12)))[1:])


def test_what_is_no_number_has_no_bar():
    odd = [
        LINES[0] | {"value": value, "interval": value} for value in (None, "x", True, [1], 1e300)
    ]
    for line in odd:
        page = Page(report([FINDING | {"measured": [line]}]))
        assert not page.shapes[1] and page.rows[1][-1] == ""
    assert "nothing could be measured" in report([FINDING | {"measured": []}])
