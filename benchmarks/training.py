"""One full-batch training step: forward, backward, AdamW; and what it takes in memory."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from ipslimit import AdamW, Atoms, Block, Heads, Perceptrons, Problem
from ipslimit.model.particles import train_from
from ipslimit.model.runs import empty_run

from . import kernel, peers
from .machine import in_fresh_process
from .timing import Contest, interleave, relative_error, spread
from .training_peers import Case, TorchTrainer, make_trainers

# (R, B, N, d, m, H, L) and the ratios (float32, float64) of a prototype, the higher of two runs
CASES = {(16, 4, 8, 4, 4, 16, 128): (7.3, 6.0), (8, 4, 16, 8, 8, 64, 64): (3.8, 3.3)}
# The same beside as many perceptrons of inner size n, behind an RMS norm: (R, B, N, d, m, H, L, n)
BLOCKS = {(16, 4, 8, 4, 4, 16, 128, 4): (5.0, 5.0)}
# A small language model's layers, causal: attention of H heads and as many perceptrons of size n as
# the last number says: (R, B, N, d, m, H, L, n, perceptrons)
LANGUAGE = {
    (1, 16, 64, 32, 8, 4, 32, 8, 16): (3.0, 3.0),
    (3, 16, 64, 32, 8, 4, 32, 8, 16): (3.0, 3.0),
}
STEPS = 5  # of ours in one sample
TOLERANCE = {"float32": 1e-3, "float64": 1e-9}
# Sizes whose hidden states weigh as much as a quarter of the heads, so that both show.
MEMORY = (16, 16, 16, 4, 4, 16, 128)


def make_case(sizes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Case:
    R, B, N, d, m, H, L, *inner = sizes
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=gen, dtype=torch.float64)).to(dtype)

    matrices = [normal(L, R, H, m, d, scale=d**-0.5) for _ in range(3)]
    matrices.append(normal(L, R, H, d, m, scale=m**-0.5))
    units = {"attention": Heads(*matrices)}
    if inner:
        n, count = (*inner, H)[:2]
        shapes = (L, R, count, n, d), (L, R, count, d, n)
        w_in, w_out = (normal(*s, scale=s[-1] ** -0.5) for s in shapes)
        units["perceptron"] = Perceptrons(w_in, w_out)
    # not drawn from: the units are given
    laws = {name: Atoms(family[0, 0]) for name, family in units.items()}
    law = Block(**laws, norm="rms", norm_eps=peers.NORM_EPS) if inner else laws["attention"]
    causal = len(inner) == 2
    problem = Problem(normal(B, N, d), normal(B, d), law, causal=causal)
    return Case(sizes[:7], problem, AdamW(lr=0.02, eps=0.01), problem.block.branch(units))


def ours(case: Case, steps: int, record=(), device: object = "cpu"):
    heads = {name: family.count for name, family in case.start.families.items()}
    run = empty_run(case.sizes[6], heads, range(case.sizes[0]), steps, case.problem, device)
    return train_from(case.start, case.problem, case.rule, steps, record, run, device=device)


def trained(case: Case, steps: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Our matrices (L, R, ...) after some steps, and the losses (R, steps + 1)."""
    run = ours(case, steps, (steps,))
    units = [family.map(lambda t: t.transpose(0, 1)) for family in run.units[steps].values()]
    return [part for family in units for part in family.parts().values()], run.loss


def disagreement(case: Case, trainers: dict, steps: int = 3) -> dict[str, float]:
    """Largest relative difference of every peer's heads and losses after some steps."""
    expected, losses = trained(case, steps)
    found = {}
    for name, trainer in trainers.items():
        loss = np.stack([np.asarray(trainer.step()) for _ in range(steps)], axis=1)
        pairs = [*zip(trainer.units(), expected, strict=True), (loss, losses[:, :steps])]
        found[name] = max(relative_error(a, e) for a, e in pairs)
    return found


