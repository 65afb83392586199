"""What all commands share: one meaning of every option, one form of what is printed and refused."""

import json
import re
import tempfile
from pathlib import Path

import pytest
from slow_cases import slow_but
from test_own_files import SIGNUM
from test_reviews import make_imdb

from ipslimit.experiments.cli import COMMANDS, command_class, main
from ipslimit.experiments.frame.command import Command, ExperimentCommand, Options
from ipslimit.experiments.studies.command import STUDIES
from ipslimit.experiments.text.corpus import load_corpus

TEXT = str(Path(__file__).parent / "text.txt")


CLASSES = {name: command_class(name) for name in COMMANDS}


FRAMED = {name: c for name, c in CLASSES.items() if issubclass(c, ExperimentCommand)}


EVERY = [name for name in COMMANDS if name not in ("study", "report")]
EVERY += [f"study {study.NAME}" for study in STUDIES]


ENGINE = """
from ipslimit.experiments.engines import Engine

class Batch(Engine):
    def run(self, function, shared, tasks):
        for key, arguments in tasks.items():
            yield key, function(*shared, *arguments)
"""


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    return f"imdb:{make_imdb(tmp_path_factory.mktemp('aclImdb'))}"


def tiny(name, reviews):
    text = f"--data {reviews} --batch 8 --longest 12 --width 8 --layers 1 --heads 2"
    problem = "--d 2 --m 2 --tokens 2 --contexts 1 --atoms 2"
    return {
        "sweep": f"sweep --quick {problem} --probes 0 --steps 1 --eps 0.1 --tol 1e-2 --depths 2 4 "
        "--heads 1 2 --seeds 2",
        "compare": f"compare --quick {problem} --probes 0 --steps 1 --eps 0.1 --tol 1e-2 --depth 2 "
        "--heads 2 --against sgd",
        "scaling": f"study scaling --quick {problem} --depths 2 4 8 --seeds 3",
        "boundary": f"boundary {text} --quick --tasks reviews --steps 2 --evaluate 2 "
        "--methods adamw --widths 8 --early 1",
        "backbone": f"backbone {text} --steps 8 --every 1 --window 3 --seeds 1 --beta2 0.9 "
        "--depths 2 --particle-heads 3 --particle-seeds 2 --particle-steps 8 --max-elements 32",
        "rebalance": f"rebalance --data {TEXT} --quick --steps 4 --resumed-steps 4 "
        "--start-steps 4 --every 1 --factors 4 --widths 8 --depths 1 --vocabulary 300 --context 8 "
        "--width 8 --layers 1 --heads 2 --held-out-windows 4 --batch 2",
        "gauge": f"gauge --quick {problem} --steps 1 --eps 0.1 --depth 16 --heads 2 --tol 1e-2 "
        "--factors 4",
        "language": f"language --data {TEXT} --quick --vocabulary 9 --d 2 --m 2 --inner 1 "
        "--tokens 4 --contexts 9 --batch 2 --probes 2 --steps 2 --warmup 1 --atoms 2 --depths 2 "
        "--heads 2 --seeds 1 --rate-depths 2 --rate-heads 2 --rate-steps 1 --below 1 --above 0 "
        "--elements 2 --max-elements 8 --sample 2",
    }[name].split()


# the file that holds what --json prints; of a comparison there is none
PRINTED = {"sweep": "rates", "compare": None, "scaling": "finding"} | {n: n for n in FRAMED}


@pytest.mark.parametrize("name", slow_but(PRINTED, "sweep", "compare", "scaling", "boundary"))
def test_json_prints_the_result_file_and_nothing_else(name, reviews, tmp_path, capsys):
    if name == "rebalance":
        pytest.importorskip("tokenizers")
    arguments = [*tiny(name, reviews), "--workers", "1", "--out", str(tmp_path)]
    main([*arguments, "--json"])
    printed = capsys.readouterr()
    numbers = json.loads(printed.out)
    if name == "compare":
        config = json.loads((tmp_path / "config.json").read_text())
        assert numbers.items() > config.items() and len(numbers["errors"]) == 2 * 2 * 2 * 3
    else:
        file = f"{PRINTED[name]}.json"
        assert numbers == json.loads((tmp_path / file).read_text()) and file in printed.err


