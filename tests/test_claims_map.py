"""The map of docs/claims.md: every claim of the documents, and the test that holds it."""

import inspect
import math
import re
from pathlib import Path

import pytest

import ipslimit.nn
import ipslimit.optim
import ipslimit.solvers
from ipslimit.experiments.cli import main

ROOT = Path(__file__).parents[1]
CLAIMS = (ROOT / "docs" / "claims.md").read_text()
DOCUMENTS = [
    "README.md",
    *(
        page.relative_to(ROOT).as_posix()
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if page.name != "claims.md"
    ),
]
# What else is said there, test_architecture.py holds.
EXAMPLES = "docs/architecture.md"


def plain(text):
    """On one line, without bold: as words are quoted."""
    return " ".join(text.replace("**", "").split())


def table(text):
    """Cells of the rows of the first table."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def sections(text, mark):
    """Heading -> what is below it, for headings with these marks."""
    text = re.sub(r"```.*?```", lambda block: block[0].replace("\n#", "\n "), text, flags=re.S)
    parts = re.split(rf"^{mark} +(.*)$", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def held_claims():
    """(document, section, claim, held by) of every line of the map."""
    for document, below in sections(CLAIMS, "##").items():
        for section, lines in sections(below, "###").items():
            for claim, held_by in table(lines):
                yield document, section, claim, held_by


HELD = list(held_claims())


def written(document):
    """Section -> text of a document, the tables of measurements in one."""
    mark = "#{1,2}" if document == "docs/performance.md" else "#{1,3}"
    return sections((ROOT / document).read_text(), mark)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_claim_of_the_map_stands_where_it_is_said_to(document):
    texts = written(document)
    claims = [(section, claim) for where, section, claim, _ in HELD if where == document]
    assert [claim for section, claim in claims if section not in texts] == []
    missing = [claim for section, claim in claims if plain(claim) not in plain(texts[section])]
    assert missing == []


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name != EXAMPLES])
def test_no_section_with_a_number_is_left_out_of_the_map(document):
    mapped = {section for where, section, _, _ in HELD if where == document}
    found = written(document)
    title = next(iter(found)) if document == "docs/theory.md" else None  # its notation alone
    numbered = {section for section, text in found.items() if re.search(r"\d", text)}
    assert numbered - mapped - {title} == set()


def test_the_map_is_of_pages_that_are_there():
    assert {document for document, _, _, _ in HELD} <= set(DOCUMENTS)


def test_every_test_and_command_of_the_map_is_there(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = capsys.readouterr().out.split()
    functions = {
        f"{path.name}::{name}"
        for path in (ROOT / "tests").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    rules = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.M)
    targets = {target for rule in rules for target in rule.split()}
    for document, _, claim, held_by in HELD:
        names = re.findall(r"`([^`]*)`", held_by)
        assert names and re.sub(r"`[^`]*`|[ ,]", "", held_by) == "", (document, claim)
        for name in names:
            words = name.split()
            known = {"make": targets, "ipslimit": commands}.get(words[0])
            assert name in functions if known is None else words[1] in known, (claim, name)


def test_every_public_function_says_what_each_of_its_arguments_is():
    for module in (ipslimit, ipslimit.nn, ipslimit.optim, ipslimit.solvers):
        for name in module.__all__:
            thing = getattr(module, name)
            said = inspect.getdoc(thing)
            assert said, name
            if inspect.isfunction(thing):
                missing = [p for p in inspect.signature(thing).parameters if p not in said]
                assert missing == [], name


def test_times_on_paper_are_those_of_the_formula():
    """The table of docs/scaling.md, in milliseconds, from the formula above it."""

    def reduced(P, volume, bandwidth, latency):
        return 2 * (P - 1) / P * volume / bandwidth + 2 * latency * math.log2(P)

    def times(P, B, N, d, m, H):
        work = 4 * B * H * (8 * N * m * d + 4 * N**2 * m) / (P * 20e12)
        volume, nodes = 4 * B * N * d, max(1, P // 8)
        sums = reduced(min(P, 8), volume, 450e9, 3e-6) + reduced(nodes, volume, 50e9, 8e-6)
        return 1e3 * work, 1e3 * 2 * sums

    rows = table((ROOT / "docs" / "scaling.md").read_text())
    assert [row[0] for row in rows] == ["1", "8", "64", "256", "1024"]
    for P, *cells in rows:
        for (computing, communicating, efficiency), sizes in (
            (cells[:3], (64, 128, 64, 16, 8192)),
            (cells[3:], (4, 8, 4, 4, 2**20)),
        ):
            work, sums = times(int(P), *sizes)
            for cell, value in ((computing, work), (communicating, sums)):
                digits = len(cell.partition(".")[2].split()[0]) if "." in cell else 0
                assert float(cell.split()[0]) == pytest.approx(value, abs=0.51 * 10**-digits)
            assert float(efficiency) == pytest.approx(work / (work + sums), abs=0.0051)
