"""One transformer on one process, and shared out to two: time of a training step and its sums."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ipslimit import AdamW, Problem, XavierUniform, train_particles

# (seeds, B, N, d, m, H, L): many heads on few tokens, and few heads on many.
CASES = ((1, 4, 16, 8, 8, 1024, 16), (1, 8, 64, 16, 16, 64, 16))
PROCESSES = 2
STEPS = 3


def run(quick: bool = False, progress=print) -> dict:
    rows = []
    for sizes in CASES[:1] if quick else CASES:
        alone, shared = (_measure(sizes, n, 3 if quick else 7) for n in (1, PROCESSES))
        R, B, N, d, _, _, L = sizes
        rows.append(
            {
                "sizes": list(sizes),
                "alone": alone["step"],
                "shared": shared["step"],
                "speedup": alone["step"] / shared["step"],
                "sum": shared["sum"],
                "sums": 2 * L,
                "bytes": 2 * L * R * B * N * d * 8,
            }
        )
        progress(f"{sizes}: {rows[-1]}")
    return {"rows": rows, "processes": PROCESSES}


def _measure(sizes: tuple[int, ...], processes: int, rounds: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, args=(processes, sizes, rounds, folder), nprocs=processes)
        return json.loads((Path(folder) / "times.json").read_text())


def _work(rank: int, processes: int, sizes: tuple[int, ...], rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    R, B, N, d, m, H, L = sizes
    gen = torch.Generator().manual_seed(0)
    contexts = torch.randn(B, N, d, generator=gen, dtype=torch.float64)
    problem = Problem(contexts, contexts.mean(1), XavierUniform(d, m))

    def train(steps: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        train_particles(
            problem,
            AdamW(lr=0.02, eps=0.01),
            L,
            H,
            steps,
            R,
            device="cpu",
            group=dist.group.WORLD if processes > 1 else None,
        )
        return time.perf_counter() - start

    def add_up() -> float:
        part = torch.zeros(R, B, N, d, dtype=torch.float64)
        start = time.perf_counter()
        for _ in range(100):
            dist.all_reduce(part)
        return (time.perf_counter() - start) / 100

    train(1)  # compiles
    # a run of 0 steps draws the heads and passes forward and backward once
    steps = [(train(STEPS) - train(0)) / STEPS for _ in range(rounds)]
    sums = [add_up() for _ in range(rounds)]
    if rank == 0:
        times = {"step": float(np.median(steps)), "sum": float(np.median(sums))}
        (Path(folder) / "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def table(result: dict) -> str:
    """Markdown."""
    lines = [
        "| R, B, N, d, m, H, L | one process, ms | two, ms | speed-up | sums a step | one sum, us "
        "| MB a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [
            ", ".join(map(str, row["sizes"])),
            f"{1e3 * row['alone']:.1f}",
            f"{1e3 * row['shared']:.1f}",
            f"**{row['speedup']:.2f}**",
            str(row["sums"]),
            f"{1e6 * row['sum']:.0f}",
            f"{row['bytes'] / 1e6:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    note = "float64, one thread a process, gloo; the time of drawing the heads is taken off. A sum "
    lines += ["", note + "is an all-reduce of (R, B, N, d)."]
    return "\n".join(lines)