def operations(sizes: tuple[int, ...]) -> dict[str, float]:
    """Of one step: those of every layer's field and VJP, and the bytes that must move.

    Parameters and both moments are read and written once, hidden states written and read once. Of
    causal attention all pairs are counted, of which it needs half.
    """
    R, B, N, d, m, H, L, *inner = sizes
    layer = kernel.operations(R, B, H, N, d, m)
    n, count = (*inner, H)[:2] if inner else (0, 0)
    neurons = 1.0 * R * B * N * count * n
    parameters = (4.0 * m * H + 2.0 * n * count) * d * L * R
    return {
        # a perceptron's products, once in the field and twice in its transpose
        "flop": L * (layer["flop"] + 3 * neurons * 2 * 2 * d),
        "exp": L * (layer["exp"] + neurons),
        "numbers_moved": 7 * parameters + 4.0 * R * (L + 1) * B * N * d,
    }


def run(quick: bool = False, progress=print) -> dict:
    cases = [*CASES, *BLOCKS, *LANGUAGE]
    if quick:
        cases = [*list(CASES)[:1], *BLOCKS, *list(LANGUAGE)[:1]]
    rows = []
    for sizes in cases:
        for dtype in kernel.DTYPES:
            rows.append(_measure(sizes, dtype, *((5, 12.0) if quick else (7, 45.0))))
            progress(_line(rows[-1]))
    startup = first_calls()
    progress(f"first calls: {startup}")
    memory = measure_memory()
    progress(f"memory: {memory}")
    return {
        "rows": rows,
        "first_calls": startup,
        "memory": memory,
        "compile_failure": peers.compile_failure(),
    }


def _measure(sizes: tuple[int, ...], dtype: str, rounds: int, budget: float) -> dict:
    case = make_case(sizes, kernel.DTYPES[dtype])
    trainers = make_trainers(case)
    differences = disagreement(case, trainers)
    wrong = {name: e for name, e in differences.items() if not e <= TOLERANCE[dtype]}
    if wrong:
        raise AssertionError(f"peers train differently at {sizes} {dtype}: {wrong}")
    calls = {name: trainer.step for name, trainer in trainers.items()}
    # peers keep their state from step to step; ours sets it up in every call, which is taken off:
    # a run of 0 steps copies the heads, makes the state and passes forward once
    calls["whole"] = lambda: ours(case, STEPS)
    calls["setup"] = lambda: ours(case, 0)
    samples = interleave(calls, rounds, budget=budget)
    setup = samples.pop("setup")
    samples["ipslimit"] = (samples.pop("whole") - np.nanmedian(setup)) / STEPS
    contest = Contest.of(samples)
    count, seconds = operations(sizes), contest.times["ipslimit"]
    moved = count["numbers_moved"] * kernel.DTYPES[dtype].itemsize
    return {
        "sizes": list(sizes),
        "dtype": dtype,
        "target": (CASES | BLOCKS | LANGUAGE)[sizes][dtype == "float64"],
        "setup": float(np.nanmedian(setup)),
        "gflops": count["flop"] / seconds / 1e9,
        "exps": count["exp"] / seconds / 1e9,
        "moved_gb_per_s": moved / seconds / 1e9,
        "differences": differences,
        **contest.as_dict(),
    }


def _line(row: dict) -> str:
    times = "  ".join(f"{name} {1e3 * t:.3g}" for name, t in row["times"].items())
    return f"{row['dtype']} {row['sizes']}: x{row['ratio']:.2f} ({times} ms a step)"


def first_calls() -> dict[str, float]:
    """Seconds of a first training step in a new process, with an empty cache and with a full one.

    Imports are not counted; the time of the same step once everything is loaded is taken off.
    """
    code = "import json; from benchmarks.training import first_call; "
    code += "print(json.dumps(first_call({!r})))"
    found = {}
    for dtype in kernel.DTYPES:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("empty cache", "full cache"):
                found[f"{dtype}, {name}"] = in_fresh_process(
                    code.format(dtype), NUMBA_CACHE_DIR=folder
                )
    return found


def first_call(dtype: str) -> float:
    import numba  # noqa: F401  (its import is not a compilation)

    case = make_case((2, 2, 4, 4, 4, 8, 4), kernel.DTYPES[dtype])
    start = time.perf_counter()
    ours(case, 1)
    middle = time.perf_counter()
    ours(case, 1)
    return (middle - start) - (time.perf_counter() - middle)


