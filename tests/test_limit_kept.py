"""A solved limit that is kept for a resume: the same bits, and never taken for another's."""

import io
import math

import pytest
import torch
from builders import normal
from small_blocks import RULE, problem
from test_hostile_files import MARK, ODD, STUDY, payloads, put

from ipslimit import AdamW, Atoms, TokenProblem, XavierUniform
from ipslimit.experiments import sweep as sweeps
from ipslimit.experiments.engines import InProcess
from ipslimit.experiments.store import DamagedFile, read_blob, write_blob
from ipslimit.experiments.sweep import Sweep
from ipslimit.model.run_state import RECORDED
from ipslimit.solvers import solve_limit
from ipslimit.solvers.limit_state import restored, state_of

IDS = torch.tensor([[0, 1, 2, 3], [3, 1, 4, 2], [2, 2, 0, 1]])


def of_tokens():
    return TokenProblem(IDS, 5, Atoms(XavierUniform(4, 2).nodes(2, 0).heads), 4, probes=IDS[:2])


KINDS = {
    "block": (problem, dict(record=[0, 2])),
    "probes in batches": (
        lambda: problem(probes=(normal(2, 3, 3), normal(2, 3)), batch=2),
        dict(record=[1, 2], evaluate=[0]),
    ),
    "sampled": (
        lambda: problem(XavierUniform(3, 2)),
        dict(nodes=16, quadrature_tol=math.inf, record=[0, 2]),
    ),
    "tokens": (of_tokens, dict(record=[0, 2])),
}


@pytest.fixture(scope="module", params=KINDS)
def solved(request):
    make, options = KINDS[request.param]
    run = solve_limit(make(), RULE, 2, 1e-2, device="cpu", **options)
    return run, make()


