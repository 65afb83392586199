"""One page on a card: how near to its bounds kernels are, and beside the CPU and the peers.

    python -m benchmarks.card --out results/gpu

takes less than BUDGET seconds: what is not begun by then is left out, and named. With --device cpu
and --tiny it runs anywhere, to see that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from ipslimit import AdamW
from ipslimit.cpu.dispatch import VARIABLE
from ipslimit.solvers import solve_limit

from . import kernel, machine, peers, training
from .timing import interleave

BUDGET = 420.0
# The paths of our own that are asked for by IPSLIMIT_KERNEL, where they are there.
PATHS = ("eager", "triton")
# (R, B, H, N, d, m), as in `kernel`: heads small and many, middle, and large.
KERNELS = [
    (16, 4, 16, 8, 4, 4),
    (1, 4, 4096, 8, 4, 4),
    (1, 1, 512, 64, 8, 8),
    (16, 8, 64, 64, 16, 16),
    (1, 4, 8, 512, 64, 64),
]
# (R, B, N, d, m, H, L), as in `training`.
STEPS = [(16, 4, 8, 4, 4, 16, 128), (64, 16, 64, 16, 8, 64, 16)]
# The same of the limit, whose heads are atoms; the number of elements of its first grid last.
LIMITS = [(1, 4, 8, 4, 4, 32, 8), (1, 16, 64, 16, 8, 64, 4)]
TINY = {
    "kernels": [(2, 2, 3, 4, 3, 2)],
    "steps": [(2, 2, 4, 3, 2, 3, 2)],
    "limits": [(1, 2, 4, 3, 2, 3, 1)],
}
WAITS = ("Synchronize", "cudaMemcpy", "aten::_local_scalar_dense")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.card", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, few rounds")
    arguments = parser.parse_args()
    result = run(arguments.device, arguments.tiny, lambda line: print(line, flush=True))
    arguments.out.mkdir(parents=True, exist_ok=True)
    page = arguments.out / "gpu.md"
    page.write_text(markdown(result))
    print(f"written to {page}")


def run(
    device: object,
    tiny: bool = False,
    progress: Callable[[str], object] = print,
    budget: float = BUDGET,
) -> dict:
    """All of it, on a device; `tiny` for the sizes of TINY. Nothing is begun after the budget."""
    device, begun = torch.device(device), time.perf_counter()
    sizes = TINY if tiny else {"kernels": KERNELS, "steps": STEPS, "limits": LIMITS}
    rounds = 3 if tiny else 7
    result = {
        "date": datetime.date.today().isoformat(),
        "device": _name(device),
        "machine": machine.describe(),
        "cuda": torch.version.cuda or "none",
        "ceilings": _ceilings(device, tiny),
        "compile_failure": "left out" if tiny else peers.compile_failure(),
        "left out": [],
    }
    measures = (("kernels", _kernel), ("steps", _step), ("limits", _limit))
    for name, measure in measures:
        result[name] = []
        for size in sizes[name]:
            for dtype in kernel.DTYPES:
                if time.perf_counter() - begun > budget:
                    result["left out"].append(f"{name} {size} {dtype}")
                    continue
                row = measure(size, dtype, device, rounds, result)
                result[name].append({"size": size, "dtype": dtype} | row)
                progress(f"{name} {size} {dtype}: {row}")
    return result


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "the CPU in the place of a card"


def _done(device: torch.device) -> None:
    """Wait until all that was launched is computed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(calls: dict[str, Callable], device: torch.device, rounds: int) -> dict[str, float]:
    """Median seconds of each, in turn, with all that they launch."""

    def whole(call: Callable) -> Callable:
        def timed() -> None:
            call()
            _done(device)

        return timed

    samples = interleave({n: whole(call) for n, call in calls.items()}, rounds, budget=12.0)
    return {name: float(np.nanmedian(values)) for name, values in samples.items()}