def test_without_json_the_same_runs_are_told_in_words(reviews, tmp_path, capsys):
    arguments = [*tiny("gauge", reviews), "--workers", "1", "--out", str(tmp_path)]
    main([*arguments, "--json"])
    cells = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    capsys.readouterr()
    main(arguments)
    printed = capsys.readouterr().out
    assert "largest estimated error of a limit" in printed and "gauge.pdf" in printed
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()} == cells


@pytest.mark.parametrize("name", ["sweep", "gauge"])
def test_damaged_files_are_told_beside_the_results(name, reviews, tmp_path, capsys, monkeypatch):
    tried, original = [], tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **o: tried.append(o) or original(**o))
    arguments = [*tiny(name, reviews), "--workers", "1", "--out", str(tmp_path)]
    main(arguments)
    # a folder that cannot be written is refused, once, before anything; the others are for locks
    folders = [given["dir"] for given in tried]
    assert folders[0] == tmp_path and folders.count(tmp_path) == 1
    path = min(p for p in (tmp_path / "cells").glob("*.json") if "limit" not in p.name)
    for json_too in ([], ["--json"]):
        path.write_bytes(path.read_bytes()[:-9])
        capsys.readouterr()
        main([*arguments, *json_too])
        printed = capsys.readouterr()
        said = printed.err if json_too else printed.out
        assert f"damaged result file: {path.name} is truncated" in said
    json.loads(printed.out)


@pytest.mark.parametrize("name", EVERY)
def test_options_that_all_have_mean_one_thing(name, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(Command, "run", lambda self: asked.append(self))
    engine = tmp_path / "mine.py"
    engine.write_text(ENGINE)
    given = {"workers": 2, "device": "cpu", "out": tmp_path, "engine": f"{engine}:Batch"}
    given = {option: value for option, value in given.items() if option not in kind_of(name).CANNOT}
    flags = [str(part) for option, value in given.items() for part in (f"--{option}", value)]
    data = ["--data", TEXT] if name == "rebalance" else []
    main([*name.split(), *data, "--quick", "--json", *flags])
    command = asked[0]
    assert type(command) is kind_of(name) and command.NAME == name.split()[-1]
    assert command.quick and command.json and command.folder == tmp_path
    assert all(getattr(command, option) == value for option, value in given.items())
    # nobody gives them a meaning of his own
    others = [kind for kind in type(command).mro() if kind not in (Command, Options)]
    for part in ("run", "done", "chosen_engine", "folder", "place", "memory_bytes", "computed"):
        assert not any(part in vars(kind) for kind in others)


def kind_of(name):
    studies = {f"study {study.NAME}": study for study in STUDIES}
    return studies.get(name) or CLASSES[name]


@pytest.mark.parametrize("name", EVERY)
def test_quick_makes_every_command_smaller(name):
    kind = kind_of(name)
    size = next(n for n in ("chosen_tol", "sizes", "chosen") if hasattr(kind, n))
    assert getattr(kind(quick=True), size) != getattr(kind(), size)


@pytest.fixture
def names_of_runs(monkeypatch, tmp_path):
    """What the runs of a command are called, as another process would call them."""
    asked = []
    monkeypatch.setattr(Command, "run", lambda self: asked.append(self))

    def found(arguments):
        load_corpus.cache_clear()
        main([*arguments, "--out", str(tmp_path / "out")])
        experiment = asked[-1].experiment()
        return {experiment.path(cell).name for cell in experiment.cells()}

    return found


# those that read what they train on
@pytest.mark.parametrize("name", ["language", "rebalance", "boundary", "backbone"])
def test_runs_are_named_by_what_is_read_and_not_by_where_it_lies(name, names_of_runs, tmp_path):
    if name == "rebalance":
        pytest.importorskip("tokenizers")

    def names(place):
        data = f"imdb:{place}" if name in ("boundary", "backbone") else str(place / "text.txt")
        return names_of_runs([data if part == TEXT else part for part in tiny(name, data)])

    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there):
        make_imdb(place)
        (place / "text.txt").write_text(Path(TEXT).read_text())
    first = names(here)
    assert names(there) == first
    for file in (here / "text.txt", here / "train" / "neg" / "3_2.txt"):
        file.write_text(file.read_text().replace("e", "a"))
    # in a study of particles no text is read
    assert {run for run in names(here) & first if "particles" not in run} == set()