def read_back(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def answers(run):
    """All that a run says, as one value that can be compared."""
    depths = [0.0, 0.3, 0.5, 1.0]
    found = {"repr": repr(run), "message": run.message, "nodes": (run.nodes, run.nodes_seed)}
    for name in ("steps", "notes", "rule", "of", "cost", "least_size", "unit_numbers", "error"):
        found[name] = getattr(run, name)
    found["losses"] = run.loss, run.loss_error, run.probe_loss, run.probe_loss_error, run.ends
    found["batches"], found["gaps"] = run.batches, run.quadrature_gaps
    for step in run.steps:
        for name in RECORDED:
            if step in getattr(run._solution, name):
                found[name, step] = getattr(run, name)(step, depths)
                found[name, step, "error"] = run.error_at(name, step, depths)
        found["theta", step] = run.error_at("theta", step, depths)
        for name, units in run.units(step, depths).items():
            found[name, step] = units.packed, units.weights
        points = run.x(step, 0.0)[0, :2] + 0.1
        found["flow", step] = run.flow(step, depths, points), run.flow_error(step, points)
    return plain(found)


def plain(value):
    """With the bytes of tensors in their places."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def test_a_run_comes_back_to_the_last_bit(solved):
    run, of = solved
    again = restored(read_back(state_of(run)), of, RULE)
    assert answers(again) == answers(run)


def test_a_run_of_another_problem_or_rule_is_refused(solved):
    run, of = solved
    state = read_back(state_of(run))
    with pytest.raises(ValueError, match=r"^state must be of the limit of this problem and rule"):
        restored(state, of, AdamW(0.04, eps=0.1))
    with pytest.raises(ValueError, match=r"^state must be of the limit of this problem and rule"):
        restored(state | {"of": {"contexts": "others"}}, of, RULE)


@pytest.mark.parametrize(
    "change", ["cost", "solutions", "history", "status", "trajectories", "units", "loss", "edges"]
)
def test_a_state_of_no_run_is_refused(change):
    make, options = KINDS["block"]
    of = make()
    state = read_back(state_of(solve_limit(of, RULE, 1, 1e-2, device="cpu", record=[0])))
    if change in state:
        del state[change]
    else:
        state["solutions"][0].pop(change)
    with pytest.raises(ValueError, match=r"^state must be what state_of gives; got another") as e:
        restored(state, of, RULE)
    assert "\n" not in str(e.value)


def test_trajectories_of_another_shape_are_refused():
    of = problem()
    state = read_back(state_of(solve_limit(of, RULE, 1, 1e-2, device="cpu", record=[0])))
    edges, slopes = state["solutions"][0]["trajectories"]["x"][0]
    state["solutions"][0]["trajectories"]["x"][0] = edges[:-1], slopes[:-1]
    with pytest.raises(ValueError, match="x at step 0 is of shape"):
        restored(state, of, RULE)


class TestSweep:
    """A sweep that is stopped between its limit and its cells."""

    @pytest.fixture(autouse=True)
    def stopped(self, tmp_path, monkeypatch):
        self.folder, self.solves = tmp_path, 0
        solve, measure = sweeps.solve_limit, sweeps.measure_cell

        def counted(*arguments, **options):
            self.solves += 1
            return solve(*arguments, **options)

        def stop(*arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr(sweeps, "solve_limit", counted)
        monkeypatch.setattr(sweeps, "measure_cell", stop)
        with pytest.raises(KeyboardInterrupt):
            self.sweep()
        monkeypatch.setattr(sweeps, "measure_cell", measure)
        (self.file,) = (tmp_path / "cells").glob("*.solved")

    def sweep(self):
        return Sweep(STUDY, self.folder, "cpu", InProcess()).run(progress=False)

    def cells(self):
        return {path.name: path.read_bytes() for path in (self.folder / "cells").iterdir()}

    def test_its_limit_is_read_and_not_solved_for_again(self, tmp_path):
        (summary,) = (tmp_path / "cells").glob("limit-*.json")
        before = summary.stat()
        result = self.sweep()
        assert self.solves == 1 and result.damaged == []
        assert summary.stat().st_mtime_ns == before.st_mtime_ns
        assert summary.stat().st_ino == before.st_ino
        resumed = self.cells()
        self.folder = tmp_path / "undisturbed"
        assert self.sweep().rows == result.rows and self.solves == 2
        assert self.cells() == resumed  # and of both the solution is gone
        assert {path.suffix for path in (self.folder / "cells").iterdir()} == {".json"}

    def test_a_summary_that_is_lost_is_made_from_what_was_solved(self, tmp_path):
        (summary,) = (tmp_path / "cells").glob("limit-*.json")
        content = summary.read_bytes()
        summary.write_bytes(content[:-9])
        result = self.sweep()
        assert self.solves == 1 and summary.read_bytes() == content
        assert [summary.name in text for text in result.damaged] == [True]

    @pytest.mark.parametrize("kind", ["flipped", "other"])
    def test_a_damaged_file_is_reported_and_solved_for_again(self, kind):
        content = self.file.read_bytes()
        if kind == "flipped":
            self.file.write_bytes(content[:500] + bytes([content[500] ^ 1]) + content[501:])
        else:
            state = torch.load(io.BytesIO(read_blob(self.file)), weights_only=True)
            file = io.BytesIO()
            torch.save(state | {"rule": "SGD(lr=0.1)"}, file)
            write_blob(self.file, file.getbuffer())
        result = self.sweep()
        assert self.solves == 2
        assert [self.file.name in text for text in result.damaged] == [True]
        assert "\n" not in result.damaged[0]

    @pytest.mark.parametrize("fitting", [False, True])
    def test_what_others_have_put_there_is_not_executed(self, fitting):
        kept = Sweep(STUDY, self.folder, "cpu")._solved
        given = STUDY.setting.make_problem(), STUDY.setting.make_rule(), "cpu"
        for content in (*payloads(self.folder), *ODD):
            put(kept.path, content, fitting)
            with pytest.raises(DamagedFile, match=kept.path.name):
                kept._read(*given)
        assert not (self.folder / MARK).exists()
