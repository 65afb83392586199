"""Sweeps: what they find, that they resume, and what they refuse."""

import csv
import dataclasses
import json
import math
import re

import matplotlib.image
import numpy
import pytest

import ipslimit.experiments.cells
import ipslimit.experiments.sweep
from ipslimit import train_particles
from ipslimit.experiments.cli import main
from ipslimit.experiments.compare.compared import Compared
from ipslimit.experiments.compare.experiment import compare
from ipslimit.experiments.rates_figure import rates_figure
from ipslimit.experiments.settings import Setting, Sizes, StudyError, SweepSetting
from ipslimit.experiments.summary import summary
from ipslimit.experiments.sweep import Sweep, outcome

SMALL = SweepSetting(
    Setting(d=3, m=2, tokens=3, contexts=2, probes=2, atoms=4, steps=2, eps=0.1),
    Sizes(depths=(2, 4, 8), heads=(1, 4, 16), seeds=4),
    tol=1e-4,
)
FLAGS = (
    "--d 3 --m 2 --tokens 3 --contexts 2 --probes 2 --atoms 4 --steps 2 --eps 0.1 --tol 1e-4"
).split()
FILES = {"config.json", "results.csv", "weak.csv"}
FILES |= {f"rates.{kind}" for kind in ("json", "png", "pdf", "sha256")}


def sizes(**changes):
    return dataclasses.replace(SMALL, sizes=dataclasses.replace(SMALL.sizes, **changes))


