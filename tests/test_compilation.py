"""Kept compiled code: right when processes compile at once, renewed when a source changes."""

import os
import subprocess
import sys

import numba
import pytest

from ipslimit.experiments.cli import main

CHECK = """
import sys
import torch
from ipslimit import Heads, attention_field
from ipslimit.cpu import fused
from ipslimit.model import eager
from ipslimit.model.sight import Sight
dtype = getattr(torch, sys.argv[1])
torch.manual_seed(0)
heads = Heads(*(torch.randn(2, 5, *s, dtype=dtype) for s in ((2, 3), (2, 3), (2, 3), (3, 2))))
x = torch.randn(2, 3, 4, 3, dtype=dtype)
arguments = (x, heads.packed, heads.weights, heads.layout, Sight())
gap = (fused.field(*arguments) - eager.field(*arguments)).abs().max()
assert gap < 100 * torch.finfo(dtype).eps, gap
print("right")
"""


@pytest.mark.slow
def test_processes_that_compile_at_once_for_two_dtypes_are_all_right(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for _ in range(2):  # compiled, then kept
        running = [
            subprocess.Popen(
                [sys.executable, "-c", CHECK, dtype], env=environment, stdout=subprocess.PIPE
            )
            for dtype in ("float64", "float32") * 2
        ]
        assert [process.communicate()[0] for process in running] == [b"right\n"] * 4


KINDS = {
    "entry": "from ipslimit.compilation import compiled_entry\n"
    "@compiled_entry(helper.__file__)\n"
    "def entry(x):\n"
    "    return helper.inner(x)\n"
    "print(entry(1.0), sum(entry.stats.cache_hits.values()))\n",
    "callback": "from numba import float64\n"
    "from ipslimit.compilation import compiled_callback\n"
    "def called(x):\n"
    "    return helper.inner(x)\n"
    "made = compiled_callback(float64(float64), called, helper.__file__, keep=True)\n"
    "print(made.ctypes(1.0), made.cache_hits)\n",
}


@pytest.mark.parametrize("kind", KINDS)
def test_kept_code_is_not_used_once_a_file_it_calls_into_has_changed(kind, tmp_path):
    """A function kept with one version of a second file must be compiled again with the next."""
    program = tmp_path / "program.py"
    helper = tmp_path / "helper.py"
    program.write_text("import sys; sys.path.insert(0, sys.argv[1])\nimport helper\n" + KINDS[kind])

    def run(source):
        helper.write_text(f"from numba import njit\n@njit\ndef inner(x):\n    return {source}\n")
        command = [sys.executable, str(program), str(tmp_path)]
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kept")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert run("x + 1.0") == ["2.0", "0"]
    assert run("x + 1.0") == ["2.0", "1"]  # kept
    assert run("x + 2.0") == ["3.0", "0"]


ENTRIES = """
import sys
import torch
from ipslimit import AdamW, attention_field, attention_vjp
from ipslimit.model import eager
from ipslimit.model.branch import Branch
from ipslimit.model.sight import Sight
from builders import random_heads, normal, small_problem
from ipslimit.solvers.grid import DepthGrid
from ipslimit.solvers.march import March
from ipslimit.solvers.scheme import System

def kernel():
    heads, x = random_heads((2,), H=5), normal(2, 3, 4, 3)
    arguments = (heads.packed, heads.weights)
    right = eager.vjp(x, *arguments, x, heads.layout, Sight(), True)[1]
    assert (attention_vjp(x, heads, x)[1].packed - right).abs().max() < 1e-11
    right = eager.field(x, *arguments, heads.layout, Sight())
    assert (attention_field(x, heads) - right).abs().max() < 1e-11

def march():
    heads, x = random_heads((5,), H=5, scale=0.3), normal(3, 4, 3)
    system = System(DepthGrid.uniform(2), Branch.alone(heads), False, {"field": 0, "vjp": 0})
    assert March().compiled_loop(system, x)
    slopes = March().forward(system, x).slopes
    right = eager.field(x[None], heads.packed[:1], heads.weights[:1], heads.layout, Sight())
    assert (slopes[0] - right[0]).abs().max() < 1e-11

for name in sys.argv[1:]:
    globals()[name]()
"""


def test_entries_kept_by_different_processes_work_together(tmp_path):
    """Kept code is linked by name: entries must not end up calling each other's inner functions."""
    environment = os.environ | {
        "NUMBA_CACHE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "IPSLIMIT_KERNEL": "fused",
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
    }
    for names in (["march"], ["kernel"], ["kernel", "march"], ["march", "kernel"]):
        subprocess.run([sys.executable, "-c", ENTRIES, *names], env=environment, check=True)


WITHOUT_COMPILER = """
import hashlib
import torch
from ipslimit.experiments.settings import Setting
from ipslimit import train_particles
from ipslimit.solvers import solve_limit
setting = Setting(d=3, m=2, tokens=3, contexts=2, probes=0, atoms=8, steps=2)
problem, rule = setting.make_problem(), setting.make_rule()
run = train_particles(problem, rule, depth=4, heads=8, steps=2, seeds=2)
limit = solve_limit(problem, rule, steps=2, tol=1e-2)
print(run.x[2].numpy().tobytes().hex(), limit.loss.numpy().tobytes().hex())
"""


def test_without_numbas_compiler_the_eager_path_computes_and_one_line_says_so():
    found = []
    for variables in ({"NUMBA_DISABLE_JIT": "1"}, {"IPSLIMIT_KERNEL": "eager"}):
        environment = {k: v for k, v in os.environ.items() if k != "IPSLIMIT_KERNEL"} | variables
        found.append(
            subprocess.run(
                [sys.executable, "-c", WITHOUT_COMPILER],
                env=environment | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=True,
            )
        )
    without, eager = found
    assert without.stdout == eager.stdout and len(eager.stdout) > 100
    (line,) = without.stderr.splitlines()
    assert "NUMBA_DISABLE_JIT is set" in line and "eager path" in line
    assert eager.stderr == ""


@pytest.mark.parametrize(
    "kernel, words",
    [
        ("fused", "IPSLIMIT_KERNEL=fused needs numba to compile, which NUMBA_DISABLE_JIT forbids"),
        ("fast", "IPSLIMIT_KERNEL must be eager, fused, triton or auto; got 'fast'"),
    ],
)
def test_variables_that_cannot_be_followed_are_one_line_and_status_2(
    tmp_path, monkeypatch, capsys, kernel, words
):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    monkeypatch.setenv("IPSLIMIT_KERNEL", kernel)
    with pytest.raises(SystemExit) as stopped:
        main(["sweep", "--out", str(tmp_path)])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and words in said and said.count("\n") == 1
