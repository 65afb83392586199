"""A user's matplotlibrc changes no figure, and says nothing."""

import os
import subprocess
import sys

import matplotlib
import pytest
from matplotlib.figure import Figure

from ipslimit.experiments.frame.outcome import Outcome
from ipslimit.experiments.frame.style import own_style

HOSTILE = {
    "text.usetex": True,
    "font.family": "No Such Font",
    "figure.dpi": 7,
    "savefig.bbox": "tight",
    "axes.prop_cycle": matplotlib.cycler(color=["red"]),
}
PROGRAM = """
from pathlib import Path
from ipslimit.experiments.frame.style import own_style
from ipslimit.experiments.store import CannotWrite
try:
    with own_style():
        from matplotlib.figure import Figure
        figure = Figure()
        figure.subplots().set_title("words")
        figure.savefig("figure.png")
    print(sorted(path.name for path in Path.cwd().iterdir()))
except CannotWrite as error:
    print(error)
"""


def figure():
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([1, 2], [3, 4])
    figure.text(0.5, 0.5, "words")
    return figure


def test_figures_are_drawn_as_by_default(tmp_path, caplog):
    found = []
    for name, settings in {"plain": {}, "hostile": HOSTILE}.items():
        (tmp_path / name).mkdir()
        with matplotlib.rc_context(settings):
            before = dict(matplotlib.rcParams)
            outcome = Outcome("found", {}, "", {"picture": figure})
            files = outcome.write(tmp_path / name)
            assert dict(matplotlib.rcParams) == before
        found.append({file: (tmp_path / name / file).read_bytes() for file in files})
    assert found[0] == found[1] and "picture.pdf" in found[0] and caplog.text == ""


def test_where_ffmpeg_lies_is_the_users_to_say():
    with matplotlib.rc_context({"animation.ffmpeg_path": "/my/ffmpeg"}), own_style():
        assert matplotlib.rcParams["animation.ffmpeg_path"] == "/my/ffmpeg"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"backend: bogus\ntext.usetex: True\nfont.family: None Such\nnonsense: 3\n", "['figure"),
        (b"# caf\xe9\n", "figures cannot be drawn: matplotlib cannot read its matplotlibrc ("),
    ],
)
def test_a_file_that_matplotlib_does_not_know_is_not_told_line_by_line(tmp_path, content, said):
    (tmp_path / "matplotlibrc").write_bytes(content)
    environment = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}
    where = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", PROGRAM], **where)
    assert done.returncode == 0 and done.stdout.startswith(said) and done.stderr == "", done
