"""One field and its VJP: ipslimit's attention against einsum, SDPA, torch.compile and jax."""

from __future__ import annotations

import math

import numpy as np
import torch

from ipslimit import Heads, attention_field, attention_vjp
from ipslimit.cpu.dispatch import choose

from . import peers
from .timing import Contest, interleave, relative_error, spread

# (R, B, H, N, d, m): seeds, contexts, heads, tokens, token and head size. The first eight have
# ratios (float32, float64) that a prototype reached, to be held against.
SMALL = {
    (16, 4, 16, 8, 4, 4): (6.0, 2.3),
    (64, 4, 8, 8, 4, 4): (6.4, 2.5),
    (8, 4, 64, 16, 8, 8): (3.3, 2.3),
    (1, 4, 4096, 8, 4, 4): (9.3, 4.6),
    (1, 1, 512, 64, 8, 8): (5.0, 3.3),
    (1, 8, 64, 16, 8, 8): (2.9, 1.8),
    (1, 4, 256, 32, 16, 8): (2.5, 2.6),
    (1, 4, 64, 64, 16, 16): (1.4, 1.9),
}
MIDDLE = [(4, 4, 16, 32, 32, 32), (1, 4, 16, 64, 32, 16), (1, 8, 8, 128, 16, 16)]
LARGE = [(1, 4, 8, 64, 64, 64), (1, 4, 4, 128, 64, 64), (1, 2, 4, 256, 64, 64)]
DTYPES = {"float32": torch.float32, "float64": torch.float64}
TOLERANCE = {"float32": 2e-4, "float64": 1e-10}


def operations(R: int, B: int, H: int, N: int, d: int, m: int) -> dict[str, float]:
    """Floating-point operations and exponentials of the field plus its VJP, counted once each.

    Products only, a multiplication and an addition each; the VJP's recomputation of the field is
    work we chose to do, and not counted.
    """
    projections = 4 * 2 * N * m * d
    pairs = 2 * 2 * N * N * m
    per_head = (projections + pairs) + 2 * (projections + pairs)
    return {"flop": float(R * B * H * per_head), "exp": float(R * B * H * N * N)}


def make_case(sizes: tuple[int, ...], dtype: torch.dtype, seed: int = 0):
    """x, the four matrices and a cotangent, with logits of O(1) at every size."""
    R, B, H, N, d, m = sizes
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=gen, dtype=torch.float64)).to(dtype)

    matrices = [normal(R, H, m, d, scale=d**-0.5) for _ in range(3)]
    matrices.append(normal(R, H, d, m, scale=m**-0.5))
    return normal(R, B, N, d), matrices, normal(R, B, N, d)


def ours(x, matrices, cotangent):
    """A call that gives the field and the derivatives in x, q, k, v, o as the peers do.

    Where the sizes choose the eager path, by autograd as they do, so that the field's queries, keys
    and values are kept for its transpose; the fused path recomputes them either way.
    """
    heads = Heads(*matrices)
    path = choose(x.shape[1], heads.count, *x.shape[2:], heads.m, x.dtype, x.device)
    leaves = [x.clone().requires_grad_(), heads.packed.clone().requires_grad_()]
    face = Heads.from_packed(leaves[1], heads.weights, heads.layout)

    def call():
        if path == "eager":
            out = attention_field(leaves[0], face)
            return out.detach(), *torch.autograd.grad(out, leaves, cotangent)
        out, (dx, dheads) = attention_field(x, heads), attention_vjp(x, heads, cotangent)
        return out, dx, dheads.packed

    def results():
        out, dx, plain = call()
        if path != "eager":
            plain = plain * heads.weights.unsqueeze(-2)
        parts = Heads.from_packed(plain, heads.weights, heads.layout).parts()
        return [out, dx, *(parts[name] for name in peers.MATRICES)]

    return call, results


def contestants(x, matrices, cotangent, with_compile: bool = True) -> dict:
    """The peers that are here, by name."""
    arguments = (x, matrices, cotangent)
    calls = {
        "einsum": peers.field_and_vjp(peers.einsum_field, *arguments),
        "sdpa": peers.field_and_vjp(peers.sdpa_field, *arguments),
    }
    if with_compile and not peers.compile_failure():
        calls["compile"] = peers.field_and_vjp(peers.compiled(peers.einsum_field), *arguments)
    if peers.import_jax():
        calls["jax"] = peers.jax_field_and_vjp(*arguments)
    return calls


def disagreement(calls: dict, expected: list) -> dict[str, float]:
    """Largest relative difference of every peer from our numbers."""
    return {
        name: max(relative_error(a, e) for a, e in zip(call(), expected, strict=True))
        for name, call in calls.items()
    }