def test_a_rule_that_is_rewritten_under_its_name_is_another(names_of_runs, tmp_path):
    file = tmp_path / "mine.py"
    arguments = " ".join(tiny("gauge", "")).replace("--eps 0.1", f"--rule {file}:Signum").split()
    names = []
    for content in (SIGNUM, SIGNUM.replace("sign()", "sign() * 0.5")):
        file.write_text(content)
        names.append(names_of_runs(arguments))
    assert not names[0] & names[1]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    ("option", "value"), [("memory", 1.5), ("scheduler", "tcp://127.0.0.1:1"), ("device", "cuda")]
)
def test_an_option_of_no_use_is_refused_by_name_with_the_reason(
    name, option, value, tmp_path, monkeypatch
):
    monkeypatch.setattr("ipslimit.experiments.frame.command.resolve_device", lambda device: device)
    kind = kind_of(name)
    command = kind(out=tmp_path, **{option: value})
    if option not in kind.CANNOT:
        command.check()
        return
    said = f"{option} must be left out of {kind.NAME}, {kind.CANNOT[option]}; got {value}."
    with pytest.raises(ValueError, match=re.escape(said)):
        command.check()
    kind(out=tmp_path, device="cpu").check()


def test_workers_of_a_scheduler_are_its_own(reviews, tmp_path, capsys):
    wrong = ["--workers", "2", "--scheduler", "tcp://127.0.0.1:1"]
    with pytest.raises(SystemExit) as left:
        main([*tiny("boundary", reviews), "--out", str(tmp_path), *wrong])
    assert left.value.code == 2
    assert "workers must be left out with a scheduler" in capsys.readouterr().err


def made(arguments, folder):
    """The files that a command leaves, but for figures, which take long to draw and compare."""
    main([*arguments, "--out", str(folder)])
    paths = [path for path in folder.rglob("*") if path.suffix in (".json", ".csv", ".sha256")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("name", ["sweep", "compare", "scaling", "boundary"])
def test_an_engine_of_a_users_own_changes_no_bit(name, reviews, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(ENGINE)
    arguments = tiny(name, reviews)
    alone = made([*arguments, "--workers", "1"], tmp_path / "alone")
    own = made([*arguments, "--engine", f"{file}:Batch"], tmp_path / "own")
    assert own == alone and len(alone) >= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["sweep", "compare", "scaling", "boundary", "backbone", "gauge", "language"]
)
def test_workers_change_no_bit(name, reviews, tmp_path):
    arguments = tiny(name, reviews)
    alone = made([*arguments, "--workers", "1"], tmp_path / "alone")
    assert made([*arguments, "--workers", "2"], tmp_path / "shared") == alone


def test_runs_that_need_one_disk_are_not_computed_without(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    file = tmp_path / "mine.py"
    file.write_text(ENGINE)
    arguments = [*tiny("rebalance", ""), "--engine", f"{file}:Batch"]
    with pytest.raises(SystemExit) as left:
        main([*arguments, "--out", str(tmp_path / "apart")])
    said = capsys.readouterr().err
    assert left.value.code == 2 and "engine must share files (shares_files) in rebalance" in said
    file.write_text(ENGINE.replace("    def run", "    shares_files = True\n\n    def run"))
    main([*arguments, "--out", str(tmp_path / "together")])
    assert "rebalance.json" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["boundary", "backbone", "gauge", "language"])
def test_a_cluster_changes_no_bit(name, reviews, tmp_path):
    distributed = pytest.importorskip("distributed")
    arguments = tiny(name, reviews)
    main([*arguments, "--out", str(tmp_path / "alone"), "--workers", "1"])
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None
    ) as cluster:
        scheduler = ["--scheduler", cluster.scheduler_address]
        main([*arguments, "--out", str(tmp_path / "cluster"), *scheduler])
    folders = [tmp_path / place / "cells" for place in ("alone", "cluster")]
    assert len({tuple(sorted(p.name for p in folder.iterdir())) for folder in folders}) == 1
    for path in folders[0].iterdir():
        assert path.read_bytes() == (folders[1] / path.name).read_bytes()