def setting(**changes):
    return dataclasses.replace(SMALL, setting=SMALL.setting.varied(**changes))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small sweep and the folder with its results."""
    folder = tmp_path_factory.mktemp("sweep")
    result = Sweep(SMALL, folder, "cpu").run(progress=False)
    outcome(result, SMALL).write(folder)
    return result, folder


def test_all_results_are_written(finished):
    _, folder = finished
    assert {path.name for path in folder.iterdir()} == FILES | {"cells", ".rates"}
    assert len(list((folder / "cells").glob("*.json"))) == 3 * (3 + 1) + 1  # H = inf, limit
    assert matplotlib.image.imread(folder / "rates.png").std() > 0.05  # not blank


def test_rates_json_holds_what_is_promised(finished):
    _, folder = finished
    rates = json.loads((folder / "rates.json").read_text())
    assert rates["limit"]["status"] == "converged"
    assert 0 < rates["limit"]["error"] <= SMALL.tol
    cases = [(row["step"], row["variable"]) for row in rates["limit"]["errors"]]
    assert cases == [(step, variable) for step in (0, 2) for variable in ("x", "p", "theta")]
    assert max(row["error"] for row in rates["limit"]["errors"]) == rates["limit"]["error"]
    assert rates["runs"]["total"] == 3 * (3 * 4 + 1) and rates["runs"]["diverged"] == 0
    terms = [("bias", "L"), ("fluctuation", "L"), ("fluctuation", "H"), ("total", "L")]
    wanted = {(s, v, *term) for s in (0, 2) for v in "xp" for term in terms}
    found = {(f["step"], f["variable"], f["term"], f["in"]) for f in rates["fits"]}
    assert wanted <= found
    for fit in rates["fits"]:
        low, high = fit["ci95"]
        assert low <= fit["exponent"] <= high
        assert (
            fit["sizes"] >= 3 and fit["norm"] in ("rms", "sup") and fit["set"] in ("train", "probe")
        )
    # every exponent of a fluctuation has a verdict
    names = ("step", "variable", "norm", "set", "in", "at")
    keys = [tuple(f[n] for n in names) for f in rates["fits"] if f["term"] == "fluctuation"]
    assert keys == [tuple(s[n] for n in names) for s in rates["shares"]] and keys
    for row in rates["constant"]:
        assert math.isfinite(row["ratio"]) and row["ci95"][0] <= row["ratio"] <= row["ci95"][1]
        # at full size: the run's own departure over all layers, or the mirrored one
        assert row["nonlinearity"] > 0
    cases = {(row["step"], row["variable"], row["set"]) for row in rates["constant_trends"]}
    assert cases == {(s, v, w) for s in (0, 2) for v in "xp" for w in ("train", "probe")}
    assert {row["at"] for row in rates["at_initialisation"]} == {"all", "inf"}


def test_config_is_enough_to_repeat_the_study(finished):
    _, folder = finished
    for name in ("config.json", "rates.json"):  # either can stand alone
        content = json.loads((folder / name).read_text())
        assert SweepSetting.from_dict(content["study"]) == SMALL
        assert content["versions"]["numpy"] == numpy.__version__
        assert content["machine"]["device"] == "cpu"


def test_equal_studies_give_equal_files(finished, tmp_path):
    _, folder = finished
    outcome(Sweep(SMALL, tmp_path, "cpu").run(progress=False), SMALL).write(tmp_path)
    for name in FILES:
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_results_csv_has_one_row_a_seed_and_no_times(finished):
    _, folder = finished
    with open(folder / "results.csv") as file:
        rows = list(csv.DictReader(file))
    assert set(rows[0]) == {"step", "variable", "term", "norm", "set", "L", "H", "seed", "error"}
    key = {"step": "2", "variable": "x", "term": "total", "norm": "sup", "set": "probe", "L": "4"}
    chosen = [row for row in rows if all(row[k] == v for k, v in key.items())]
    assert sorted((int(r["H"]), r["seed"]) for r in chosen) == [
        (h, str(s)) for h in (1, 4, 16) for s in range(4)
    ]
    assert {row["H"] for row in rows if row["term"] == "bias"} == {"inf"}
    with open(folder / "weak.csv") as file:
        assert {row["H"] for row in csv.DictReader(file)} == {"1", "4", "16"}


def test_the_limit_of_theta_has_an_error_of_its_own(finished, tmp_path):
    result, _ = finished
    errors = {(step, v): error for step, v, error in result.limit["errors"]}
    assert set(errors) == {(step, v) for step in (0, 2) for v in ("x", "p", "theta")}
    # layers of dyadic depths sit on nodes of the grid, where heads are as good as x and p
    assert 0 < errors[2, "theta"] <= SMALL.tol and errors[0, "theta"] == 0.0
    assert [row[0] for row in result.limit["theta"]] == [0, 2]
    assert max(error for _, error in result.limit["theta"][1][1:]) == errors[2, "theta"]
    # between nodes they are not, where Adam's steps are fronts: a bias below that is no bias
    study = dataclasses.replace(
        sizes(depths=(3, 5, 6), heads=(4,), seeds=2),
        setting=SMALL.setting.varied(eps=1e-8),
        tol=1e-3,
    )
    result = Sweep(study, tmp_path, "cpu").run(progress=False)
    errors = {(step, v): error for step, v, error in result.limit["errors"]}
    assert errors[2, "theta"] > 0.01 > 10 * errors[2, "x"]
    asked = (2, "theta", "bias")
    refused = [r for r in result.fits.refused if (r["step"], r["variable"], r["term"]) == asked]
    assert refused and all("below 10 x the limit's error" in r["reason"] for r in refused)


def test_cells_besides_the_product(tmp_path):
    assert len(Sizes().cells) == 6 * 5 + 3 * 2 and max(Sizes().cells) == (1024, 64)
    # they are part of the default sizes, and of no others
    assert SMALL.sizes.cells == [(L, H) for L in (2, 4, 8) for H in (1, 4, 16)]
    assert len(Sizes(seeds=3).cells) == 36 and len(Sizes(more=()).cells) == 30
    study = dataclasses.replace(sizes(more=((16, 4), (16, 1), (8, 2), (8, 4))), constant=False)
    result = Sweep(study, tmp_path, "cpu").run(progress=False)
    found = {(row["L"], row["H"]) for row in result.rows if row["term"] == "fluctuation"}
    assert found == set(SMALL.sizes.cells) | {(16, 4), (16, 1), (8, 2)}
    assert {row["L"] for row in result.rows if row["term"] == "bias"} == {2, 4, 8, 16}
    (fit,) = result.fits.select(
        step=2, variable="x", term="fluctuation", size="L", at="all", norm="rms", set="train"
    )
    assert fit.window == (2, 4, 8, 16)
    assert [depth for depth, _ in result.limit["theta"][1][1:]] == [2, 4, 8, 16]
    assert SweepSetting.from_dict(json.loads(json.dumps(study.as_dict()))) == study
    outcome(result, study).write(tmp_path)


def test_resuming_computes_only_what_is_missing(finished, tmp_path, monkeypatch):
    result, folder = finished
    for path in (folder / "cells").iterdir():
        (tmp_path / "cells").mkdir(exist_ok=True)
        if "L4-H4-" not in path.name:
            (tmp_path / "cells" / path.name).write_bytes(path.read_bytes())
    measured = []
    original = ipslimit.experiments.sweep.measure_cell
    monkeypatch.setattr(
        ipslimit.experiments.sweep,
        "measure_cell",
        lambda *arguments: measured.append(arguments[4:]) or original(*arguments),
    )
    again = Sweep(SMALL, tmp_path, "cpu").run(progress=False)
    assert measured == [(4, 4)]
    assert again.rows == result.rows and again.limit == result.limit


def test_a_damaged_cell_is_reported_and_computed_again(finished, tmp_path):
    result, folder = finished
    (tmp_path / "cells").mkdir()
    for path in (folder / "cells").iterdir():
        content = path.read_bytes()
        if "L8-H16-" in path.name:
            content = content[: len(content) // 2]
        (tmp_path / "cells" / path.name).write_bytes(content)
    again = Sweep(SMALL, tmp_path, "cpu").run(progress=False)
    assert len(again.damaged) == 1 and "L8-H16-" in again.damaged[0]
    assert again.rows == result.rows


@pytest.mark.parametrize(
    "change", [setting(lr=0.03), setting(causal=True), sizes(seeds=5), sizes(root_seed=1)]
)
def test_cells_of_another_study_are_not_taken_for_this_one(finished, change):
    _, folder = finished
    names = {path.name for path in (folder / "cells").iterdir()}
    other = Sweep(change, folder, "cpu")
    paths = {other.path((depth, heads)).name for depth in (2, 4, 8) for heads in (None, 1, 4, 16)}
    assert not paths & names


def test_more_depths_reuse_the_cells_there_are(finished):
    _, folder = finished
    larger = Sweep(sizes(depths=(2, 4, 8, 16)), folder, "cpu")
    assert all(larger.path((depth, heads)).exists() for depth in (2, 4, 8) for heads in (None, 1))


def test_summary_shows_exponents_constants_and_theory(finished):
    result, _ = finished
    text = summary(result)
    for words in (
        "limit: converged",
        "39 in all, 0 diverged",
        "fluctuation",
        "H=16",
        "theory -0.50",
        "x predicted fluctuation goes like L^g",
    ):
        assert words in text
    # one head in two layers is far from linear
    (bent,) = (row for row in result.runs["not_linear"] if row["step"] == 2)
    assert 1 <= bent["cells"] <= result.runs["predicted_cells"] == 9
    assert f"step 2: {bent['cells']} of 9, L H up to {bent['up_to']}" in text
    assert len(summary(result, everything=True)) > 2 * len(text)
    # and what each exponent of the fluctuation in L allows, as rates.json has it
    (fit,) = result.fits.select(
        step=2, variable="x", term="fluctuation", size="L", at="all", norm="rms", set="train"
    )
    share = result.fits.share(fit)
    (line,) = (line for line in text.splitlines() if line.startswith("  step 2 x     L^-1/3"))
    assert line.endswith(share.verdict) and "paired" in line
    assert f" {100 * share.upper[2]:.0f} % ({100 * share.expected[2]:.0f} %)  bend" in line
    words = share.brief.replace("<=", "≤")
    six, every = rates_figure(result, SMALL), rates_figure(result, SMALL, "all")
    assert len(six.axes) == 6 and len(every.axes) == 3 * 2 * len(SMALL.setting.recorded)
    for axis in (six.axes[3], every.axes[6]):  # step 2, x, in L
        assert any(words in text.get_text() for text in axis.texts)
        drawn = {line.get_label() for line in axis.lines if len(line.get_xdata())}
        assert {text.get_text() for text in axis.get_legend().get_texts()} <= drawn


def test_a_limit_that_diverges_is_an_error_of_the_study(tmp_path):
    study = setting(rule="sgd", lr=1e6, weight_decay=0.0, dtype="float32")
    with pytest.raises(StudyError, match="limit of this study cannot be compared with: diverged"):
        Sweep(study, tmp_path, "cpu").run(progress=False)


def test_diverged_runs_are_counted_flagged_and_drawn(tmp_path, monkeypatch):
    def poisoned(problem, rule, depth, heads, *arguments, **options):
        run = train_particles(problem, rule, depth, heads, *arguments, **options)
        if (depth, heads) == (4, 4):
            run.diverged[1] = True
            run.x[2][1, 3:] = math.nan
        return run

    monkeypatch.setattr(ipslimit.experiments.cells, "train_particles", poisoned)
    result = Sweep(SMALL, tmp_path, "cpu").run(progress=False)
    assert result.runs["diverged"] == 1
    key = {"step": 2, "variable": "x", "norm": "rms", "set": "train", "term": "fluctuation"}
    (fit,) = result.fits.select(size="L", at=4.0, **key)
    assert fit.diverged == 1 and "diverged" in fit.note
    assert "1 diverged" in summary(result)
    outcome(result, SMALL).write(tmp_path)
    assert "nan" in (tmp_path / "results.csv").read_text()  # shown, not dropped
    drawn = rates_figure(result, SMALL)
    assert "1 diverged runs" in drawn._supxlabel.get_text()


def test_sampled_laws_are_swept_against_their_quadrature(tmp_path):
    study = SweepSetting(
        Setting(d=2, m=2, tokens=3, contexts=2, probes=0, law="xavier", nodes=16, steps=1, eps=0.1),
        Sizes((2, 4, 8), (2, 4), 3),
        tol=1e-3,
    )
    result = Sweep(study, tmp_path, "cpu").run(progress=False)
    assert result.limit["quadrature_error"] > 0 and result.constant == []
    # nodes are fixed by default, and what they miss is said
    assert result.limit["nodes"] == 16 and result.limit["status"] == "tolerance not reached"
    assert f"{result.limit['quadrature_error']:.1e} > quadrature_tol 1.0e-03" in summary(result)
    outcome(result, study).write(tmp_path)
    # in the norm that the fits compare with
    squares = [
        row["error"] ** 2
        for row in result.limit["quadrature"]
        if (row["step"], row["variable"], row["norm"], row["set"]) == (1, "p", "rms", "train")
    ]
    floor = 3 * math.sqrt(sum(squares) / len(squares))
    assert f"step 1 p {floor:.1e}" in summary(result)
    text = summary(result)
    assert "too few sizes, 3 or more are needed" in text  # two in H
    counts = [int(n) for n in re.findall(r"^  (\d+): ", text, re.MULTILINE)]
    missing = int(re.search(r"(\d+) exponents could not be had", text)[1])
    assert sum(counts) == missing < len(result.fits.refused)  # what nobody asked for is not told


def test_models_with_the_whole_law_hold_the_nodes_of_the_limit(tmp_path):
    setting = Setting(
        d=2, m=2, tokens=3, contexts=2, probes=0, law="xavier", nodes=16, steps=1, eps=0.1
    )
    sizes = Sizes((2,), (2,), 2)

    def swept(name, **options):
        study = SweepSetting(setting.varied(**options), sizes, tol=1e-3)
        return Sweep(study, tmp_path / name, "cpu").run(progress=False)

    tol = 0.3 * swept("fixed").limit["quadrature_error"]
    raised = swept("raised", quadrature_tol=tol, max_nodes=4096)
    assert raised.limit["status"] == "converged" and raised.limit["nodes"] > 16
    again = swept("again", nodes=raised.limit["nodes"], quadrature_tol=tol)
    assert raised.rows == again.rows
    kept = swept("raised", quadrature_tol=tol, max_nodes=4096)  # from its files
    assert kept.rows == raised.rows and kept.limit == raised.limit


def test_no_gap_is_left_where_no_joint_fit_is(finished):
    result, _ = finished
    fits = dataclasses.replace(result.fits, joint=[])
    assert "\n\n\n" not in summary(dataclasses.replace(result, fits=fits))


def run_cli(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return stopped.value.code, capsys.readouterr()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--rule", "adam"], "rule must be one of adamw"),
        (["--law", "normal"], "law must be one of atoms"),
        (["--depths", "0"], "depths must be at least 1"),
        (["--heads", "0", "4"], "heads must be at least 1"),
        (["--heads", "4", "4"], "heads must be distinct"),
        (["--more", "4", "0"], "more must be at least 1"),
        (["--seeds", "0"], "seeds must be at least 1"),
        (["--seeds", "20000000"], "seeds must be at most 16777216"),
        (["--steps", "-1"], "steps must be at least 0"),
        (["--record", "9"], "record must name steps"),
        (["--lr", "nan"], "lr must be a finite number"),
        (["--betas", "1", "0.9"], "betas[0] must be"),
        (["--tol", "0"], "tol must be"),
        (["--dtype", "float16"], "dtype must be one of float64"),
        (["--device", "abacus"], "device must be"),
        (["--gain", "0"], "gain must be"),
        (["--law", "xavier"], "--atoms is an option of atoms; xavier has gain. Leave it out."),
        (["--out", "/dev/null/sub"], "out must be a folder"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, tmp_path, arguments, words):
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    status, printed = run_cli(capsys, "sweep", *FLAGS, *out, *arguments)
    assert status == 2
    assert words in printed.err and printed.err.count("\n") == 1
    assert not list(tmp_path.rglob("*.json"))  # nothing half-written


def test_unknown_flags_and_commands_end_with_status_2(capsys):
    assert run_cli(capsys, "sweep", "--depht", "4")[0] == 2
    assert run_cli(capsys, "swep")[0] == 2


def test_command_line_sweeps_and_compares(capsys, tmp_path):
    flags = [*FLAGS, "--seeds", "3"]
    out = str(tmp_path / "sweep")
    sizes = "--depths 2 4 8 --heads 1 16 --more 16 1 16 4".split()
    main(["sweep", *flags, *sizes, "--out", out])
    assert "rates.png, rates.pdf" in capsys.readouterr().out
    main(["compare", *flags, "--depth", "4", "--heads", "2", "--out", str(tmp_path / "compare")])
    printed = capsys.readouterr().out
    assert "limit: converged" in printed and "step 2 p: rms error" in printed
    files = "config.json errors.csv distances.csv paths.csv compare.png compare.pdf compare.sha256 "
    files += ".compare"
    assert {path.name for path in (tmp_path / "compare").iterdir()} == set(files.split())
    assert "quadrature" not in printed  # with atoms there is none


def test_comparison_measures_what_the_sweep_measures(finished):
    result, _ = finished
    pair = Compared(SMALL.setting, depth=4, heads=4, seeds=SMALL.sizes.seeds, tol=SMALL.tol)
    (found,) = compare(pair, "cpu")
    rms = max(r["rms"] for r in found.error_rows() if (r["step"], r["variable"]) == (2, "p"))
    key = {"step": 2, "variable": "p", "term": "total", "norm": "rms", "set": "train"}
    key |= {"L": 4, "H": 4.0}
    squares = [r["error"] ** 2 for r in result.rows if all(r[k] == v for k, v in key.items())]
    # the same runs: rounding only
    assert rms == pytest.approx(math.sqrt(sum(squares) / len(squares)), rel=1e-12)
