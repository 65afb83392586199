"""`ipslimit compare --animate`: what is drawn is what is said of it, and the files stand alone."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders import normal, small_atoms
from PIL import Image
from test_sweep import run_cli

from ipslimit import Block, Problem, XavierPerceptrons
from ipslimit.experiments.cli import main
from ipslimit.experiments.compare import animation
from ipslimit.experiments.compare.animation import (
    PICTURES,
    FlowFilm,
    Plane,
    between_layers,
    tracer_velocities,
)
from ipslimit.experiments.compare.compared import Compared
from ipslimit.experiments.compare.experiment import compare
from ipslimit.experiments.frame.film import film_kinds
from ipslimit.experiments.settings import Setting
from ipslimit.measure.wasserstein import wasserstein2

RNG = np.random.default_rng(0)
TINY = Setting(d=3, m=2, tokens=4, contexts=2, probes=0, steps=1, eps=0.1, atoms=3)
SMALL = "--d 3 --m 2 --tokens 4 --contexts 2 --probes 0 --steps 1 --eps 0.1 --atoms 3"
FLAGS = [*SMALL.split(), *"--depth 4 --heads 2 --seeds 2 --tol 1e-2 --device cpu".split()]


@pytest.fixture(scope="module")
def compared():
    return compare(Compared(TINY, ("sgd",), depth=4, heads=2, seeds=2, tol=1e-2), "cpu")


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(animation, "PICTURES", 5)
    monkeypatch.setattr(animation, "ARROWS", 4)


def velocities_of(problem, x, points):
    """Of one depth, with the law itself for the limit's units."""
    units = {name: law.heads.map(lambda t: t[None]) for name, law in problem.block.laws.items()}
    found = SimpleNamespace(
        run=SimpleNamespace(problem=problem), limit=SimpleNamespace(units=lambda k, s: units)
    )
    return tracer_velocities(found, 0, torch.zeros(1), x[None], points)[0]


@pytest.mark.parametrize("causal", [False, True])
def test_an_arrow_is_what_a_point_sees_of_the_tokens_and_no_other_arrow(causal):
    law = small_atoms()
    problem = Problem(normal(2, 4, 3), normal(2, 3), law, causal=causal)
    x, points = normal(4, 3, seed=7), normal(20, 3, seed=8)
    expected = torch.zeros(20, 3, dtype=x.dtype)
    parts = law.heads.parts() | {"weights": law.heads.weights}
    for h, weight in enumerate(parts["weights"]):
        q, k, v, o, bq, bv = (parts[name][h] for name in ("q", "k", "v", "o", "bq", "bv"))
        attention = torch.softmax((points @ q.T + bq) @ (x @ k.T).T / 2**0.5, dim=-1)
        expected += weight * attention @ (x @ v.T + bv) @ o.T
    found = velocities_of(problem, x, points)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
def test_an_arrow_at_a_token_is_the_tokens_own_velocity(causal):
    perceptrons = XavierPerceptrons(d=3, n=2).nodes(4)
    block = Block(small_atoms(), perceptrons, norm="rms")
    problem = Problem(normal(1, 4, 3), normal(1, 3), block, causal=causal)
    x = normal(4, 3, seed=7)
    units = {name: law.heads for name, law in block.laws.items()}
    field = block.branch(units).field(x[None], causal)[0]
    # under a mask points see all tokens, as the last does
    seen = slice(-1, None) if causal else slice(None)
    found = velocities_of(problem, x, x[seen])
    assert torch.allclose(found, field[seen], rtol=1e-12, atol=1e-14)


def test_the_plane_is_that_of_the_largest_variance():
    points = normal(50, 4) * torch.tensor([0.1, 2.0, 0.5, 1.0], dtype=torch.float64) + 3
    plane, centred = Plane(points), points - points.mean(0)
    kept = np.square(plane.seen(points)).sum() / centred.square().sum()
    singular = torch.linalg.svdvals(centred).square()
    assert kept == pytest.approx(plane.share) == pytest.approx(singular[:2].sum() / singular.sum())
    places = RNG.normal(size=(7, 2))
    assert plane.seen(plane.points(places)) == pytest.approx(places)
    # an axis has no direction: points turned around are seen turned around
    assert Plane(-points).axes == pytest.approx(plane.axes)