def measure_memory() -> dict:
    """Peak memory a seed of a run of float64, from processes with few and with many seeds.

    The process itself, its libraries and compiled code are the same in both and drop out of the
    difference; `expected` counts what must be there.
    """
    few, many = 16, 80
    _, B, N, d, m, H, L = MEMORY
    heads = 8 * 4 * m * d * H * L
    states = 8 * (L + 1) * B * N * d
    # given heads, working copy, two moments; a peer takes the gradient of all layers too
    found = {
        "sizes": list(MEMORY),
        "seeds": [few, many],
        "heads": heads,
        "states": states,
        "layer_gradient": heads / L,
    }
    for name, copies in (("ipslimit", 4), ("einsum", 4)):
        code = "import json; from benchmarks.training import peak_memory; "
        code += "print(json.dumps(peak_memory({!r}, {})))"
        low, high = (
            # blocks are given back to the system at once, or the peak would be the allocator's
            in_fresh_process(code.format(name, seeds), MALLOC_MMAP_THRESHOLD_="65536")
            for seeds in (few, many)
        )
        found[name] = (high - low) / (many - few) - copies * heads
    return found


def peak_memory(name: str, seeds: int) -> int:
    """Largest resident set of this process in bytes, after two steps."""
    torch.set_num_threads(1)  # scratch memory of threads is not per seed
    case = make_case((seeds, *MEMORY[1:]), torch.float64)
    if name == "ipslimit":
        ours(case, 2)
    else:
        trainer = TorchTrainer(case, peers.einsum_field)
        for _ in range(2):
            trainer.step()
    return peak_resident()


def peak_resident() -> int:
    """Bytes. Linux counts a parent's memory in ru_maxrss of its children, hence /proc first."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM"):
                return 1024 * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reset_peak() -> int:
    """Forget the peak so far; the resident bytes now, or 0 where the system cannot do it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return peak_resident()


def table(result: dict) -> str:
    """Markdown."""
    timed = {name for row in result["rows"] for name in row["times"]}
    names = [n for n in ("einsum", "sdpa", "wide", "compile", "jax") if n in timed]
    head = [
        "R, B, N, d, m, H, L (n, H')",
        "dtype",
        "ours ms",
        *(f"{n} ms" for n in names),
        "best peer / ours",
        "quartiles",
        "target",
        "ours GFLOP/s",
        "GB/s",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in result["rows"]:
        times = [
            f"{1e3 * row['times'][n]:.3g}" if n in row["times"] else "-"
            for n in ("ipslimit", *names)
        ]
        cells = [
            ", ".join(map(str, row["sizes"])),
            row["dtype"],
            *times,
            f"**{row['ratio']:.2f}** ({row['best']})",
            spread(row["low"], row["high"]),
            f"{row['target']:g}",
            f"{row['gflops']:.1f}",
            f"{row['moved_gb_per_s']:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    calls = ", ".join(f"{name}: {t:.2f} s" for name, t in result["first_calls"].items())
    memory = result["memory"]
    mib = {key: memory[key] / 2**20 for key in ("ipslimit", "einsum", "states", "layer_gradient")}
    lines += [
        "",
        "With n: attention and perceptrons (gelu) behind an RMS norm, H of each. With an H last: "
        "causal, and as many perceptrons, the layers of a small language model; `wide` is its "
        "usual form, heads and perceptrons side by side in four matrices, with torch's own "
        "attention, and `compile` compiles that.",
        "",
        "torch peers run `torch.optim.AdamW(fused=True)`; `compile` compiles the layer; `jax` is "
        "`lax.scan` with `optax.adamw`. All follow the same trajectory (checked).",
        "",
        f"First training step beyond a later one: {calls}.",
        "",
        f"Memory a seed beyond heads and optimizer state at (B, N, d, m, H, L) = "
        f"{tuple(memory['sizes'][1:])}, float64: {mib['ipslimit']:.2f} MiB; the L + 1 stored "
        f"states are {mib['states']:.2f} MiB, one layer's gradient "
        f"{mib['layer_gradient']:.2f} MiB. PyTorch autograd: {mib['einsum']:.1f} MiB.",
    ]
    return "\n".join(lines)
