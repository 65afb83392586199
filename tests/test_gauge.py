"""The gauge study: what it measures, that it resumes, and what it refuses."""

import csv
import json

import matplotlib.image
import pytest

from ipslimit.experiments.cli import main
from ipslimit.experiments.gauge.experiment import TREATMENTS, GaugeSetting
from ipslimit.experiments.provenance import provenance
from ipslimit.experiments.settings import Setting

FLAGS = (
    "gauge --d 3 --m 2 --tokens 3 --contexts 2 --atoms 4 --steps 2 --eps 0.1 --lr 0.1 "
    "--factors 4 16 --gauges 2 --every 2 --depth 16 --heads 2 --tol 1e-3 --workers 1"
).split()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gauge")
    main([*FLAGS, "--out", str(folder)])
    return folder


def rows_of(folder):
    with (folder / "gauge.csv").open() as file:
        return list(csv.DictReader(file))


def test_balanced_laws_keep_together_and_others_part_the_more_the_larger_the_factor(finished):
    largest = {}
    for row in rows_of(finished):
        if int(row["step"]) == 0:  # one function, to the rounding of O(1) terms; limits may be
            # solved on two grids, each to its own error
            allowed = 2 * float(row["limit_error"]) if row["model"] == "limit" else 1e-14
            assert float(row["distance"]) < allowed
        elif int(row["step"]) == 2:
            key = row["balancing"], row["model"], float(row["factor"])
            largest[key] = max(largest.get(key, 0.0), float(row["distance"]))
    for model in ("limit", "particles"):
        for factor in (4.0, 16.0):
            none, soft, hard, exact = (largest[t, model, factor] for t in TREATMENTS)
            # rounding, over 33 nodes and two steps
            assert none > soft > 1e-3 > 1e-13 > max(hard, exact)
        assert largest["none", model, 16.0] > largest["none", model, 4.0]


def test_all_results_are_written(finished):
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "cells",
        "config.json",
        "gauge.json",
        "gauge.csv",
        "gauge.png",
        "gauge.pdf",
        "gauge.sha256",
        ".gauge",
    }
    assert len(list((finished / "cells").iterdir())) == 4 * (1 + 2 * 2)
    assert matplotlib.image.imread(finished / "gauge.png").std() > 0.05  # not blank
    numbers = json.loads((finished / "gauge.json").read_text())
    assert len(numbers["rows"]) == 4 * 2 * 2 * 2 * 2 * 3  # treatment f gauge model variable step
    assert 0 < numbers["limit_error"] <= 1e-3 and numbers["notes"] == []
    assert json.loads((finished / "config.json").read_text()).items() >= provenance("cpu").items()


def test_a_killed_study_resumes_to_the_same_files(finished, capsys):
    before = {name: (finished / name).read_bytes() for name in ("gauge.json", "gauge.csv")}
    lost, damaged = sorted((finished / "cells").glob("none-16.0-*"))
    lost.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-40])
    main([*FLAGS, "--out", str(finished)])
    assert damaged.name in capsys.readouterr().out
    for name, content in before.items():
        assert (finished / name).read_bytes() == content


def test_exact_steps_are_those_of_adamw_alone_with_its_options():
    study = GaugeSetting(Setting(lr=0.1, weight_decay=0.0))
    exact = study.rule("exact")
    assert repr(exact) == repr(study.rule("none")).replace("AdamW(", "GaugeAdamW(")
    for other in (Setting(rule="lion"), Setting(clip=1.0)):
        assert GaugeSetting(other).treatments == TREATMENTS[:-1]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--law", "xavier"], "law must be atoms"),
        (["--rebalance", "2"], "rebalance must be 0"),
        (["--factors", "1"], "factors must be a finite number in (1"),
        (["--factors", "2", "2"], "factors must be distinct"),
        (["--depth", "20"], "depth must be a multiple of 16"),
        (["--soft", "1"], "soft must be"),
        (["--every", "0"], "every must be at least 1"),
        (["--rule", "sgd", "--momentum", "0.9"], "momentum holds weight_decay"),
        (["--rule", "gauge-adamw"], "its steps are the same in every gauge"),
    ],
)
def test_bad_settings_are_refused_in_one_line(capsys, tmp_path, flags, message):
    with pytest.raises(SystemExit) as stopped:
        main(["gauge", *flags, "--out", str(tmp_path)])
    text = capsys.readouterr().err
    assert stopped.value.code == 2 and message in text and len(text.splitlines()) == 1
