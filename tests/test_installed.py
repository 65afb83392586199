"""What is installed, and under which names."""

import ast
import configparser
import inspect
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import ipslimit

ROOT = Path(__file__).parents[1]


SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def test_the_oldest_versions_that_are_tested_are_those_that_are_declared():
    extras = SETUP["options.extras_require"]
    lists = [SETUP["options"]["install_requires"], *(extras[e] for e in ("text", "dev", "cluster"))]
    declared = {tuple(line.split(" >= ")) for text in lists for line in text.split("\n") if line}
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert len(declared) == len(tested)
    for name, oldest in declared:  # 0.60 is 0.60.0
        assert f"{oldest}.0.0".startswith(tested[name]) and tested[name].startswith(oldest), name


def test_every_folder_of_the_package_is_installed_under_its_name():
    listed = SETUP["options"]["packages"].split()
    folders = [
        path.parent.relative_to(ROOT).as_posix()
        for room in ("ipslimit", "solvers", "experiments")
        for path in ROOT.glob(f"{room}/**/__init__.py")
    ]
    names = [folder.replace("/", ".") for folder in folders]
    assert sorted(listed) == sorted(
        name if name.startswith("ipslimit") else f"ipslimit.{name}" for name in names
    )


def test_a_folder_of_ones_own_beside_the_script_is_not_in_the_way(tmp_path):
    """The program asserts it; a failure is its exit status."""
    for name in ("solvers", "experiments"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("mine = True\n")
    program = (
        "import experiments, solvers, ipslimit.experiments.cli\n"
        "from ipslimit.solvers import solve_limit\n"
        "assert solvers.mine and experiments.mine and callable(solve_limit)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)


def test_no_other_name_is_taken(tmp_path):
    """The program asserts it; a failure is its exit status."""
    program = (
        "import importlib.util\n"
        "assert importlib.util.find_spec('ipslimit')\n"
        "for name in ('solvers', 'experiments', 'tests', 'benchmarks'):\n"
        "    assert importlib.util.find_spec(name) is None, name\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)


def test_imports_run_one_way():
    """From experiments to solvers to ipslimit, which knows no command line and no plot either."""
    forbidden = {
        "ipslimit": ("ipslimit.solvers", "ipslimit.experiments", "tyro", "matplotlib", "argparse"),
        "solvers": ("ipslimit.experiments", "tyro", "matplotlib", "argparse"),
    }
    for room, others in forbidden.items():
        prefix = room if room == "ipslimit" else f"ipslimit.{room}"
        for path in (ROOT / room).rglob("*.py"):
            if path.name == "__main__.py":  # the command itself, which nothing imports
                continue
            package = [prefix, *path.relative_to(ROOT / room).parent.parts]
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    outer = package[: len(package) + 1 - node.level] if node.level else []
                    names = [".".join([*outer, node.module or ""])]
                for name in names:
                    assert not f"{name}.".startswith(tuple(f"{o}." for o in others)), (path, name)


SCRIPT = """
import ipslimit, solvers, torch
from ipslimit import SGD, Atoms, Heads, Problem
from ipslimit.solvers import solve_limit

law = Atoms(Heads(*(0.1 * torch.ones(1, 2, 2) for _ in range(4))))
problem = Problem(contexts=torch.ones(1, 2, 2), targets=torch.zeros(1, 2), law=law)
limit = solve_limit(problem, SGD(lr=0.1), steps=1, tol=1e-3)
print(limit.status, solvers.whose, ipslimit.__file__)
"""


# What a checkout has and its source distribution has not.
LEFT_OUT = {".gitignore", ".ci/run"}


def checked_out():
    """Every file of the checkout that belongs to it, relative to its folder."""
    command = "git ls-files --cached --others --exclude-standard".split()
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git and a checkout: an unpacked distribution has other files as well")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    """The source distribution of this checkout."""
    folder, sources = tmp_path_factory.mktemp("sdist"), tmp_path_factory.mktemp("sources")
    for name in checked_out():
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, sources / name)
    build = f"import setuptools.build_meta as b; b.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=sources, capture_output=True, check=True)
    (found,) = folder.glob("ipslimit-*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheels(distributed, tmp_path_factory):
    """A folder with the wheel built of that, and one of another project's `solvers`."""
    folder = tmp_path_factory.mktemp("wheels")
    build = "pip wheel -q --no-deps --no-build-isolation --no-index -w".split()
    subprocess.run([sys.executable, "-m", *build, folder, distributed], check=True)
    about = "solvers-9.0.dist-info"
    with zipfile.ZipFile(folder / "solvers-9.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("solvers/__init__.py", "whose = 'of another wheel'\n")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: solvers\nVersion: 9.0\n")
        tags = "Root-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\n{tags}")
        files = ["solvers/__init__.py", *(f"{about}/{n}" for n in ("METADATA", "WHEEL", "RECORD"))]
        wheel.writestr(f"{about}/RECORD", "".join(f"{file},,\n" for file in files))
    return folder


class Installed:
    """An environment that has this project's wheel, and borrows what it needs from this one."""

    def __init__(self, folder):
        self.bin = folder / "bin"
        venv.create(folder, symlinks=True)
        (libraries,) = folder.glob("lib/python*/site-packages")
        self.pip = [sys.executable, "-m", "pip", "--python", self.bin / "python"]
        self.libraries = libraries

    def install(self, wheel):
        command = [*self.pip, "install", "-q", "--no-deps", "--no-index", wheel]
        subprocess.run(command, check=True)

    def borrow(self):
        """Their own .pth files are not read, so that an editable install of this project is not."""
        lent = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (self.libraries / "borrowed.pth").write_text("\n".join(lent))

    def run(self, *command, cwd):
        own = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        own["IPSLIMIT_KERNEL"] = "eager"  # nothing to compile
        answer = subprocess.run(
            [self.bin / command[0], *command[1:]], cwd=cwd, env=own, capture_output=True, text=True
        )
        assert answer.returncode == 0, answer.stderr
        return answer.stdout


@pytest.mark.slow
def test_a_wheel_works_beside_a_folder_and_beside_a_wheel_of_the_same_names(wheels, tmp_path):
    user = Installed(tmp_path / "venv")
    user.install(next(wheels.glob("ipslimit-*.whl")))
    user.borrow()
    folder = tmp_path / "mine"
    for name in ("solvers", "experiments"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("whose = 'my own'\n")
    (folder / "script.py").write_text(SCRIPT)

    def works(whose):
        answer = user.run("python", "script.py", cwd=folder)
        assert answer.startswith(f"converged {whose} {user.libraries}"), answer
        assert "sweep" in user.run("ipslimit", "--help", cwd=folder)
        command = "compare --d 2 --m 1 --tokens 2 --contexts 1 --probes 0 --atoms 2 --steps 1"
        command += " --tol 1e-2 --depth 4 --heads 2 --seeds 2 --device cpu"
        assert "written to" in user.run("ipslimit", *command.split(), cwd=folder)

    works("my own")
    user.install(next(wheels.glob("solvers-*.whl")))
    shutil.rmtree(folder / "solvers")
    works("of another wheel")
    subprocess.run([*user.pip, "uninstall", "-q", "-y", "solvers"], check=True)
    (folder / "solvers.py").write_text("whose = 'my own again'\n")
    works("my own again")


@pytest.mark.slow
def test_a_source_distribution_has_all_that_a_checkout_has(distributed):
    """Documentation, notebooks, tests with what builds for them, benchmarks, versions, Makefile."""
    with tarfile.open(distributed) as archive:
        names = [member.name for member in archive.getmembers() if member.isfile()]
    packed = {name.partition("/")[2] for name in names}
    assert checked_out() - packed == LEFT_OUT
    added = packed - checked_out() - {"PKG-INFO"}
    assert all(name.startswith("ipslimit.egg-info/") for name in added), added


TYPED = """
import torch

import ipslimit
from ipslimit import SGD, AdamW, Atoms, Block, Heads, ParticleRun, Problem, Rule, XavierUniform
from ipslimit import Clip, TruncatedNormalPerceptrons, Units, fit_rates, train_particles
from ipslimit.nn import CenteredLinear, center_linears
from ipslimit.optim import SAGGS, SBOAdamW, find_pairs, verify_pairs
from ipslimit.solvers import LimitRun, solve_limit

law = Atoms(Heads(*(0.1 * torch.ones(1, 2, 2) for _ in range(4))))
problem = Problem(contexts=torch.ones(1, 2, 2), targets=torch.zeros(1, 2), law=law)
rule: Rule = Clip(AdamW(lr=0.1), 1.0)
limit: LimitRun = solve_limit(problem, SGD(lr=0.1), steps=1, tol=1e-3)
x: torch.Tensor = limit.x(1, [0.0, 0.5])
run: ParticleRun = train_particles(problem, rule, depth=4, heads=8, steps=3, seeds=2)
states: dict[int, torch.Tensor] = run.x
moved: Units = law.heads.map(torch.neg).to(torch.float64)
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
optimizer = SAGGS(SBOAdamW(model, lr=1e-3), find_pairs(model))
error: float = verify_pairs(model, find_pairs(model), torch.ones(1, 2))
layer = CenteredLinear(2, 2, dtype=torch.float64)
version: str = ipslimit.__version__
wrong: int = version
"""


@pytest.fixture(scope="module")
def user(wheels, tmp_path_factory):
    """An environment with the wheel, and a program of a user's."""
    folder = tmp_path_factory.mktemp("typed")
    user = Installed(folder / "venv")
    user.install(next(wheels.glob("ipslimit-*.whl")))
    user.borrow()
    (folder / "script.py").write_text(TYPED)
    return user, folder


def lines_with_errors(checker, user, folder):
    """Numbers of the program's lines in which a type checker finds something wrong."""
    command = [sys.executable, "-m", checker]
    if checker == "mypy":  # no call of what is not annotated
        command += ["--strict", "--python-executable", user.bin / "python", "script.py"]
        told = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
        return [int(line.split(":")[1]) for line in told.splitlines() if ": error: " in line]
    command += ["--outputjson", "--pythonpath", user.bin / "python", "script.py"]
    told = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    found = json.loads(told)["generalDiagnostics"]
    return [one["range"]["start"]["line"] + 1 for one in found if one["severity"] == "error"]


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_users_program_is_typed(user, checker):
    """What is wrong in it is seen, and nothing else."""
    pytest.importorskip(checker, reason=f"needs {checker}: make types")
    assert lines_with_errors(checker, *user) == [len(TYPED.splitlines())]


def test_what_is_public_says_the_types_of_its_arguments():
    """Functions, constructors and methods; what a class has of torch is torch's to say."""
    from ipslimit import nn, optim, solvers

    named = {name: getattr(ipslimit, name) for name in ipslimit.__all__}
    for room in (nn, optim, solvers):
        named |= {name: getattr(room, name) for name in room.__all__}
    bare = []
    for name, value in named.items():
        functions = {name: value} if inspect.isfunction(value) else {}
        if isinstance(value, type):
            methods = {k: v for k, v in vars(value).items() if inspect.isfunction(v)}
            functions = {f"{name}.{k}": v for k, v in methods.items() if not k.startswith("_")}
            if "__init__" in methods:
                functions[name] = methods["__init__"]
        for place, function in functions.items():
            arguments = inspect.signature(function).parameters.values()
            bare += [
                f"{place}({a})" for a in arguments if a.annotation is a.empty and a.name != "self"
            ]
    assert not bare
