"""The examples of docs/architecture.md run as they stand there, and what it names is there."""

import re
import shlex
from pathlib import Path

import pytest

from ipslimit.experiments.cli import main

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
FILES = re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.S)
COMMANDS = re.findall(r"^ipslimit (.+)$", PAGE, re.M)
# So that an example takes a second; the rest of a command is as a reader finds it.
TINY = (
    "--d 2 --tokens 2 --contexts 1 --probes 0 --steps 1 --record 0 1 --depths 2 4 --heads 1 2 "
    "--seeds 2 --tol 0.1 --quadrature-tol 100 --device cpu --out out"
)
# The longest that a file of each kind may be.
LINES = {"rule": 40, "law": 30, "unit": 60, "study": 25, "engine": 60}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES:
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_is_a_short_file_for_each_of_the_five():
    assert {name.removesuffix(".py") for name, _ in FILES} == set(LINES)
    for name, text in FILES:
        assert len(text.splitlines()) <= LINES[name.removesuffix(".py")]
        assert any(f"{name}:" in command for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_run(command, folder, capsys):
    main([*shlex.split(command), *shlex.split(TINY)])
    assert "written to out" in capsys.readouterr().out


def test_what_the_page_names_is_there():
    """Files and folders, by the end of their path; and functions and classes of the walks."""
    paths = [p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*") if ".venv" not in p.parts]
    named = re.findall(r"`((?:\w+/)*\w+\.py|(?:\w+/)+\w*)`", PAGE)
    assert len(named) > 15
    for name in named:
        ends = (name.rstrip("/"), f"{name}.py")
        assert any(f"/{path}".endswith(tuple(f"/{end}" for end in ends)) for path in paths), name
    sources = "".join(
        p.read_text()
        for r in ("ipslimit", "solvers", "experiments")
        for p in (ROOT / r).rglob("*.py")
    )
    for name in re.findall(r"`(?:\w+[./])*([A-Z]?\w+)\.(_?\w+)`", PAGE):
        if name[1] not in ("py", "md"):
            assert re.search(rf"\b(def|class) {name[1]}\b|\b{name[1]} ?[:=]", sources), name
