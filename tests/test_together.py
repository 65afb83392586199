"""Files that belong together: whenever a run is killed, none stands beside one of another run."""

import errno
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ipslimit.experiments.store import CannotWrite, DamagedFile
from ipslimit.experiments.together import read_json, read_together, write_together

OLD = {"a.csv": "old a", "b.png": "old b", "only old.csv": "old c"}
NEW = {"a.csv": "new a", "b.png": "new b", "only new.csv": "new d"}


def write(folder, contents, name="set"):
    with write_together(folder, name) as staged:
        for file, content in contents.items():
            (staged / file).write_text(content)


def shown(folder):
    """What a reader of the folder sees, but for checksums."""
    paths = [path for path in folder.iterdir() if path.is_file() and path.suffix != ".sha256"]
    return {path.name: path.read_text() for path in paths}


def verified(folder, name="set"):
    return {file: content.decode() for file, content in read_together(folder, name).items()}


def test_files_come_back_and_sha256sum_agrees(tmp_path):
    write(tmp_path, OLD)
    assert verified(tmp_path) == shown(tmp_path) == OLD
    lines = (tmp_path / "set.sha256").read_text().splitlines()
    assert lines[0] == f"{hashlib.sha256(b'old a').hexdigest()}  a.csv" and len(lines) == 3
    if shutil.which("sha256sum"):
        subprocess.run(
            ["sha256sum", "-c", "set.sha256"], cwd=tmp_path, check=True, capture_output=True
        )


def test_files_of_an_earlier_run_leave_and_others_stay(tmp_path):
    write(tmp_path, OLD | {"mine.csv": "old"})
    (tmp_path / "mine.csv").write_text("altered by its reader")
    (tmp_path / "notes.txt").write_text("not of the set")
    write(tmp_path, {"config": "of another set"}, "other")
    write(tmp_path, NEW)
    kept = {
        "mine.csv": "altered by its reader",
        "notes.txt": "not of the set",
        "config": "of another set",
    }
    assert shown(tmp_path) == NEW | kept
    assert verified(tmp_path) == NEW and verified(tmp_path, "other") == {"config": kept["config"]}
    assert sorted(path.name for path in (tmp_path / ".set").iterdir()) == ["lock"]


def test_a_run_that_fails_leaves_the_old_files(tmp_path):
    write(tmp_path, OLD)
    with pytest.raises(KeyboardInterrupt), write_together(tmp_path, "set") as staged:
        (staged / "a.csv").write_text("new")
        raise KeyboardInterrupt
    assert verified(tmp_path) == shown(tmp_path) == OLD
    assert sorted(path.name for path in (tmp_path / ".set").iterdir()) == ["lock"]


def test_a_folder_in_the_place_of_a_file_is_told_before_the_old_files_leave(tmp_path):
    write(tmp_path, OLD)
    (tmp_path / "only new.csv").mkdir()
    said = r"only new.csv cannot be written \(there is a folder of that name\).* Move it away"
    with pytest.raises(CannotWrite, match=said):
        write(tmp_path, NEW)
    assert verified(tmp_path) == shown(tmp_path) == OLD


# audit events of what changes a folder: seen also where pathlib took os.unlink before a test could
CHANGES = ("os.mkdir", "open", "os.chmod", "os.rename", "os.remove", "os.rmdir")


def killed(at, folder, contents):
    """Before which change, its number `at`, a process that writes died; None if it made fewer."""
    child = os.fork()
    if not child:
        done = 0

        def die(event, arguments):
            nonlocal done
            if event in CHANGES and (event != "open" or arguments[2] & os.O_CREAT):
                done += 1
                if done == at:
                    os._exit(1 + CHANGES.index(event))

        sys.addaudithook(die)
        write(folder, contents)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return CHANGES[status - 1] if status else None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_every_change_it_never_shows_files_of_two_runs(tmp_path):
    """And the next run, whatever it writes, leaves nothing of the killed one."""
    # in a process that has no threads, as others do once they have computed: it forks
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def kill_at_every_change(tmp_path):
    assert "torch" not in sys.modules
    third = {"a.csv": "third a"}
    states, changes = set(), []
    for at in itertools.count(1):
        folder = tmp_path / str(at)
        folder.mkdir()
        write(folder, OLD)
        change = killed(at, folder, NEW)
        if change is None:
            break
        changes.append(change)
        left = shown(folder)
        assert left.items() <= OLD.items() or left.items() <= NEW.items(), (at, left)
        try:
            whole = verified(folder)
        except DamagedFile as damage:
            states.add("told")
            assert "set.sha256 is missing" in str(damage)
        else:
            states.add("old" if whole == OLD else "new")
            assert whole == left and whole in (OLD, NEW)
        # killed once more while it cleans up, then left to finish
        for contents in (third, OLD) if at % 2 else (third,):
            killed(at // 2, folder, contents)
            assert len({content.split()[0] for content in shown(folder).values()}) <= 1
        write(folder, third)
        assert verified(folder) == shown(folder) == third
        assert sorted(path.name for path in (folder / ".set").iterdir()) == ["lock"]
    assert states == {"old", "told", "new"}
    # every old file and its checksums leave, every new one and its checksums come
    assert changes.count("os.remove") >= len(OLD) + 1
    assert changes.count("os.rename") >= len(NEW) + 1
    assert {"os.mkdir", "open", "os.rmdir"} < set(changes)


WRITER = """
import sys
from pathlib import Path
from ipslimit.experiments.together import write_together
for _ in range(30):
    with write_together(Path(sys.argv[1]), "set") as staged:
        for i in range(5):
            (staged / f"{i}.csv").write_text(sys.argv[2])
"""


def test_processes_that_write_at_once_leave_files_of_one(tmp_path):
    running = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), which])
        for which in ("one", "two")
    ]
    assert [process.wait() for process in running] == [0, 0]
    found = verified(tmp_path)
    assert found == shown(tmp_path) and set(found.values()) in ({"one"}, {"two"})
    assert len(found) == 5


