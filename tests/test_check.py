"""`ipslimit check`: the limit beside the solvers of others, and that it sees a wrong one."""

import contextlib
import csv
import io
import json
import math

import pytest

from ipslimit.experiments.check import COLUMNS, check_limit
from ipslimit.experiments.cli import main
from ipslimit.experiments.settings import Setting
from ipslimit.experiments.together import read_together
from ipslimit.solvers import solve_limit
from ipslimit.solvers.scheme import System

SMALL = Setting(d=2, m=2, tokens=3, contexts=2, probes=0, atoms=4, steps=1, eps=0.1)
FLAGS = (
    "--d 2 --m 2 --tokens 3 --contexts 2 --probes 0 --atoms 4 --steps 1 --eps 0.1 --tol 1e-4 "
    "--device cpu"
).split()
ROUTES = ["torchdiffeq dopri5", "torchdiffeq adjoint", "scipy solve_bvp"]
CASES = [("x", ROUTES[0]), ("p", ROUTES[1]), ("x", ROUTES[2]), ("p", ROUTES[2])]


def limit_of(setting, tol=1e-4):
    problem = setting.make_problem()
    arguments = setting.steps, tol, None, "cpu"
    options = {"elements": 2, "nodes": setting.nodes, "scramblings": 1, "quadrature_tol": math.inf}
    return problem, solve_limit(problem, setting.make_rule(), *arguments, **options)


def by_case(checked):
    return {(found.step, found.variable, found.route): found for found in checked.agreements}


