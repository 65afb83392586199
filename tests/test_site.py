"""The built site (`make docs`), parsed: its links, pictures, formulas, and what it fetches."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


class Page(HTMLParser):
    """Anchors, links, what is fetched, and how many formulas and titles of one page."""

    def __init__(self, file):
        super().__init__()
        self.ids, self.links, self.fetched, self.counts = set(), [], [], {}
        self.text = file.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids.add(given.get("id"))
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("img", "script", "source", "iframe") and given.get("src"):
            self.fetched.append(given["src"])
        if tag == "link" and given.get("rel") != "canonical" and given.get("href"):
            self.fetched.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    surroundings = {**os.environ, "NOTEBOOKS": "false", "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "-d", folder],
        cwd=ROOT,
        env=surroundings,
        check=True,
    )
    return folder, {file: Page(file) for file in folder.rglob("*.html") if file.name != "404.html"}


def test_every_link_of_the_site_leads_somewhere(site):
    _, pages = site
    assert len(pages) > 25
    for file, page in pages.items():
        for link in page.links + page.fetched:
            path, _, anchor = link.partition("#")
            if "://" not in link:
                target = (file.parent / path).resolve() if path else file
                assert target.exists(), (file.name, link)
                if anchor and target in pages:
                    assert anchor in pages[target].ids, (file.name, link)


def test_nothing_of_a_page_is_fetched_from_elsewhere(site):
    _, pages = site
    assert [link for page in pages.values() for link in page.fetched if "://" in link] == []


def test_formulas_are_in_the_pages_and_every_page_has_a_title(site):
    folder, pages = site
    for name, formulas in (("theory.html", 200), ("notebooks/01_rates.html", 20)):
        assert pages[folder / name].text.count('<svg class="formula"') > formulas
    for file, page in pages.items():
        assert "arithmatex" not in page.text, file.name
        assert page.counts["h1"] == 1, file.name


def test_the_reference_shows_each_parameter_with_its_own_default(site):
    folder, _ = site
    text = (folder / "reference" / "runs.html").read_text(encoding="utf-8")
    cells = text.split("<code>nodes_seed</code>")[1].split("</tr>")[0]
    assert "<code>0</code>" in cells and "1024" not in cells