def test_every_seed_is_drawn_over_the_limit_before_and_after_training(compared, few):
    film = FlowFilm(compared)
    names = [(panel.comparison.rule, panel.step) for panel in film.panels]
    assert names == [("adamw", 0), ("adamw", 1), ("sgd", 1)]  # before training all rules are one
    for panel in film.panels:
        run, limit = panel.comparison.run.x[panel.step], panel.comparison.limit
        for picture in (0, 3, 4):  # of five, with depth 4: a layer each
            film.show(picture)
            ours, theirs = run[:, picture, 0], limit.x(panel.step, picture / 4)[0]
            dots, rings = panel.dots.get_xydata(), panel.rings.get_xydata()
            assert dots == pytest.approx(film.plane.seen(ours).reshape(-1, 2))
            assert rings == pytest.approx(film.plane.seen(theirs))
            drawn = np.stack([panel.quiver.U, panel.quiver.V], axis=-1)
            assert np.array_equal(drawn, panel.arrows[picture])
            expected = np.sqrt(np.mean([wasserstein2(x, theirs).distance ** 2 for x in ours]))
            assert panel.axis.get_title().endswith(f"W2 = {expected:.2g}")
    assert film.figure.get_suptitle() == "depth s = 1.00"
    # nothing that is drawn is cut off
    seen = np.concatenate(
        [np.r_[p.run.reshape(-1, 2), p.limit.reshape(-1, 2)] for p in film.panels]
    )
    grid = film.panels[0].grid
    assert (seen > grid.low).all() and (seen < grid.high).all()


def test_between_layers_tokens_are_on_the_polygon(compared):
    run = compared[0].run
    depths = torch.tensor([0.0, 0.125, 0.75, 1.0], dtype=torch.float64)
    x = run.x[1][:, :, 0]
    expected = torch.stack([x[:, 0], (x[:, 0] + x[:, 1]) / 2, x[:, 3], x[:, 4]], dim=1)
    assert torch.allclose(between_layers(compared[0], 1, depths), expected, rtol=1e-14)


def test_animate_writes_films_that_stand_alone_among_the_files(capsys, few, tmp_path):
    main(["compare", *FLAGS, "--animate", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    written = printed.splitlines()[-1].partition(": ")[2].split(", ")
    assert {"flow.gif", "flow.html"} <= set(written)
    listed = {
        line.split("  ")[1] for line in (tmp_path / "compare.sha256").read_text().splitlines()
    }
    assert listed == set(written)
    assert ("no MP4" in printed) == ("flow.mp4" not in written)
    assert "first two principal ones of the limit's tokens" in printed
    with Image.open(tmp_path / "flow.gif") as film:
        lasts = []
        for picture in range(film.n_frames):
            film.seek(picture)
            lasts.append(film.info["duration"])
    assert len(lasts) == 5 and lasts[-1] > 5 * lasts[0]  # the last is shown for longer
    page = (tmp_path / "flow.html").read_text()
    assert len(re.findall('"data:image/png;base64,', page)) == 5
    assert "http" not in re.sub('"data:[^"]*"', "", page)


def test_a_film_is_short():
    assert PICTURES + FlowFilm.rest < 60


@pytest.mark.parametrize("program", [None, "exit 3"])
def test_without_a_program_that_writes_it_there_is_no_mp4(program, monkeypatch, tmp_path):
    if program is not None:
        (tmp_path / "ffmpeg").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "ffmpeg").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    film_kinds.cache_clear()
    assert film_kinds() == ("gif", "html")
    film_kinds.cache_clear()


MIXING = """
import dataclasses

import torch

import ipslimit


class Mean(ipslimit.Units):
    '''The mean of all tokens, through a matrix.'''

    matrices = {"w": "d d"}

    @staticmethod
    def unit_field(x, causal, w):
        return (x.mean(-2, keepdim=True) @ w.mT).expand_as(x)


@dataclasses.dataclass
class MeanLaw(ipslimit.SampledLaw):
    '''Entries uniform in +-1.'''

    d: int
    units = Mean

    def quantile(self, u):
        return 2 * u - 1
"""


def test_what_has_no_plane_or_no_tracers_is_refused_in_one_line(capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MIXING)
    for flags, message in (
        (["--d", "1"], "d must be at least 2 with animate"),
        (["--law", f"{file}:MeanLaw"], "law must be of heads, or of units that take every token"),
    ):
        arguments = ("compare", "--animate", *flags, "--out", str(tmp_path))
        status, text = run_cli(capsys, *arguments)
        assert status == 2 and message in text.err and len(text.err.splitlines()) == 1
