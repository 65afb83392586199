"""What a command has found, as files and as text."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..store import finite, replacing, write_csv, write_figure, write_json
from ..together import write_together
from . import drawn
from .film import Film, film_kinds, write_film
from .style import own_style

if TYPE_CHECKING:  # matplotlib is slow to import
    from matplotlib.figure import Figure


def drawing(module: str, function: str, *arguments: object) -> Callable[[], Figure]:
    """A figure that is made when it is drawn: matplotlib is slow to import."""
    return lambda: getattr(importlib.import_module(module), function)(*arguments)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a command has found, for its files and its reader.

    Attributes
    ----------
    name : str
        Of the set of files: NAME.sha256 has the checksums of them all.
    numbers : dict
        What --json prints.
    summary : str
        What is printed else.
    figures : dict
        Name of a PNG and a PDF file -> function that makes the figure, which is not called where
        these files are there of the same results and the same code.
    documents : dict, optional
        Name of a JSON file -> its content; without it, NAME.json holds `numbers`.
    tables : dict
        Name of a CSV file -> its rows and columns.
    damaged : list of str
        Result files that could not be trusted, where the numbers do not tell of them.
    status : int
        With which the program ends.
    texts : dict
        Name of a Markdown file -> what it says.
    films : dict
        Name of a GIF and an HTML file, and of MP4 where that can be written -> film.
    look : str
        What the figures depend on besides the results.
    """

    name: str
    numbers: dict
    summary: str
    figures: dict[str, Callable[[], Figure]]
    documents: dict[str, dict] | None = None
    tables: dict[str, tuple[Iterable[dict], list[str]]] = dataclasses.field(default_factory=dict)
    damaged: list[str] = dataclasses.field(default_factory=list)
    status: int = 0
    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    films: dict[str, Film] = dataclasses.field(default_factory=dict)
    look: str = ""

    def write(self, folder: Path) -> list[str]:
        """All the files, or none of them; returns their names."""
        documents = {self.name: self.numbers} if self.documents is None else self.documents
        figures = [f"{name}.{kind}" for name in self.figures for kind in ("png", "pdf")]
        with write_together(folder, self.name) as staged:
            for name, content in documents.items():
                write_json(staged / f"{name}.json", finite(content))
            for name, (rows, columns) in self.tables.items():
                write_csv(staged / f"{name}.csv", rows, columns)
            for name, text in self.texts.items():
                with replacing(staged / f"{name}.md") as file:
                    file.write(text)
            digest = drawn.mark(staged, self.look)
            if not drawn.take_over(folder, self.name, staged, figures, digest):
                with own_style():
                    for name, figure in self.figures.items():
                        write_figure(staged / name, figure())
            for name, film in self.films.items():
                write_film(staged / name, film)
        drawn.remember(folder, self.name, digest)
        files = [f"{name}.json" for name in documents] + [f"{name}.csv" for name in self.tables]
        files += [f"{name}.md" for name in self.texts]
        films = [f"{name}.{kind}" for name in self.films for kind in film_kinds()]
        return files + figures + films
