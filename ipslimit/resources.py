"""How much memory and how many processors this process may use, and what its machine has.

psutil knows the machine; control groups, within which containers and batch systems hold their
processes, are read here: version 1 and 2, and all groups around this process's own.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/")


def processors(root: Path = ROOT) -> int:
    """Processors that this process may keep busy: its affinity, and the quotas on its time.

    `root` is where the system's files are, here and below.
    """
    try:
        count = len(psutil.Process().cpu_affinity())
    except (AttributeError, psutil.Error):  # macOS knows no affinity
        count = psutil.cpu_count() or 1
    return max(1, min([count, *(math.ceil(quota) for quota in _quotas(root))]))


def processor_says(what: str, root: Path = ROOT) -> str:
    """What Linux tells of the first processor, "model name" say; nothing where it does not."""
    found = re.search(rf"^{what}\s*: (.*)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else ""


def processor_name(root: Path = ROOT) -> str:
    """The model, where it is told; else what Python knows, at most the instruction set."""
    name = processor_says("model name", root)
    return name or platform.processor() or platform.machine()


def available_memory(root: Path = ROOT) -> int:
    """Bytes that this machine and all control groups of this process have left."""
    left = [limit - used for limit, used in _memory_groups(root)]
    return max(0, min([psutil.virtual_memory().available, *left]))


@functools.cache
def total_memory(root: Path = ROOT) -> int:
    """Bytes that this process could have if it had its machine to itself; looked up once."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _memory_groups(root))])


def _quotas(root: Path) -> Iterator[float]:
    """Processors' worth of time that each group around this process is given."""
    for group in _groups("cpu", root):
        first = [_numbers(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        both = _numbers(group / "cpu.max") or [number for found in first for number in found]
        if len(both) == 2 and min(both) > 0:
            yield both[0] / both[1]


def _memory_groups(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of each group that has a limit; what it would give back at once is unused."""
    for group in _groups("memory", root):
        limits = [_numbers(group / f"memory.{n}") for n in ("max", "high", "limit_in_bytes")]
        limit = min((number for found in limits for number in found), default=None)
        used = _numbers(group / "memory.current") or _numbers(group / "memory.usage_in_bytes")
        if limit is not None and used:
            stat = _read(group / "memory.stat")
            cached = re.findall(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
            yield limit, used[0] - max(map(int, cached), default=0)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of this process's group of a controller, and of all groups around it.

    Where a container sees no more than a part of the tree, that part is mounted: what a mount shows
    is told beside it.
    """
    paths = {}  # "" for version 2
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    for line in _read(root / "proc/self/mountinfo").splitlines():
        place, _, about = line.partition(" - ")
        shown, mount = (_unescaped(text) for text in place.split()[3:5])
        kind, _, options = about.split(" ", 2)
        key = {"cgroup2": "", "cgroup": controller}.get(kind)
        if key not in paths or (key and key not in options.split(",")):
            continue
        top = root / mount.lstrip("/")
        inside = os.path.relpath(paths[key], shown)
        own = top if inside.startswith("..") else top / inside
        yield from (own, *(above for above in own.parents if above.is_relative_to(top)))


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _numbers(path: Path) -> list[int]:
    """The numbers a file holds; none where there is no such file, or where it says max."""
    words = _read(path).split()
    return [] if "max" in words else [int(w) for w in words if w.lstrip("-").isdigit()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
