"""Wikipedia articles: the excerpt that the gensim package carries for its tests, as plain text."""

from __future__ import annotations

import bz2
import html
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

from .wheels import WheelFile, fetch

# Text of Wikipedia, CC BY-SA. One wheel of the release, the same on every machine.
EXCERPT = WheelFile(
    "gensim",
    "4.4.0",
    "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
    "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
    "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
    ("--python-version", "311", "--abi", "cp311", "--platform", "manylinux_2_28_x86_64"),
)


def wikipedia_articles(cache: str | os.PathLike | None = None) -> list[str]:
    """The articles of the excerpt (no redirects, no other namespaces), in its order.

    Raises
    ------
    FetchError
        If it is not in the cache and cannot be downloaded.
    """
    return list(read_dump(fetch(EXCERPT, cache)))


def read_dump(path: Path) -> Iterator[str]:
    """Title and plain text of every article in a bz2 dump."""
    with bz2.open(path) as file:
        for _, page in ET.iterparse(file):
            if _local(page) != "page":
                continue
            fields = {_local(element): element for element in page.iter()}
            if fields["ns"].text == "0" and "redirect" not in fields:
                yield f"{fields['title'].text}\n\n{plain_text(fields['text'].text or '')}"
            page.clear()


def _local(element: ET.Element) -> str:
    return element.tag.rpartition("}")[2]


_DROPPED = re.compile(
    r"<!--.*?-->|<(ref|math|gallery|nowiki|timeline|source|code|pre)\b[^>]*?(?:/>|>.*?</\1\s*>)",
    re.DOTALL | re.IGNORECASE,
)
_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_TABLE = re.compile(r"\{\|(?:(?!\{\||\|\}).)*\|\}", re.DOTALL)
_INNER_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_OUTER_LINK = re.compile(r"\[\w+://[^\s\]]+\s*([^\]]*)\]")
_TAG = re.compile(r"</?\w+[^<>]*>")
_NOT_TEXT = ("file:", "image:", "category:", "media:")


def plain_text(markup: str) -> str:
    """The running text of wiki markup: no templates, tables, references, files or categories."""
    text = _DROPPED.sub("", markup)
    for pattern in (_TEMPLATE, _TABLE):  # innermost first, until none is left
        count = 1
        while count:
            text, count = pattern.subn("", text)
    count = 1
    while count:
        text, count = _INNER_LINK.subn(_shown, text)
    text = _TAG.sub("", _OUTER_LINK.sub(r"\1", text))
    text = re.sub(r"'{2,}", "", html.unescape(text))  # what is escaped is text, not markup
    text = re.sub(r"^=+\s*(.*?)\s*=+\s*$", r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"^[*#:;|!{}\s]+", "", text, flags=re.MULTILINE)  # also empty lines
    return re.sub(r"[ \t]+", " ", text).strip()


def _shown(link: re.Match) -> str:
    """What a reader sees of [[target|label]]."""
    target, _, label = link[1].partition("|")
    if target.strip().lower().startswith(_NOT_TEXT) or re.match(r"\s*[a-z-]{2,12}:", target):
        return ""  # files, categories, the article in other languages
    return label.rpartition("|")[2] if label else target