def require_agreement(calls: dict, expected: list, size: tuple, dtype: str) -> dict[str, float]:
    """The `disagreement` of the peers, if all of them compute what we do."""
    differences = disagreement(calls, expected)
    wrong = {name: e for name, e in differences.items() if not e <= TOLERANCE[dtype]}
    if wrong:
        raise AssertionError(f"peers disagree with ipslimit at {size} {dtype}: {wrong}")
    return differences


def run(quick: bool = False, progress=print) -> dict:
    """All sizes in both dtypes; peers are verified before they are timed."""
    sizes = [*SMALL, *MIDDLE, *LARGE]
    if quick:
        sizes = [next(iter(SMALL)), MIDDLE[1], LARGE[0]]
    return over_sizes(sizes, _measure, _line, quick, progress)


def over_sizes(sizes, measure, line, quick: bool, progress) -> dict:
    """What is measured of all sizes in both dtypes, and which peers there were."""
    rows = []
    for dtype in DTYPES:
        for size in sizes:
            rows.append(measure(size, dtype, 5 if quick else 9))
            progress(line(rows[-1]))
    return {
        "rows": rows,
        "compile_failure": peers.compile_failure(),
        "jax": bool(peers.import_jax()),
    }


def _measure(size: tuple[int, ...], dtype: str, rounds: int) -> dict:
    _, B, H, N, d, m = size
    x, matrices, cotangent = make_case(size, DTYPES[dtype])
    call, results = ours(x, matrices, cotangent)
    calls = contestants(x, matrices, cotangent)
    differences = require_agreement(calls, results(), size, dtype)
    heads = Heads(*matrices)
    calls["vjp"] = lambda: attention_vjp(x, heads, cotangent)
    samples = interleave({"ipslimit": call, **calls}, rounds)
    vjp = float(np.nanmedian(samples.pop("vjp")))
    contest = Contest.of(samples)
    count = operations(*size)
    seconds = contest.times["ipslimit"]
    group = "small" if size in SMALL else "middle" if size in MIDDLE else "large"
    return {
        "size": list(size),
        "dtype": dtype,
        "group": group,
        "path": choose(B, H, N, d, m, DTYPES[dtype], torch.device("cpu")),
        "gflops": count["flop"] / seconds / 1e9,
        "exps": count["exp"] / seconds / 1e9,
        "target": SMALL[size][dtype == "float64"] if size in SMALL else 1.0,
        "vjp": vjp,
        "differences": differences,
        **contest.as_dict(),
    }


def _line(row: dict) -> str:
    times = "  ".join(f"{name} {1e3 * t:.3g}" for name, t in row["times"].items())
    return f"{row['dtype']} {row['size']} {row['path']}: x{row['ratio']:.2f} ({times} ms)"


def table(result: dict) -> str:
    """Markdown."""
    names = [n for n in ("einsum", "sdpa", "compile", "jax") if n in result["rows"][0]["times"]]
    head = [
        "R, B, H, N, d, m",
        "dtype",
        "path",
        "ours ms",
        "its VJP",
        *(f"{n} ms" for n in names),
        "best peer / ours",
        "quartiles",
        "target",
        "ours GFLOP/s",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in result["rows"]:
        ms = [row["times"]["ipslimit"], row["vjp"], *(row["times"][n] for n in names)]
        times = [f"{1e3 * t:.3g}" for t in ms]
        cells = [
            ", ".join(map(str, row["size"])),
            row["dtype"],
            row["path"],
            *times,
            f"**{row['ratio']:.2f}** ({row['best']})",
            spread(row["low"], row["high"]),
            f"{row['target']:g}" if row["group"] == "small" else ">= 0.95",
            f"{row['gflops']:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    small = [row for row in result["rows"] if row["group"] == "small"]
    others = [row for row in result["rows"] if row["group"] != "small"]
    reached = [row["ratio"] / row["target"] for row in small]
    lines.append("")
    if small:
        product = math.exp(sum(map(math.log, reached)) / len(reached))
        lines.append(f"Small heads: ratio over target {product:.2f} in the geometric mean; ")
        lines[-1] += f"{sum(r >= 0.8 for r in reached)} of {len(reached)} reach 0.8 of it."
    if others:
        good = sum(row["ratio"] >= 0.95 for row in others)
        lines.append(f"Elsewhere: {good} of {len(others)} are at 0.95 of the best peer or above.")
    if result["compile_failure"]:
        lines.append(f"torch.compile does not work here: {result['compile_failure']}")
    if not result["jax"]:
        lines.append("jax: not installed.")
    return "\n".join(lines)
