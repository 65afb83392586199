"""Pictures that follow each other, as a GIF, as a page with a player, and as MP4 where that can be.

matplotlib's own page loads the signs on its buttons from elsewhere; this one needs nothing.
"""

from __future__ import annotations

import abc
import base64
import contextlib
import functools
import html
import io
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..store import replacing
from .style import own_style

if TYPE_CHECKING:  # matplotlib is slow to import
    from matplotlib.figure import Figure

DPI = 100


class Film(abc.ABC):
    """A figure that shows one picture of many.

    Attributes
    ----------
    figure : Figure
    pictures : int
    rest : int
        How often the last one is shown again before the first.
    rate : int
        Pictures a second.
    title : str
    words : str
        What is seen.
    """

    figure: Figure
    pictures: int
    title: str
    words: str
    rest: int = 8
    rate: int = 8

    @abc.abstractmethod
    def show(self, picture: int) -> None:
        """Draw the picture of this number into the figure."""


@functools.cache
def film_kinds() -> tuple[str, ...]:
    """Suffixes of the files that can be written here.

    MP4 takes a program that matplotlib finds, and that has the encoder: it is tried.
    """
    from matplotlib.animation import FFMpegWriter
    from matplotlib.figure import Figure

    always = "gif", "html"
    if not FFMpegWriter.isAvailable():
        return always
    with tempfile.TemporaryDirectory() as folder:
        writer = FFMpegWriter(fps=1)
        try:
            with writer.saving(Figure(figsize=(1, 1)), str(Path(folder) / "trial.mp4"), DPI):
                writer.grab_frame()
        except (OSError, subprocess.CalledProcessError):
            return always
    return *always, "mp4"


def write_film(path: Path, film: Film) -> None:
    """A file of every kind; `path` has no suffix."""
    from matplotlib.animation import FFMpegWriter, PillowWriter

    makers = {"gif": PillowWriter, "mp4": FFMpegWriter}
    shown = [*range(film.pictures), *[film.pictures - 1] * film.rest]
    # a user's tight boxes, among others, would make pictures of several sizes
    with contextlib.ExitStack() as stack, own_style():
        writers = []
        for kind in film_kinds():
            if kind in makers:
                writers.append(makers[kind](fps=film.rate))
                file = path.with_name(f"{path.name}.{kind}")
                stack.enter_context(writers[-1].saving(film.figure, str(file), DPI))
        pages = []
        for i, picture in enumerate(shown):
            film.show(picture)
            for writer in writers:
                writer.grab_frame()
            if i < film.pictures:
                content = io.BytesIO()
                film.figure.savefig(content, format="png", dpi=DPI)
                pages.append(base64.b64encode(content.getvalue()).decode())
    with replacing(path.with_name(f"{path.name}.html")) as file:
        file.write(_page(film, pages))


def _page(film: Film, pages: list[str]) -> str:
    pictures = ",\n".join(f'"data:image/png;base64,{page}"' for page in pages)
    title, words = html.escape(film.title), html.escape(film.words)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; max-width: 60em; margin: 1em auto; padding: 0 1em; }}
img, input {{ width: 100%; }}
</style>
</head>
<body>
<h1>{title}</h1>
<img id="picture" alt="{words}">
<p><button id="play">pause</button></p>
<p><input id="place" type="range" min="0" max="{len(pages) - 1}" value="0" aria-label="picture"></p>
<p>{words}</p>
<script>
const pictures = [
{pictures}
];
const picture = document.getElementById("picture");
const place = document.getElementById("place");
const play = document.getElementById("play");
let timer = null, rest = 0;
function show() {{ picture.src = pictures[place.value]; }}
function next() {{
  const last = Number(place.value) === pictures.length - 1;
  if (last && rest++ < {film.rest}) return;
  rest = 0;
  place.value = last ? 0 : Number(place.value) + 1;
  show();
}}
function set(playing) {{
  clearInterval(timer);
  timer = playing ? setInterval(next, {1000 // film.rate}) : null;
  play.textContent = playing ? "pause" : "play";
}}
play.onclick = () => set(timer === null);
place.oninput = () => {{ set(false); show(); }};
show();
set(true);
</script>
</body>
</html>
"""