def test_a_full_disk_leaves_the_old_files_and_one_line(tmp_path, monkeypatch):
    write(tmp_path, OLD)

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CannotWrite, match=r"No space left.*resume") as told:
        write(tmp_path, NEW)
    assert "\n" not in str(told.value)
    assert verified(tmp_path) == shown(tmp_path) == OLD


@pytest.mark.parametrize("damage", ["altered", "cut", "absent", "folder", "link", "pipe", "huge"])
def test_a_file_that_is_not_what_was_written_is_told_by_name(tmp_path, damage):
    write(tmp_path, OLD)
    path = tmp_path / "b.png"
    if damage == "altered":
        path.write_text("old B")
    elif damage == "cut":
        path.write_text("old")
    else:
        path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "link":  # even to what the checksum fits
        (tmp_path / "elsewhere").write_text("old b")
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "pipe":
        os.mkfifo(path)
    elif damage == "huge":
        path.touch()
        os.truncate(path, 2**40)
    with pytest.raises(DamagedFile, match=r"^b.png is missing, or is not what set.sha256 was"):
        read_together(tmp_path, "set")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{sum}",
        "{sum} a.csv",
        "{sum}  ",
        "{sum}  .",
        "{sum}  ..",
        "{sum}  ../x",
        "{sum}  /x",
        "{sum}  sub/x",
        "{sum}  a.csv",
        "{sum}  a\\x",
        "{sum}  a\0",
    ],
)
def test_checksums_of_anything_but_files_here_are_refused(tmp_path, line):
    write(tmp_path / "..", {"x": "old a"}, "outside")
    write(tmp_path, OLD)
    sums = tmp_path / "set.sha256"
    checksum = hashlib.sha256(b"old a").hexdigest()
    sums.write_text(f"{sums.read_text()}{line.format(sum=checksum)}\n")
    with pytest.raises(DamagedFile, match="does not hold checksums of files in its folder"):
        read_together(tmp_path, "set")
    write(tmp_path, NEW)  # takes their place
    assert verified(tmp_path) == NEW and (tmp_path / ".." / "x").exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"\0" * 99, b"x" * 999, b"\n"])
def test_checksums_that_are_none_are_refused(tmp_path, content):
    write(tmp_path, OLD)
    (tmp_path / "set.sha256").write_bytes(content)
    if content == b"":
        assert read_together(tmp_path, "set") == {}  # a set of no files: whoever reads misses his
    else:
        with pytest.raises(DamagedFile):
            read_together(tmp_path, "set")
    write(tmp_path, NEW)
    assert verified(tmp_path) == NEW


def test_read_json_takes_what_json_is():
    assert read_json(b'{"a": [1, 2.5, null, true, "\\u00e9"]}') == {"a": [1, 2.5, None, True, "é"]}


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "Expecting value"),
        (b"{", "Expecting"),
        (b"\xff", "decode"),
        (b"[1] 2", "Extra data"),
        (b"[NaN]", "NaN is no number"),
        (b"[-Infinity]", "-Infinity is no number"),
        (b"[1e400]", "1e400 is no number"),
        (b'{"a": 1, "a": 2}', "stands twice"),
        (b'["\\ud800"]', "surrogates"),
        (b"[" * 100_000, "levels"),
        (b"[" * 40 + b"]" * 40, "more than 32 levels"),
        (b"9" * 10_000, "digits"),
    ],
)
def test_read_json_refuses_what_it_is_not(content, reason):
    with pytest.raises(ValueError, match=reason):
        read_json(content)


def test_a_missing_folder_is_told(tmp_path):
    with pytest.raises(DamagedFile, match=r"set.sha256 is missing"):
        read_together(tmp_path / "absent", "set")


if __name__ == "__main__":
    kill_at_every_change(Path(sys.argv[1]))
