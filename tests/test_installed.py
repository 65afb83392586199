"""What is installed, and under which names."""

import ast
import configparser
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_folder_of_the_package_is_installed_under_its_name():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = setup["options"]["packages"].split()
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
            package = [prefix, *path.relative_to(ROOT / room).parent.parts]
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    outer = package[: len(package) + 1 - node.level] if node.level else []
                    names = [".".join([*outer, node.module or ""])]
                for name in names:
                    assert not f"{name}.".startswith(tuple(f"{o}." for o in others)), (path, name)
