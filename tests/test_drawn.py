"""Figures of a command that finds everything finished are not drawn again, and never stale."""

import pytest
from matplotlib.figure import Figure

from ipslimit.experiments.frame.outcome import Outcome


class Drawn:
    """An outcome whose figures are counted."""

    def __init__(self, folder):
        self.folder, self.count = folder, 0

    def figure(self):
        self.count += 1
        figure = Figure(figsize=(1, 1))
        figure.text(0.5, 0.5, "drawn")
        return figure

    def write(self, number=1.0):
        outcome = Outcome("found", {"number": number}, "", {"picture": self.figure})
        names = outcome.write(self.folder)
        return {name: (self.folder / name).read_bytes() for name in names}


@pytest.fixture
def drawn(tmp_path):
    return Drawn(tmp_path)


def test_the_same_results_draw_nothing_again(drawn):
    first = drawn.write()
    assert drawn.write() == first and drawn.count == 1
    assert sorted(first) == ["found.json", "picture.pdf", "picture.png"]


@pytest.mark.parametrize("what", ["other results", "altered", "missing", "no mark"])
def test_else_they_are(drawn, what):
    first = drawn.write()
    if what == "altered":
        (drawn.folder / "picture.png").write_bytes(b"not the picture")
    elif what == "missing":
        (drawn.folder / "picture.pdf").unlink()
    elif what == "no mark":
        (drawn.folder / ".found" / "drawn").unlink()
    again = drawn.write(2.0 if what == "other results" else 1.0)
    assert drawn.count == 2
    assert again["picture.png"] == first["picture.png"]


def test_other_code_draws_again(drawn, monkeypatch):
    drawn.write()
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.0")
    drawn.write()
    assert drawn.count == 2
