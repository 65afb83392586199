"""The study of laws of tokens: what it compares, and what it makes of rows whose truth is known."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from builders import F64

from ipslimit.experiments.cli import main
from ipslimit.experiments.studies.chaos import Chaos, exponent_rows, part_rows
from ipslimit.experiments.studies.chaos_cells import (
    DEPTHS,
    SHARES,
    LawSetting,
    draw_cell,
    joint_cell,
    law_cell,
    law_rows,
    mean_of,
)

STUDY = Chaos(
    setting=LawSetting(d=3, m=2, contexts=2, atoms=3, eps=0.1, steps=1, record=(0, 1)),
    quick=True,
    points=4,
    token_nodes=16,
    device="cpu",
)


def as_law(values):
    """A limit's values in the place of those of a law."""
    about = ("step", "variable", "share")
    return {
        "values": [
            dict(zip(about, key)) | {"values": value.flatten().tolist()}
            for key, value in values.items()
        ]
    }


def worst(cell, **about):
    rows = [r for r in cell["rows"] if all(r[k] == v for k, v in about.items())]
    return max(row["error"] for row in rows)


@pytest.mark.parametrize("mask", ["no mask", "causal"])
def test_the_tokens_of_a_draw_in_the_place_of_the_law_leave_no_error(mask):
    of = STUDY.comparison(mask)
    own = as_law(of.values(of.setting.problem_of(of.draw(6, 3))))
    cell = draw_cell(of, 6, 3, own)
    assert {row["error"] for row in cell["rows"]} == {0.0}
    keys = {(row["variable"], row["share"]) for row in cell["rows"]}
    shares = SHARES if mask == "causal" else (1.0,)
    assert keys == {*itertools.product("xp", shares), ("theta", 1.0), ("loss", 1.0)}
    assert all(
        worst(draw_cell(of, 6, 4, own), variable=v) > 1e-3 for v in ("x", "p", "theta", "loss")
    )


def test_many_layers_and_heads_over_a_draw_in_the_place_of_the_law_leave_little_error():
    of = STUDY.comparison("no mask")
    depth, heads, count, seed = 64, 4096, 5, 2
    tokens = of.draw(count, depth, heads, seed)
    law = as_law(of.values(of.setting.problem_of(tokens)))
    near = joint_cell(of, depth, heads, count, [seed], law)
    few = joint_cell(of, 4, 1, count, [seed], law)
    for variable, bound in {"x": 0.02, "p": 0.1, "theta": 0.02, "loss": 0.03}.items():
        assert worst(near, variable=variable) < bound < worst(few, variable=variable, step=1)
    # heads are those of the atom that they are a copy of
    assert worst(few, variable="theta", step=0) == 0.0


def test_draws_of_other_numbers_share_no_token():
    of = STUDY.comparison("no mask")
    several = [of.draw(*use) for use in ((4, 0), (4, 1), (8, 0), (4, 4, 8, 0))]
    tokens = torch.cat([x.flatten(0, 1) for x in several])
    assert len(torch.unique(tokens, dim=0)) == len(tokens) == 2 * 20
    assert torch.equal(of.draw(8, 0), several[2])
    assert not torch.equal(dataclasses.replace(of, root_seed=1).draw(8, 0), several[2])


def test_the_error_of_the_law_is_that_of_the_mean_of_its_scramblings():
    of = STUDY.comparison("no mask")
    laws = [law_cell(of, i) for i in range(2)]
    one, two = (mean_of([law])[1, "x", 1.0].view(len(DEPTHS), -1, 3) for law in laws)
    rows = [r for r in law_rows(laws, of) if (r["step"], r["variable"]) == (1, "x")]
    # of two values each is off the mean by half their difference, and so is the mean of the truth
    square = ((one - two) / 2).square().sum(-1)
    for row in rows:
        found = square.mean(1).amax() if row["norm"] == "rms" else square.amax()
        assert row["error"] == pytest.approx(math.sqrt(found))
    assert {row["seed"] for row in rows} == {0, 1}
    gap = torch.tensor([law["values"][-1]["values"][0] for law in laws], dtype=F64).diff().abs() / 2
    loss = [r["error"] for r in law_rows(laws, of) if (r["step"], r["variable"]) == (1, "loss")]
    assert loss == pytest.approx([float(gap)] * 2)


