"""Links, figures and the table of contents of the pages, from their sources: no site is built."""

import re
from pathlib import Path

import pytest

import ipslimit.nn
import ipslimit.optim
import ipslimit.solvers

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES += sorted(DOCS.rglob("*.md"))
NAV = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
FENCED = re.compile(r"^```.*?^```", flags=re.DOTALL | re.MULTILINE)


def prose(page):
    """What is not code."""
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text()))


def anchors(page):
    """Of the headings, as GitHub and the site make them."""
    headings = re.findall(r"^#{1,6} +(.*)$", FENCED.sub("", page.read_text()), re.M)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return [word.strip().replace(" ", "-") for word in words]


def links(page):
    """(text, target) of links and pictures."""
    found = re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", prose(page).replace("\n", " "))
    return [(text, target) for text, target in found if "://" not in target]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page):
    for text, target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file() and ROOT in file.parents, (text, target)
        assert not anchor or anchors(file).count(anchor) == 1, (text, target)


def test_links_are_seen():
    assert len(links(ROOT / "README.md")) > 20
    assert "in-python" in anchors(ROOT / "README.md")
    assert "the-fused-kernel-cpu-small-heads" in anchors(DOCS / "performance.md")


def test_the_table_of_contents_has_every_page_once():
    listed = re.findall(r"(\S+\.md)$", NAV, re.M)
    notebooks = [f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")]
    pages = [page.relative_to(DOCS if DOCS in page.parents else ROOT) for page in PAGES]
    assert sorted(listed) == sorted([*(page.as_posix() for page in pages), *notebooks])


def test_every_figure_is_in_the_gallery_below_its_command():
    sections = re.split(r"^## ", (DOCS / "gallery.md").read_text(), flags=re.M)
    shown = {}
    for section in sections:
        for picture in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", section):
            before = section.split(picture)[0]
            shown[picture] = re.findall(r"^    ((?:ipslimit|make) \S+)", before, re.M)
    pictures = [p.name for p in DOCS.iterdir() if p.suffix in (".png", ".gif")]
    assert sorted(shown) == sorted(pictures)
    assert all(shown.values())


def test_every_study_is_in_the_gallery():
    from ipslimit.experiments.studies.command import STUDIES

    listed = re.findall(r"`ipslimit study (\w+)`", (DOCS / "gallery.md").read_text())
    assert listed == [study.NAME for study in STUDIES]


def test_every_public_name_is_in_the_reference_once():
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    listed = re.findall(r"^::: (\S+)$", text, re.M)
    public = []
    for module in (ipslimit, ipslimit.nn, ipslimit.optim, ipslimit.solvers):
        for name in set(module.__all__) - {"__version__"}:
            home = f"{getattr(module, name).__module__}.{name}"
            # as it lies in the checkout, where the reference is read from
            public.append(home.removeprefix("ipslimit.") if "ipslimit.solvers" in home else home)
    assert sorted(listed) == sorted(public)


def test_the_readme_is_read_in_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_citation_and_the_changes_are_of_this_version():
    version = ipslimit.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()