@pytest.mark.parametrize(
    "values, tol",
    [
        ({"causal": True}, 1e-4),
        ({"rule": "sbo", "steps": 2}, 1e-4),
        ({"law": "xavier", "nodes": 8}, 1e-4),
        ({"rule": "sgd", "lr": 0.5, "biases": True}, 1e-4),
        pytest.param({"dtype": "float32"}, 1e-3, marks=pytest.mark.slow),  # compiles for it
    ],
)
def test_every_route_agrees_with_the_limit(values, tol):
    checked = check_limit(*limit_of(SMALL.varied(**values), tol=tol))
    assert checked.agreed and not checked.unanswered and checked.limit.status == "converged"
    cases = by_case(checked)
    assert set(cases) == {(values.get("steps", 1), *case) for case in CASES}
    for found in cases.values():
        # to the tolerance that was asked of the limit, whatever it and the routes say of themselves
        assert float(found.difference.max()) < tol and found.route_error < tol
        assert found.rounding < tol


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What the command prints and writes, for steps 0 and 1."""
    folder, out, err = tmp_path_factory.mktemp("check"), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        main(["check", *FLAGS, "--json", "--out", str(folder)])
    return read_together(folder, "check"), out.getvalue(), err.getvalue()


def test_the_files_belong_together_and_the_table_holds_every_depth(written):
    files, _, _ = written
    assert set(files) == {"config.json", "check.json", "check.csv", "check.png", "check.pdf"}
    config, result = (json.loads(files[name]) for name in ("config.json", "check.json"))
    assert config["setting"]["tokens"] == 3 and config["tol"] == 1e-4
    assert [row["step"] for row in result["checks"]] == [0] * 4 + [1] * 4
    rows = list(csv.DictReader(files["check.csv"].decode().splitlines()))
    assert list(rows[0]) == COLUMNS
    depths = 2 * result["limit"]["elements"] + 1
    # of each step x by two routes and p by one at every node, and p at 0 by the adjoint
    assert len(rows) == 2 * (3 * depths + 1)
    for worst in result["checks"]:
        case = [str(worst[name]) for name in COLUMNS[:4]]
        (at,) = [row for row in rows if [row[name] for name in COLUMNS[:4]] == case]
        assert float(at["difference"]) == worst["difference"]


def test_json_is_printed_alone(written):
    files, out, err = written
    result = json.loads(out)
    assert result == json.loads(files["check.json"]) and result["agreed"] is True
    assert "written to" in err


def test_a_limit_of_another_field_is_seen_by_every_route():
    problem, _ = limit_of(SMALL)
    _, limit = limit_of(SMALL.varied(causal=True))
    checked = check_limit(problem, limit)
    assert limit.status == "converged"
    assert len(checked.agreements) == 4 and not any(found.agreed for found in checked.agreements)


def test_a_disagreement_is_said_and_is_status_1(tmp_path, monkeypatch, capsys):
    field = System.field
    monkeypatch.setenv("IPSLIMIT_KERNEL", "eager")
    monkeypatch.setattr(System, "field", lambda self, x, nodes: 0.99 * field(self, x, nodes))
    with pytest.raises(SystemExit) as stopped:
        main(["check", *FLAGS, "--steps", "0", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert stopped.value.code == 1 and said.startswith("limit: converged")
    assert said.count("BEYOND the estimates together") == 4 and "\nDISAGREED: " in said
    assert json.loads(read_together(tmp_path, "check")["check.json"])["agreed"] is False


def test_a_wrong_costate_is_seen_in_p_alone(monkeypatch):
    pull = System.pull

    def wrong(self, x, p, nodes, with_units=False):
        out, found = pull(self, x, p, nodes, with_units)
        return 1.01 * out, found

    monkeypatch.setenv("IPSLIMIT_KERNEL", "eager")
    monkeypatch.setattr(System, "pull", wrong)
    checked = check_limit(*limit_of(SMALL))
    agreed = {(found.variable, found.route): found.agreed for found in checked.agreements}
    assert agreed == {case: case[0] == "x" for case in CASES}


def test_what_is_wrong_at_one_depth_alone_is_seen_there():
    problem, limit = limit_of(SMALL)
    limit._solution.x[1].edges[3, 0, 1, 0] += 1e-2  # one component
    found = by_case(check_limit(problem, limit))
    for route in (ROUTES[0], ROUTES[2]):
        seen = found[1, "x", route]
        assert not seen.agreed and float(seen.s[seen.worst]) == limit.grid.edges[3]
    assert found[1, "p", ROUTES[1]].agreed


def test_what_is_not_finite_agrees_with_nothing():
    problem, limit = limit_of(SMALL.varied(steps=0))
    limit._solution.x[0].edges[2] = math.nan
    found = by_case(check_limit(problem, limit))
    assert not found[0, "x", ROUTES[0]].agreed and not found[0, "x", ROUTES[2]].agreed


@pytest.mark.parametrize("failing", ["costate_adjoint", "all"])
def test_a_route_without_an_answer_is_told_and_is_no_agreement(failing, monkeypatch):
    def fail(*arguments):
        raise ValueError("dopri5 failed (of its own).")

    names = "forward_dopri5 costate_adjoint boundary_value".split()
    for name in names if failing == "all" else [failing]:
        monkeypatch.setattr(f"ipslimit.experiments.check.{name}", fail)
    checked = check_limit(*limit_of(SMALL.varied(steps=0)))
    said = checked.summary()
    assert "\nstep 0, torchdiffeq adjoint: no answer. dopri5 failed (of its own).\n" in said
    assert checked.agreed == (failing != "all")
    assert len(checked.agreements) == (0 if failing == "all" else 3)
    assert said.splitlines()[-1].startswith("UNANSWERED" if failing == "all" else "agreed")


def test_a_boundary_value_problem_of_much_work_is_left_out():
    checked = check_limit(*limit_of(SMALL.varied(atoms=400, steps=0)))
    assert checked.agreed and len(checked.agreements) == 2
    (words,) = checked.unanswered
    assert "scipy solve_bvp: left out" in words and "12 unknowns over 400 heads" in words


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--tol", "0"], "tol must be"),
        (["--tokens", "0"], "tokens must be"),
        (["--device", "gpu"], "device must be"),
        (["--record", "3"], "record must name steps of 0..1"),
        (["--lr", "1e300"], "there is no limit to check: diverged"),
        (["--depth", "4"], "Unrecognized"),
    ],
)
def test_what_cannot_be_checked_is_refused_in_one_line(flags, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["check", *FLAGS, *flags, "--out", str(tmp_path)])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and words in said
    assert len([line for line in said.splitlines() if line.startswith("ipslimit:")]) == 1
