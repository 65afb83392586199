"""Studies of the theorem's clauses: what they write, that they resume, and what they refuse.

Their numbers are those of sweeps and fits, which have tests of their own; here every study runs
once in a tiny size.
"""

import csv
import dataclasses
import itertools
import json
import re
import shutil
from html.parser import HTMLParser

import matplotlib.image
import pytest
from slow_cases import slow_but

from ipslimit.experiments.cli import main
from ipslimit.experiments.provenance import provenance
from ipslimit.experiments.settings import Setting
from ipslimit.experiments.store import write_cell
from ipslimit.experiments.studies import beside, scaling, uniform
from ipslimit.experiments.studies.base import ClauseStudy
from ipslimit.experiments.studies.chaos_cells import LawSetting
from ipslimit.experiments.studies.command import STUDIES, All
from ipslimit.experiments.studies.fair import FairSetting
from ipslimit.experiments.studies.finding import outcome
from ipslimit.experiments.studies.report import read_finding, report
from ipslimit.experiments.studies.scaling import SymmetricSetting
from ipslimit.experiments.studies.search import PointSetting
from ipslimit.experiments.studies.traced import TracedSetting
from ipslimit.measure.rates import equivalence
from ipslimit.measure.rates.share import BENT, HELD, OPEN, SLOWER

SMALL = {"d": 3, "m": 2, "tokens": 3, "contexts": 2, "probes": 0, "atoms": 4, "eps": 0.1}
SIZES = {"quick": True, "tol": 1e-3, "device": "cpu", "seeds": 4, "depths": (2, 4, 8)}


def without(name):
    return {key: value for key, value in SMALL.items() if key != name}


def small(name, out):
    """The study in a size of a second or two."""
    fixed = SIZES | {"depths": (4,), "heads": (4,), "seeds": 2, "problems": 2}
    trained = {"setting": Setting(**SMALL, steps=2, record=(0, 2)), "heads": (1, 4, 16)}
    options = {
        "rates": trained,
        "influence": trained | {"setting": Setting(**without("eps"), steps=2, record=(0, 2))},
        "constant": trained | {"seeds": 3, "heads": (1, 16, 256)},
        "causal": trained,
        "steps": trained | {"setting": Setting(**SMALL, steps=4), "heads": (4, 16)},
        "epsilon": {
            "setting": Setting(**without("eps"), steps=2, record=(0, 2)),
            "heads": (1, 4, 16),
            "eps_values": (0.1, 1e-3),
        },
        "laws": trained
        | {"setting": Setting(**without("atoms"), steps=1, record=(1,), nodes=64, law="xavier")},
        "sharpness": {
            "setting": PointSetting(**SMALL, steps=1, record=(1,)),
            "heads": (1, 4, 16),
            "eps_values": (0.1, 0.05),
            "lrs": (0.1,),
            "restarts": 2,
            "tries": 2,
        },
        "scaling": {"setting": SymmetricSetting(**SMALL, steps=0, record=(0,))},
        "uniform": {"setting": Setting(**SMALL, steps=1, record=(1,)), "heads": (4,)},
        "flow": {"setting": Setting(**SMALL, steps=1, record=(1,)), "points": 8, "iterations": 3},
        "tokens": fixed | {"token_counts": (2, 3, 4)},
        "dimension": fixed | {"dimensions": (2, 3, 4)},
        "batches": {"heads": (1, 4), "batch_sizes": (1, 4), "batch_seeds": 2},
        "horizon": {"heads": (1, 64)},
        "chaos": {
            "setting": LawSetting(**without("tokens"), steps=1, record=(0, 1)),
            "depths": (4, 8, 16),
            "heads": (1, 4, 16),
            "token_counts": (2, 3, 4),
            "joint_counts": (2, 3, 4),
            "token_nodes": 8,
            "scramblings": 2,
            "points": 3,
            "seeds": 2,
        },
    }.get(name, trained)
    if name == "steps":
        options["setting"] = options["setting"].varied(record=(0, 2, 3, 4))
    if name in ("batches", "horizon"):
        more = {"record": (0, 1, 2, 4), "batch": 2} if name == "horizon" else {"record": (4,)}
        options["setting"] = Setting(**SMALL | {"contexts": 4, "probes": 2}, steps=4, **more)
    if name == "uniform":
        options |= {"iterations": 3, "random_contexts": 5, "starts": 2}
    if name == "tokens":
        options["setting"] = TracedSetting(
            **without("tokens"), steps=1, record=(0, 1), drawn_tokens=8, tracers=3
        )
    if name == "dimension":
        options["setting"] = FairSetting(**without("d"), steps=1, record=(0, 1))
    (study,) = (s for s in STUDIES if name == s.NAME)
    return study(**(SIZES | {"out": out} | options))


