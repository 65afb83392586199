"""How much memory a cell takes, known before it starts, and how many of its seeds fit at a time."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ipslimit import Heads

from .study import DTYPES, Setting, Study, StudyError

GIB = 2**30
# Of the memory that is free, what the cells of a sweep may plan with.
SHARE = 0.8
# Tensors as large as the tokens of all layers that exist at once where errors are computed, beside
# the recorded ones: differences, their squares and the limit at the same depths.
ERROR_COPIES = 3


def available() -> int:
    """Bytes that this machine, or the control group of this process, has left."""
    left = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):  # with what the system would give back
            left = [1024 * int(line.split()[1])]
    group = Path("/sys/fs/cgroup")
    limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        left.append(int(limit) - int(used))
    return max(0, min(left))


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def cell_bytes(study: Study, depth: int, count: int | None, seeds: int | None = None) -> int:
    """Peak bytes of a cell whose seeds are trained `seeds` at a time, beyond those of the process.

    Notes
    -----
    While seeds are trained, there are their heads, the rule's state and one copy of the heads a
    recorded step; while the constant is predicted, heads and state of two models with all atoms a
    seed. What is recorded of all seeds stays.
    """
    setting, total = study.setting, study.sizes.seeds
    together = total if seeds is None else min(seeds, total)
    exact = setting.law == "atoms"
    stored = setting.atoms if exact else setting.nodes
    size = DTYPES[setting.dtype].itemsize
    parameters, state = _numbers_of_a_head(setting)
    layer, copies = size * parameters, 1 + state / parameters
    steps = len(setting.recorded)
    tokens = (depth + 1) * (setting.contexts + setting.probes) * setting.tokens * setting.d * size
    if count is None:
        heads = depth * stored * layer
        return heads * (copies + steps) + tokens * (2 * steps + ERROR_COPIES)
    kept = total * depth * layer * steps * (min(count, stored) if exact else 0)
    heads = together * depth * layer * (min(count, stored) if exact else count)
    recorded = total * tokens * 2 * steps
    # heads that are recorded of a law without atoms are dropped with their seeds
    training = heads * (copies + (0 if exact else steps)) + kept + recorded
    if not study.constant or not exact:
        return training + total * tokens * ERROR_COPIES
    pairs = 2 * together * depth * stored * layer * copies + 2 * together * tokens * 2 * steps
    predicting = kept + recorded + pairs + 2 * recorded
    return max(training, predicting) + total * tokens * ERROR_COPIES


def _numbers_of_a_head(setting: Setting) -> tuple[int, int]:
    """Of its parameters, and of what the rule keeps of it."""
    layout = setting.make_law().layout
    heads = Heads.from_packed(torch.empty(layout.size, 1), torch.empty(1), layout)
    return layout.size, sum(t.numel() for t in setting.make_rule().init(heads).values())


def seeds_that_fit(study: Study, depth: int, count: int | None, memory: int) -> int:
    """How many seeds of a cell can be trained at a time in so many bytes.

    Raises
    ------
    StudyError
        If not even one fits; it tells how much that takes.
    """
    seeds = 1 if count is None else study.sizes.seeds
    while seeds > 1 and cell_bytes(study, depth, count, seeds) > memory:
        seeds = -(-seeds // 2)
    needed = cell_bytes(study, depth, count, seeds)
    if needed > memory:
        name = f"L={depth}, H={'inf' if count is None else count}"
        raise StudyError(
            f"cell {name} needs {needed / GIB:.3g} GiB, with its seeds one at a time, and has "
            f"{memory / GIB:.3g}. Raise --memory, take fewer --workers, or smaller --depths, "
            "--heads or --seeds."
        )
    return seeds
