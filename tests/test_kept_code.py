"""Whatever becomes of kept compiled code or its folder: the answer is right, and one line says so.

A small function stands for the kernel: how it is kept is the same.
"""

import errno
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipslimit import compilation
from ipslimit.compilation import _checksum, compiled_entry

X, Y = 0.1, 0.2
RIGHT = 0.30000000000000004


def add(x, y):
    return x + y


def subtract(x, y):
    return x - y


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where code is kept; a function that keeps some has a file there afterwards."""
    kept = tmp_path / "kept"
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(kept))
    return kept


class Answer:
    """What a process finds that starts now: its answer, whether it was kept, and what is said."""

    def __init__(self, caplog, function=add, arguments=(X, Y)):
        compilation._warned.clear()
        caplog.clear()
        entry = compiled_entry()(function)
        self.value = entry(*arguments)
        self.kept = sum(entry.stats.cache_hits.values()) == 1
        self.lines = [record.getMessage() for record in caplog.records]


def files(folder):
    return sorted(folder.rglob("*.kept"))


def expect_afresh(answer, folder, reason):
    assert answer.value == RIGHT and not answer.kept
    (line,) = answer.lines
    assert "\n" not in line and str(folder) in line and reason in line


def test_what_is_kept_is_used_again(folder, caplog):
    first, second = Answer(caplog), Answer(caplog)
    assert (first.value, first.kept, first.lines) == (RIGHT, False, [])
    assert (second.value, second.kept, second.lines) == (RIGHT, True, [])
    assert len(files(folder)) == 1


ADDITION, SUBTRACTION = b"\x58", b"\x5c"  # of (v)addsd and (v)subsd: one bit


def flipped_addition(content):
    """One bit of the machine code flipped, so that it subtracts."""
    for prefix in (b"\xf2\x0f", *(b"\xc5" + bytes([register]) for register in range(256))):
        if prefix + ADDITION in content:
            return content.replace(prefix + ADDITION, prefix + SUBTRACTION)
    pytest.skip("no addition of an x86 processor in the code")


def test_one_flipped_bit_in_the_machine_code_is_seen(folder, caplog):
    Answer(caplog)
    (path,) = files(folder)
    altered = flipped_addition(path.read_bytes())
    path.write_bytes(altered)
    expect_afresh(Answer(caplog), folder, "its checksum does not fit")
    assert Answer(caplog).kept  # and is whole again
    # the flip is a real one: behind a checksum that fits it is run, and subtracts
    rest = altered.partition(b"\n")[2]
    path.write_bytes(_checksum(path, rest) + b"\n" + rest)
    wrong = Answer(caplog)
    assert wrong.kept and wrong.value == X - Y


@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(st.data())
def test_generated_damage_is_seen(folder, caplog, data):
    Answer(caplog)
    (path,) = files(folder)
    good = path.read_bytes()
    at = data.draw(st.integers(0, 10**6)) % len(good)
    noise = data.draw(st.binary(max_size=200))
    damaged = data.draw(
        st.sampled_from(
            (
                good[:at],
                good[at:],
                good + b"\0",
                b"\0" * len(good),
                noise,
                good[::-1],
                good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :],
                good[:at] + good[at + 1 :],
                good[:at] + b"\n" + good[at:],
                good.replace(b"\n", b"\r\n"),
            )
        )
    )
    path.write_bytes(damaged)
    if damaged != good:
        expect_afresh(Answer(caplog), folder, "truncated or altered")
    assert path.read_bytes() == good or Answer(caplog).kept


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_nothing_is_unpickled_before_it_is_verified(folder, caplog, tmp_path):
    Answer(caplog)
    (path,) = files(folder)
    identity = path.read_bytes().split(b"\n")[1]
    hostile = pickle.dumps(Payload(str(tmp_path / "executed")))
    for content in (hostile, b"0" * 64 + b"\n" + identity + b"\n" + hostile):
        path.write_bytes(content)
        expect_afresh(Answer(caplog), folder, "its checksum does not fit")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("code", [b"", b"no pickle", pickle.dumps(None), pickle.dumps((1, 2))])
def test_what_fits_and_is_no_code_is_not_used(folder, caplog, code):
    Answer(caplog)
    (path,) = files(folder)
    rest = path.read_bytes().split(b"\n")[1] + b"\n" + code
    path.write_bytes(_checksum(path, rest) + b"\n" + rest)
    answer = Answer(caplog)
    assert answer.value == RIGHT and not answer.kept
    assert len(answer.lines) == (code != pickle.dumps(None))  # as if nothing were kept
    assert Answer(caplog).kept


def test_code_of_another_function_is_not_used(folder, caplog):
    Answer(caplog)
    (path,) = files(folder)
    assert Answer(caplog, subtract).value == X - Y
    (other,) = (p for p in files(folder) if "subtract" in p.name)
    path.write_bytes(other.read_bytes())
    expect_afresh(Answer(caplog), folder, "its checksum does not fit")


def test_code_for_other_types_is_another_file(folder, caplog):
    single = np.float32(X), np.float32(Y)
    single_sum = single[0] + single[1]
    for _ in range(2):
        found = Answer(caplog), Answer(caplog, arguments=single)
        assert [answer.value for answer in found] == [RIGHT, single_sum]
    assert all(answer.kept for answer in found)
    one, two = files(folder)
    one_content, two_content = one.read_bytes(), two.read_bytes()
    one.write_bytes(two_content)
    two.write_bytes(one_content)
    expect_afresh(Answer(caplog), folder, "its checksum does not fit")
    single_answer = Answer(caplog, arguments=single)
    assert single_answer.value == single_sum and len(single_answer.lines) == 1


@pytest.mark.parametrize("name", ["numba", "llvmlite", "numpy"])
def test_code_of_another_version_is_replaced_silently(folder, caplog, monkeypatch, name):
    Answer(caplog)
    with monkeypatch.context() as patch:
        patch.setattr(f"ipslimit.compilation.{name}.__version__", "0.0")
        other = Answer(caplog)
        assert (other.value, other.kept, other.lines) == (RIGHT, False, [])
        assert Answer(caplog).kept
    assert not Answer(caplog).kept
    assert len(files(folder)) == 1


def test_files_that_numba_or_an_older_version_left_are_no_matter(folder, caplog):
    Answer(caplog)
    (path,) = files(folder)
    name = path.name.split(".py")[0]
    for left in (f"{name}.py311.nbi", f"{name}.py311.1.nbc", "ipslimit.lock"):
        (path.parent / left).write_bytes(b"left")
    assert Answer(caplog).kept


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "loop", "huge"])
def test_what_is_no_file_of_code_does_not_block(folder, caplog, kind):
    Answer(caplog)
    (path,) = files(folder)
    path.unlink()
    if kind == "folder":
        path.mkdir()
        (path / "not empty").touch()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "huge":
        path.touch()
        os.truncate(path, 2**40)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    answer = Answer(caplog)
    expect_afresh(answer, folder, "too large" if kind == "huge" else "cannot be used")
    assert Answer(caplog).kept == (kind != "folder")  # a folder is left as it is


def test_a_file_that_cannot_be_read_is_compiled_afresh(folder, caplog, monkeypatch):
    Answer(caplog)
    read = Path.read_bytes

    def refuse(path):
        if path.suffix == ".kept":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    expect_afresh(Answer(caplog), folder, "Permission denied")


@pytest.mark.parametrize("gone", ["folder", "file in its place"])
def test_a_folder_that_goes_while_the_process_runs(folder, caplog, gone):
    entry = compiled_entry()(add)
    compilation._warned.clear()
    shutil.rmtree(folder)
    if gone != "folder":
        folder.touch()
    assert entry(X, Y) == RIGHT
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (gone != "folder")  # else it is made again
    assert all(str(folder) in line and "Not a directory" in line for line in lines)


def test_many_damaged_files_are_one_line(folder, caplog):
    functions = [(f, a) for f in (add, subtract) for a in ((X, Y), (1, 2), (1j, 2j))]
    for function, arguments in functions:
        Answer(caplog, function, arguments)
    for path in files(folder):
        path.write_bytes(path.read_bytes()[:-1])
    compilation._warned.clear()
    caplog.clear()
    for function, arguments in functions:
        assert compiled_entry()(function)(*arguments) == function(*arguments)
    assert len(caplog.records) == 1 and len(files(folder)) == len(functions)


def killed_save(folder, moment):
    """To be called in a process of its own, which does not end."""
    numba.config.CACHE_DIR = folder
    write = Path.write_bytes
    if moment == "before it is whole":
        Path.write_bytes = lambda path, content: (write(path, content[:999]), os._exit(9))
    else:
        os.replace = lambda *names: os._exit(9)
    compiled_entry()(add)(X, Y)


@pytest.mark.parametrize("moment", ["before it is whole", "before it is renamed"])
def test_a_killed_save_leaves_nothing_wrong(folder, caplog, moment):
    code = "import sys, test_kept_code; test_kept_code.killed_save(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(folder), moment]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, timeout=300)
    assert done.returncode == 9, done.stderr
    (left,) = folder.rglob("*.tmp")
    answer = Answer(caplog)
    assert (answer.value, answer.kept, answer.lines) == (RIGHT, False, [])
    assert Answer(caplog).kept
    # what is left is forgotten once it cannot be a file that another process is writing
    assert left.exists()
    os.utime(left, (0, 0))
    (path,) = files(folder)
    path.unlink()
    Answer(caplog)
    assert list(folder.rglob("*.tmp")) == []