class Folders(dict):
    """name -> folder of a study, which runs when it is first asked for, and once."""

    def __init__(self, factory):
        super().__init__()
        self.factory = factory

    def __missing__(self, name):
        folder = self[name] = self.factory.mktemp(name)
        small(name, folder).measure(progress=False).write(folder)
        return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return Folders(tmp_path_factory)


NAMES = [study.NAME for study in STUDIES]
# Those of a few seconds. The others have tests of what is their own, and run among the slow ones.
FAST = "rates laws steps scaling influence".split()


def studies(names=NAMES):
    return pytest.mark.parametrize("name", slow_but(names, *FAST))


def test_the_help_lists_every_study_and_says_how_to_give_ones_own(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["study", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0 and "study mine.py:Temperature" in printed
    assert all(f" {name} " in printed for name in [*NAMES, "all"])


@pytest.mark.slow
def test_all_runs_every_study_with_its_flags_and_binds_a_report(
    tmp_path, monkeypatch, capsys, folders
):
    asked, found = [], {name: small(name, folders[name]) for name in NAMES}

    def finished(study, progress):
        """What was computed above, in its place."""
        asked.append(study)
        return outcome(found[study.NAME].find(progress=False), "cpu")

    monkeypatch.setattr(ClauseStudy, "measure", finished)
    flags = "--quick --device cpu --workers 1 --json --out".split()
    main(["study", "all", *flags, str(tmp_path)])
    printed = capsys.readouterr()
    assert list(json.loads(printed.out)) == NAMES and "report.html" in printed.err
    assert [type(study) for study in asked] == list(STUDIES)
    assert all(study.quick and study.device == "cpu" and study.workers == 1 for study in asked)
    assert [study.folder for study in asked] == [tmp_path / name for name in NAMES]
    page = (tmp_path / "report.html").read_text()
    assert all(study.TITLE in page for study in STUDIES)


def test_what_one_study_cannot_take_all_refuse(tmp_path):
    """The options are those of every command, and mean the same."""
    asked = All(out=tmp_path, workers=2, scheduler=None, json=True)
    asked.check()
    assert all(study.workers == 2 and study.json for study in asked.studies)
    with pytest.raises(ValueError, match=r"^memory must be left out of uniform, which trains all"):
        All(out=tmp_path, memory=1.0).check()


@studies()
def test_a_study_writes_numbers_tables_figures_and_one_sentence(folders, name):
    finding = read_finding(folders[name])
    assert finding["study"] == name and finding["design"] and finding["theory"]
    assert re.search(r"\d", finding["sentence"])
    assert finding.items() >= provenance("cpu").items()
    assert finding["measured"]
    for line in finding["measured"]:
        assert line["what"] and line["theory"] and line["text"]
        if line["interval"] is not None:
            low, high = line["interval"]
            # (a range over cells holds their mean up to rounding)
            assert low - 1e-12 <= line["value"] <= high + 1e-12
    for table in finding["tables"]:
        with open(folders[name] / f"{table['name']}.csv") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == len(table["rows"]) > 0 and list(rows[0]) == table["columns"]
    assert finding["pictures"]
    for picture in finding["pictures"]:
        assert matplotlib.image.imread(folders[name] / picture["file"]).std() > 0.05  # not blank
        assert (folders[name] / picture["file"]).with_suffix(".pdf").exists()
    assert finding["settings"]["setting"]["m"] == 2 and finding["settings"]["seeds"] >= 2


def test_of_laws_that_vary_the_options_of_each_are_recorded(folders):
    settings = read_finding(folders["laws"])["settings"]
    options = {"xavier": {"gain": 1.0}, "truncated-normal": {"std": 0.5, "bound": 1.0}}
    assert settings["law"] == [*options] and settings["law_options"] == options
    assert not {"law", "law_options"} & settings["setting"].keys()


# Where studies ask for runs and limits by themselves.
TRAIN = "uniform flow chaos_cells epsilon scaling".split()
SOLVE = "beside chaos_cells epsilon motion".split()


@studies(["tokens", "uniform", "epsilon", "scaling", "horizon", "flow", "chaos"])
def test_a_finished_study_is_read_from_its_cells(folders, name, monkeypatch):
    """Nothing is trained again, and the finding is the same."""

    def refuse(*arguments, **options):
        raise AssertionError("a finished cell was computed again")

    for module in ("cells", *(f"studies.{own}" for own in TRAIN)):
        monkeypatch.setattr(f"ipslimit.experiments.{module}.train_particles", refuse)
    for module in ("sweep", *(f"studies.{own}" for own in SOLVE)):
        monkeypatch.setattr(f"ipslimit.experiments.{module}.solve_limit", refuse)
    before = (folders[name] / "finding.json").read_bytes()
    small(name, folders[name]).measure(progress=False).write(folders[name])
    assert (folders[name] / "finding.json").read_bytes() == before


@studies(["uniform", "scaling"])
def test_a_killed_study_loses_the_cell_in_flight_only(tmp_path, monkeypatch, name):
    module = {"uniform": uniform, "scaling": scaling}[name]
    calls, solves = [], []
    original, solve = module.train_particles, beside.solve_limit
    monkeypatch.setattr(beside, "solve_limit", lambda *a, **o: solves.append(a) or solve(*a, **o))

    def killed_at_the_third(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    monkeypatch.setattr(module, "train_particles", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        small(name, tmp_path).find(progress=False)
    done = {path.name for path in (tmp_path / "cells").glob("*.json")}
    assert len(done) == 2
    monkeypatch.setattr(module, "train_particles", original)
    small(name, tmp_path).find(progress=False)
    assert done < {path.name for path in (tmp_path / "cells").iterdir()}
    assert len(solves) == (name == "uniform")  # its limit had been solved for
    assert not list((tmp_path / "cells").glob("*.solved"))


@studies(["scaling", "uniform", "epsilon"])
def test_cells_of_another_form_are_reported_and_computed_again(folders, tmp_path, name):
    """Though their checksum fits."""
    cells = {"scaling": "spread-*", "uniform": "uniform-*", "epsilon": "control-*"}[name]
    shutil.copytree(folders[name], tmp_path, dirs_exist_ok=True)
    before = {path: path.read_bytes() for path in (tmp_path / "cells").glob(cells)}
    hostile = [{}, [], {"rows": 5}, None, 1.5]
    for path, content in zip(before, itertools.cycle(hostile)):
        write_cell(path, content)
    finding = small(name, tmp_path).find(progress=False)
    assert sum("does not hold a result" in note for note in finding.notes) == len(before) > 2
    assert {path: path.read_bytes() for path in before} == before


def test_cells_of_another_setting_are_not_taken(folders, tmp_path):
    study = small("scaling", folders["scaling"])
    other = dataclasses.replace(study, setting=study.setting.varied(d=2))
    before = {path.name for path in (folders["scaling"] / "cells").iterdir()}
    other.find(progress=False)
    after = {path.name for path in (folders["scaling"] / "cells").iterdir()}
    assert len(after) == 2 * len(before)


def test_sentences_follow_the_numbers(folders):
    """The exponent in the sentence is the one in the table, as far as it is written out."""
    finding = read_finding(folders["rates"])
    rows = next(t for t in finding["tables"] if t["name"] == "exponents")["rows"]
    key = {"step": 2, "variable": "x", "term": "fluctuation", "norm": "rms", "in": "L"}
    (row,) = (r for r in rows if all(r[k] == v for k, v in key.items()))
    assert f"hidden states x {row['exponent']:.2f} [{row['low']:.2f}" in finding["sentence"]
    held = row["low"] <= -0.5 <= row["high"]
    listed = re.search(r"-1/2 lies in the intervals of (.*?), -1/3", finding["sentence"])[1]
    assert ("x rms" in listed) == held


@studies(["rates", "epsilon", "laws", "steps", "causal", "scaling", "sharpness"])
def test_every_exponent_of_a_fluctuation_in_depth_has_a_verdict(folders, name):
    finding = read_finding(folders[name])
    table = "slopes" if name == "scaling" else "exponents"
    rows = next(t for t in finding["tables"] if t["name"] == table)["rows"]
    chosen = [
        r for r in rows if (r.get("term", "fluctuation"), r.get("in", "L")) == ("fluctuation", "L")
    ]
    assert chosen and all(r["verdict"] in (HELD, SLOWER, BENT, OPEN) for r in chosen)
    bounded = [r for r in chosen if r["share bound"] is not None]
    assert all(0 < r["share bound"] <= 1 and 0 < r["expected bound"] <= 1 for r in bounded)
    others = [r for r in rows if r.get("term") == "bias"]
    assert all(r["verdict"] is None for r in others)
    # lines of the report that show such an exponent show its verdict
    lines = [
        m
        for m in finding["measured"]
        if re.search(r"(fluctuation|slope|: x|: p|: theta) in L", m["what"])
    ]
    shown = [m for m in lines if not re.match("found at|.*minus without", m["what"])]
    assert all(m["verdict"] and m["verdict"] in m["text"] for m in shown)
    assert shown or name in ("steps", "causal")


@studies(["causal", "uniform"])
def test_differences_have_half_widths_and_verdicts_of_their_intervals(folders, name):
    finding = read_finding(folders[name])
    (rows,) = (t["rows"] for t in finding["tables"] if t["name"] == "differences")
    kept = {"causal": {"bias", "fluctuation"}, "uniform": {None}}[name]
    assert {row.get("term") for row in rows} == kept
    for row in rows:
        assert row["half-width"] == pytest.approx((row["high"] - row["low"]) / 2)
        expected = equivalence((row["low"], row["high"]))
        assert row["verdict"] in (expected, "ascent has not ended")
        assert f"{row['half-width']:.2f}" in finding["sentence"] or name == "causal"


def test_command_line_studies_and_reports(capsys, tmp_path):
    out = str(tmp_path / "scaling")
    flags = "--quick --d 2 --m 2 --tokens 2 --atoms 3 --depths 2 4 8 --seeds 4".split()
    main(["study", "scaling", *flags, "--out", out])
    printed = capsys.readouterr().out
    assert "Other residual scalings" in printed and "written to" in printed
    main(["report", out, "--out", str(tmp_path / "report.html")])
    assert "1 studies" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()


class Page(HTMLParser):
    """Tags that are open, addresses that are asked for, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.ids, self.words = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.addresses += [attributes[k] for k in ("src", "href") if k in attributes]
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def test_report_is_one_whole_page_that_asks_for_nothing(folders):
    findings = [read_finding(folders[name]) for name in FAST]
    page = Page(report(findings))
    assert page.open == []
    images = [a for a in page.addresses if a.startswith("data:image/png;base64,")]
    assert len(images) == sum(len(f["pictures"]) for f in findings)
    links = [a for a in page.addresses if a not in images]
    assert {link.removeprefix("#") for link in links} == set(page.ids)  # nothing outside
    words = " ".join(page.words.split())
    for finding in findings:
        assert " ".join(finding["sentence"].split()) in words
        assert finding["title"] in words and finding["measured"][0]["text"] in words
        assert all(table["title"] in words for table in finding["tables"])
    assert '"contexts": 2' in words  # settings


def test_report_may_hold_a_study_twice_and_any_text(folders):
    finding = read_finding(folders["scaling"]) | {"title": "a < b & <script>"}
    page = Page(report([finding] * 2))
    assert len(set(page.ids)) == 2 and "script" not in page.open
    assert "a < b & <script>" in page.words
