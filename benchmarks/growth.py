"""How time and memory of a training step grow with each size."""

from __future__ import annotations

import math
import time

import numpy as np
import torch

from . import training
from .machine import in_fresh_process

NAMES = ("seeds", "B", "N", "d", "m", "H", "L")
# heads and hidden states weigh about the same here, so that both show in the memory
BASE = (4, 8, 32, 8, 4, 8, 32)
FACTORS = (1, 2, 4, 8)
STARTS = {"d": 4, "m": 4, "N": 16}
WHY = {
    "seeds": "seeds share nothing",
    "L": "layers come one after the other; all their states are kept for the way back",
    "H": "a layer is a sum over heads; states do not depend on H",
    "B": "contexts share the heads, which are read once a block; heads do not depend on B",
    "N": "time N (projections) + N^2 (pairs of tokens), memory N: no N x N array is kept",
    "d": "projections and heads are m d; pairs of tokens cost m alone",
    "m": "projections and heads are m d, pairs of tokens m; states do not depend on m",
}
BOUND = {"seeds": 1, "L": 1, "H": 1, "B": 1, "N": 2, "d": 1, "m": 1}


def sizes_of(name: str) -> list[tuple[int, ...]]:
    """The sizes along which one of them grows."""
    index = NAMES.index(name)
    start = STARTS.get(name, BASE[index])
    return [(*BASE[:index], start * factor, *BASE[index + 1 :]) for factor in FACTORS]


def counted_bytes(sizes: tuple[int, ...]) -> float:
    """Working copy and two moments of the heads, and the L + 1 hidden states, in float64."""
    R, B, N, d, m, H, L = sizes
    return 8.0 * R * (3 * L * H * 4 * m * d + (L + 1) * B * N * d)


def run(quick: bool = False, progress=print) -> dict:
    code = "import json; from benchmarks.growth import measure; print(json.dumps(measure({}, {})))"
    # small blocks of memory are given back at once, or the peak would be the allocator's
    threads = torch.get_num_threads()
    measured = in_fresh_process(code.format(threads, quick), MALLOC_MMAP_THRESHOLD_="65536")
    rows = []
    for name in NAMES:
        points = measured[name]
        values = np.array([p["value"] for p in points], float)
        exponents = {
            kind: _exponent(values, np.array([p[kind] for p in points], float))
            for kind in ("seconds", "bytes")
        }
        rows.append({"size": name, "points": points, "exponents": exponents, "why": WHY[name]})
        progress(f"{name}: time {exponents['seconds']:.2f}, memory {exponents['bytes']:.2f}")
    return {"base": dict(zip(NAMES, BASE, strict=True)), "rows": rows}


def _exponent(values: np.ndarray, costs: np.ndarray) -> float:
    """Least-squares slope of the logarithms; NaN where something was not measured."""
    if not (costs > 0).all():
        return float("nan")
    return float(np.polyfit(np.log(values), np.log(costs), 1)[0])


def measure(threads: int, quick: bool) -> dict[str, list[dict]]:
    """Seconds of a step and peak bytes of a run of one step, for all sizes."""
    torch.set_num_threads(threads)
    found = {}
    for name in NAMES:
        found[name] = []
        for sizes in sizes_of(name):
            case = training.make_case(sizes, torch.float64)
            training.ours(case, 1)  # compiles
            before = training.reset_peak()
            training.ours(case, 1)
            peak = training.peak_resident() - before if before else 0
            seconds = []
            for _ in range(3 if quick else 7):
                start = time.perf_counter()
                training.ours(case, 1)
                middle = time.perf_counter()
                training.ours(case, 0)
                seconds.append((middle - start) - (time.perf_counter() - middle))
            found[name].append(
                {
                    "value": sizes[NAMES.index(name)],
                    "bytes": peak,
                    "counted": counted_bytes(sizes),
                    "seconds": float(np.median(seconds)),
                }
            )
    return found


def table(result: dict) -> str:
    """Markdown."""
    base = ", ".join(f"{name} = {value}" for name, value in result["base"].items())
    lines = [
        f"One training step of float64 around {base}; exponents fitted over a factor of 8. "
        "Counted are three copies of the heads (working copy, two moments) and the L + 1 states.",
        "",
        "| in | time | no more than | memory | memory over counted | why |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        e = row["exponents"]
        memory = "not measured" if math.isnan(e["bytes"]) else f"{e['bytes']:.2f}"
        last = row["points"][-1]
        lines.append(
            f"| {row['size']} | {e['seconds']:.2f} | {BOUND[row['size']]} | {memory} | "
            f"{last['bytes'] / last['counted']:.2f} | {row['why']} |"
        )
    return "\n".join(lines)
