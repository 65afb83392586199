"""Compiled code kept in folders as they are: full, read-only, none, or used by processes at once.

The processes are real ones; they load one file of the package alone, to start fast.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_kept_code import RIGHT, X, Y, files

from ipslimit import compilation

PROGRAM = f"""
import importlib, sys, types
package = sys.modules["ipslimit"] = types.ModuleType("ipslimit")  # without torch, which takes long
package.__path__ = [{str(Path(compilation.__file__).parent)!r}]
compilation = importlib.import_module("ipslimit.compilation")
{{before}}
from adder import add
entry = compilation.compiled_entry()(add)
print(repr(entry({X}, {Y})), sum(entry.stats.cache_hits.values()))
"""


def program(tmp_path, before=""):
    """The path of the program, which adds after some more lines of code."""
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    (source / "adder.py").write_text("def add(x, y):\n    return x + y\n")
    (source / "program.py").write_text(PROGRAM.format(before=before))
    return source / "program.py"


def start(tmp_path, before="", around="{}", **environment):
    """(value, whether it was kept, lines of stderr) of a process; `around` is a shell command."""
    command = around.format(f"{sys.executable} -B {program(tmp_path, before)}")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
    done = subprocess.run(
        ["sh", "-c", command],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    value, hits = done.stdout.split()
    return float(value), hits == "1", done.stderr.splitlines()


def mounted(what):
    """A shell command that runs another with `what` mounted in it; skips where it must not."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("must be allowed to mount")
    return f"unshare -m sh -c '{what} && {{}}'"


class TestFolders:
    def test_a_full_disk(self, tmp_path):
        (tmp_path / "full").mkdir()
        around = mounted(f"mount -t tmpfs -o size=4k none {tmp_path}/full")
        kept = str(tmp_path / "full")
        value, _, (line,) = start(tmp_path, around=around, NUMBA_CACHE_DIR=kept)
        assert value == RIGHT
        assert f"cannot be kept in {kept}" in line and "No space left" in line

    def test_files_that_must_not_grow(self, tmp_path):
        before = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))"
        kept = str(tmp_path / "kept")
        value, _, (line,) = start(tmp_path, before, NUMBA_CACHE_DIR=kept)
        assert value == RIGHT and "cannot be kept" in line and "File too large" in line
        assert [path for path in Path(kept).rglob("*") if path.is_file()] == []
        assert start(tmp_path, NUMBA_CACHE_DIR=kept) == (RIGHT, False, [])  # nothing wrong is left

    def test_a_disk_that_must_not_be_written(self, tmp_path):
        kept = str(tmp_path / "kept")
        start(tmp_path, NUMBA_CACHE_DIR=kept)
        around = mounted(
            f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path}"
        )
        value, hit, (line,) = start(
            tmp_path,
            around=around,
            NUMBA_CACHE_DIR=kept,
            HOME=str(tmp_path),
            XDG_CACHE_HOME=str(tmp_path),
        )
        assert (value, hit) == (RIGHT, False)
        assert "no folder can be written" in line and "Set NUMBA_CACHE_DIR" in line

    @pytest.mark.parametrize("kind", ["file", "below a file", "no permission"])
    def test_a_cache_folder_that_is_none(self, tmp_path, kind):
        (tmp_path / "file").touch()
        folder = {
            "file": tmp_path / "file",
            "below a file": tmp_path / "file" / "kept",
            "no permission": "/proc/kept",
        }[kind]
        value, hit, (line,) = start(tmp_path, NUMBA_CACHE_DIR=str(folder))
        assert (value, hit) == (RIGHT, False)
        assert f"got '{folder}'" in line
        assert f"kept in {tmp_path / 'source' / '__pycache__'} instead" in line
        assert len(files(tmp_path)) == 1

    def test_no_home(self, tmp_path):
        assert start(tmp_path, "import os; os.environ.pop('HOME', None)") == (RIGHT, False, [])


def test_another_processor_has_code_of_its_own(tmp_path):
    kept = str(tmp_path / "kept")
    start(tmp_path, NUMBA_CACHE_DIR=kept)
    other = start(tmp_path, NUMBA_CACHE_DIR=kept, NUMBA_CPU_NAME="generic")
    assert other == (RIGHT, False, []) and len(files(Path(kept))) == 2


def test_processes_that_compile_at_once(tmp_path):
    kept = str(tmp_path / "kept")
    command = [sys.executable, "-B", str(program(tmp_path))]
    environment = os.environ | {"NUMBA_CACHE_DIR": kept}
    running = [
        subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(3)
    ]
    for process in running:
        out, err = process.communicate()
        assert (float(out.split()[0]), err) == (RIGHT, "")
    assert start(tmp_path, NUMBA_CACHE_DIR=kept) == (RIGHT, True, [])