# --- rows whose truth is known ---------------------------------------------------------------


def scatter(*key):
    rng = np.random.default_rng([*key])
    return math.sqrt(rng.chisquare(8) / 8)


def test_exponents_in_tokens_are_found_with_what_they_are_to_one_half():
    true = {("x", "rms"): -0.5, ("x", "sup"): -0.25, ("theta", "rms"): -0.5}
    about = {"mask": "no mask", "share": 1.0, "step": 3}
    rows = [
        about
        | {"N": N, "variable": v, "norm": norm, "seed": seed}
        | {"error": N**exponent * scatter(N, seed, i)}
        for i, ((v, norm), exponent) in enumerate(true.items())
        for N in (8, 32, 128, 512, 2048)
        for seed in range(40 if N < 2048 else 20)
    ]
    laws = [
        about | {"variable": v, "norm": n, "seed": 0, "error": 1e-3}
        for v, n in (*true, ("p", "rms"))
    ]
    table = exponent_rows(rows, laws)
    found = {(row["variable"], row["norm"]): row for row in table}
    assert found.keys() == true.keys()
    for key, row in found.items():
        assert row["low"] < true[key] < row["high"]
        assert row["verdict"] == ("differ" if true[key] == -0.25 else "alike within 0.1")
        assert row["of the nodes"] == 1e-3
        assert row["at the last N"] == pytest.approx(2048 ** true[key], rel=0.2)


def test_the_three_parts_of_particles_are_told_apart():
    joint = [
        {"L": L, "H": H, "N": N, "step": 3, "variable": "x", "norm": "rms", "share": 1.0}
        | {"seed": seed, "error": scatter(L, H, N, seed) * math.hypot(2 / L, (L * H) ** -0.5, size)}
        for L, H, N in itertools.product((4, 16, 64), (1, 16, 256), (16, 64, 256))
        for size in [3 * N**-0.5]
        for seed in range(24)
    ]
    table, refused = part_rows(joint)
    assert refused == []
    (best,) = (row for row in table if row["better"])
    assert best["model"] == "quadrature" and best["p"] > 0.01 and best["misfit"] < 0.15
    for name, value in {"a": 2.0, "b": 1.0, "c": 3.0}.items():
        assert best[f"{name} low"] < value < best[f"{name} high"]
    table, (why,) = part_rows([*joint[:-1], joint[-1] | {"error": math.nan}])
    assert table == [] and why.startswith("step 3 x rms: no parts, errors must be > 0")


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--depths 4 6 8", "depths must be multiples of 4, where they are compared; got 6."),
        ("--heads 1 4", "heads must be three or more, for an exponent or the misfit of one"),
        ("--token-counts 4 8", "token_counts must be three or more"),
        ("--token-counts 4 8 8", "token_counts must be distinct"),
        ("--joint-counts 0 4 8", "joint_counts must be at least 1; got 0."),
        ("--token-nodes 1", "token_nodes must be at least 2; got 1."),
        ("--scramblings 1", "scramblings must be at least 2; got 1."),
        ("--radius 0", "radius must be a finite number in (0, inf)"),
        ("--width 0", "width must be a finite number in (0, inf)"),
        ("--tokens 4", "tokens must be left out of the study chaos, which compares several"),
        ("--causal", "causal must be left out of the study chaos, which compares several"),
        ("--probes 3", "probes must be left out of laws of tokens, which are compared at points"),
        ("--law xavier", "law must be atoms; got 'xavier'. Leave --law out."),
        ("--tied", "tied must be left out of the study chaos"),
    ],
)
def test_bad_sizes_are_refused_in_one_line(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(Chaos, "run", lambda study: None)
    with pytest.raises(SystemExit) as stopped:
        main(["study", "chaos", *flags.split(), "--out", str(tmp_path)])
    said = capsys.readouterr().err.strip()
    assert stopped.value.code == 2 and said.startswith(f"ipslimit: {message}"), said
    assert "\n" not in said


def test_very_many_tokens_are_drawn_less_often():
    study = dataclasses.replace(STUDY, quick=False)
    assert [study.seeds_at(count) for count in (8, 512, 1024, 2048, 4096)] == [24, 24, 12, 8, 8]
    assert dataclasses.replace(study, seeds=4).seeds_at(2048) == 4