@contextlib.contextmanager
def _path(name: str) -> Iterator[None]:
    """With IPSLIMIT_KERNEL set."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def _on_path(name: str, call: Callable) -> Callable:
    def there():
        with _path(name):
            return call()

    return there


def _ours(make: Callable[[str], Callable]) -> dict[str, Callable]:
    """Our paths that are there, as calls that `make` makes for a path: each is tried once."""
    found = {}
    for name in PATHS:
        with _path(name):
            try:
                call = make(name)
                call()
            except (ValueError, ImportError):  # this path does not exist here, or for these sizes
                continue
        found[name] = _on_path(name, call)
    return found


def _ceilings(device: torch.device, tiny: bool) -> dict[str, dict[str, float]]:
    """FLOP/s of products, and bytes/s of a copy, by dtype: the bounds that are reached here."""
    found, (n, size) = {}, (64, 2**12) if tiny else (4096, 2**28)
    for name, dtype in kernel.DTYPES.items():
        a = torch.ones(n, n, dtype=dtype, device=device)
        large = torch.ones(size // dtype.itemsize, dtype=dtype, device=device)
        out, copy = torch.empty_like(a), torch.empty_like(large)
        calls = {
            "gemm": lambda a=a, out=out: torch.mm(a, a, out=out),
            "copy": lambda large=large, copy=copy: copy.copy_(large),
        }
        times = _timed(calls, device, 3)
        found[name] = {"flops": 2 * n**3 / times["gemm"], "bytes": 2 * size / times["copy"]}
    return found


def _kernel(size, dtype: str, device: torch.device, rounds: int, result: dict) -> dict:
    """A field with its transpose: seconds of our paths and the peers, and what bounds them."""
    case = kernel.make_case(size, kernel.DTYPES[dtype])
    x, matrices, cotangent = case
    there = x.to(device), [m.to(device) for m in matrices], cotangent.to(device)
    calls = _ours(lambda name: kernel.ours(*there)[0])
    paths = tuple(calls)
    with_compile = not result["compile_failure"]
    contestants = kernel.contestants(*there, with_compile=with_compile)
    contestants.pop("jax", None)  # which is on the CPU
    times = _timed(calls | contestants | {"CPU": kernel.ours(*case)[0]}, device, rounds)
    R, B, H, N, d, m = size
    itemsize = kernel.DTYPES[dtype].itemsize
    # tokens, cotangents, the field and dx once; heads read twice, and their derivatives written
    moved = itemsize * (4 * R * B * N * d + 3 * 4 * R * H * m * d)
    ceilings = result["ceilings"][dtype]
    products = kernel.operations(*size)["flop"] / ceilings["flops"]
    bound = max(products, moved / ceilings["bytes"])
    best = min(contestants, key=times.get)
    ours = min(paths, key=times.get)
    return {
        "times": times,
        "bound": bound,
        "of bound": {name: bound / times[name] for name in paths},
        "best": best,
        "ratio": times[best] / times[ours],
        "counts": {name: _counts(calls[name], device) for name in paths},
    }


def _step(size, dtype: str, device: torch.device, rounds: int, result: dict) -> dict:
    """A training step of particles: seconds on the device and on the CPU."""
    case, number = training.make_case(size, kernel.DTYPES[dtype]), training.STEPS

    def of(steps: int, where: object) -> Callable:
        return lambda: training.ours(case, steps, device=where)

    calls = _ours(lambda name: of(number, device))
    begun = {f"{name}, begun": _on_path(name, of(0, device)) for name in calls}
    on_cpu = {"CPU": of(number, "cpu"), "CPU, begun": of(0, "cpu")}
    times = _timed(calls | begun | on_cpu, device, rounds)
    # a run of 0 steps has the same beginning and one way forward
    steps = {n: (times[n] - times[f"{n}, begun"]) / number for n in (*calls, "CPU")}
    counts = {}
    for name, call in calls.items():
        longer, shorter = (_counts(c, device) for c in (call, begun[f"{name}, begun"]))
        counts[name] = tuple((a - b) / number for a, b in zip(longer, shorter, strict=True))
    return {"times": steps, "counts": counts}


def _limit(size, dtype: str, device: torch.device, rounds: int, result: dict) -> dict:
    """The limit of two steps: seconds on the device and on the CPU."""
    *shape, elements = size
    case = training.make_case((*shape, 1), kernel.DTYPES[dtype])
    options = {"elements": elements, "max_elements": 4 * elements}

    def on(where: object) -> Callable:
        rule = AdamW(0.02, eps=0.01)
        return lambda: solve_limit(case.problem, rule, 2, 1e-3, None, where, **options)

    calls = _ours(lambda name: on(device))
    times = _timed(calls | {"CPU": on("cpu")}, device, min(rounds, 3))
    return {"times": times, "counts": {name: _counts(call, device) for name, call in calls.items()}}


def _counts(call: Callable, device: torch.device) -> tuple[float, float]:
    """Launches, and calls for which the host waits, as the profiler saw them; (0, 0) off a card."""
    if device.type != "cuda":
        call()
        return 0.0, 0.0
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        call()
        _done(device)
    counted = {event.key: event.count for event in profile.key_averages()}
    launches = sum(n for key, n in counted.items() if "LaunchKernel" in key)
    waits = sum(n for key, n in counted.items() if any(word in key for word in WAITS))
    return float(launches), float(waits)


def markdown(result: dict) -> str:
    """The page."""
    versions = ", ".join(f"{n} {v}" for n, v in result["machine"]["versions"].items())
    lines = [
        f"# On {result['device']}",
        "",
        f"{result['date']}; CUDA {result['cuda']}, Python {result['machine']['python']}, "
        f"{versions}; CPU: {result['machine']['processor']}, {result['machine']['threads']} "
        "threads. Medians of rounds in turn, each until the device is done.",
        "",
        *(
            f"- {name}: products {found['flops'] / 1e9:.4g} GFLOP/s, copy "
            f"{found['bytes'] / 1e9:.4g} GB/s"
            for name, found in result["ceilings"].items()
        ),
    ]
    if result["compile_failure"]:
        lines.append(f"- torch.compile: {result['compile_failure']}")
    lines += ["", "## A field and its transpose: R, B, H, N, d, m", ""]
    lines += _table(
        result["kernels"],
        ["bound ms", "of bound", "best peer / ours"],
        lambda row: [
            f"{1e3 * row['bound']:.3g}",
            ", ".join(f"{name} {share:.2f}" for name, share in row["of bound"].items()),
            f"{row['ratio']:.2f} ({row['best']})",
        ],
    )
    lines += ["", "## A training step: R, B, N, d, m, H, L", "", *_table(result["steps"])]
    lines += ["", "## The limit of two steps: 1, B, N, d, m, H, first elements", ""]
    lines += _table(result["limits"])
    if result["left out"]:
        lines += ["", f"Left out for want of time: {'; '.join(result['left out'])}."]
    return "\n".join(lines) + "\n"


def _table(rows: list[dict], more: list[str] = (), cells: Callable = lambda row: []) -> list[str]:
    """Rows with all their times in ms, and launches and waits."""
    names = list(dict.fromkeys(name for row in rows for name in row["times"]))
    head = ["sizes", "dtype", *(f"{n} ms" for n in names), *more, "launches, waits"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        times = [f"{1e3 * row['times'][n]:.3g}" if n in row["times"] else "-" for n in names]
        counts = (f"{name} {a:.4g}, {b:.3g}" for name, (a, b) in row["counts"].items())
        size = ", ".join(map(str, row["size"]))
        parts = [size, row["dtype"], *times, *cells(row), "; ".join(counts)]
        lines.append("| " + " | ".join(parts) + " |")
    return lines


if __name__ == "__main__":
    main()
