"""Result files: written once and whole, never trusted when damaged."""

import json
import os
import pickle
import stat

import pytest
from matplotlib.figure import Figure

from ipslimit.experiments.store import (
    CannotWrite,
    DamagedFile,
    prepare_folder,
    read_cell,
    replacing,
    write_cell,
    write_csv,
    write_figure,
    write_json,
)


def test_cell_comes_back_as_it_was_written(tmp_path):
    value = {"rows": [{"error": 0.1 + 0.2, "H": float("inf")}], "n": 3}
    write_cell(tmp_path / "cell", value)
    assert read_cell(tmp_path / "cell") == value
    assert read_cell(tmp_path / "absent") is None


@pytest.mark.parametrize("cut", [0, 1, 30, 64, 65, 70, -2])
def test_truncated_cell_is_damaged(tmp_path, cut):
    path = tmp_path / "cell"
    write_cell(path, {"rows": [1.5, 2.5]})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DamagedFile, match="cell"):
        read_cell(path)


def test_every_changed_byte_of_a_cell_is_seen(tmp_path):
    path = tmp_path / "cell"
    write_cell(path, {"rows": [1.5]})
    content = path.read_bytes()
    for i in range(len(content) - 1):  # the last byte, a line's end, carries nothing
        path.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        with pytest.raises(DamagedFile):
            read_cell(path)


def test_hostile_cell_is_not_executed(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    (tmp_path / "cell").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(DamagedFile):
        read_cell(tmp_path / "cell")
    assert not (tmp_path / "executed").exists()


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_json(path, {"old": 1})
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write("half")
        raise KeyboardInterrupt
    assert json.loads(path.read_text()) == {"old": 1}
    assert os.listdir(tmp_path) == ["file"]


def test_csv_keeps_every_bit_of_a_number(tmp_path):
    import csv

    value = 0.1 + 0.2
    write_csv(tmp_path / "t.csv", [{"a": value, "b": "x"}], ["a", "b"])
    with open(tmp_path / "t.csv") as file:
        (row,) = csv.DictReader(file)
    assert float(row["a"]) == value


def test_json_has_no_nan(tmp_path):
    with pytest.raises(ValueError):
        write_json(tmp_path / "file", {"a": float("nan")})
    assert os.listdir(tmp_path) == []


def test_a_figure_has_the_same_bytes_whenever_it_is_written(tmp_path, monkeypatch):
    figure = Figure(layout="constrained")
    figure.subplots().plot([1, 2], [3, 4], label="words")
    for name, time in (("one", "0"), ("two", "86400")):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", time)
        write_figure(tmp_path / name, figure)
    for suffix in ("png", "pdf"):
        one, two = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("one", "two"))
        assert one == two, suffix


def test_folder_that_cannot_be_written_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    said = r"out must be a folder that can be written; got .*file.* \(.*/file is a file\)\. Choose"
    for place in ("file", "file/below"):
        with pytest.raises(ValueError, match=said):
            prepare_folder(tmp_path / place)


def test_a_folder_in_a_files_place_is_named(tmp_path):
    (tmp_path / "a.json").mkdir()
    said = r"a\.json cannot be written \(there is a folder of that name\); .* Move it away or"
    with pytest.raises(CannotWrite, match=said):
        write_cell(tmp_path / "a.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.skipif(os.name != "posix", reason="needs permissions of POSIX")
def test_who_may_read_a_file_is_the_users_umask_to_say(tmp_path, monkeypatch):
    """And no disk is asked for more: some refuse chmod."""

    def refused(*_, **__):
        raise PermissionError("Operation not permitted")

    for name in ("chmod", "fchmod"):
        monkeypatch.setattr(os, name, refused)
    for mask, mode in ((0o027, 0o640), (0o077, 0o600), (0o002, 0o664)):
        before = os.umask(mask)
        try:
            write_json(tmp_path / "a.json", {})
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == mode
