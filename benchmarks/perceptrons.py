"""One field and its VJP: ipslimit's perceptrons against einsum, products, torch.compile and jax."""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.nn.functional as F

from ipslimit import Perceptrons
from ipslimit.model import perceptrons_eager

from . import peers
from .kernel import DTYPES, over_sizes, require_agreement
from .timing import Contest, interleave, spread

# (R, B, H, N, d, n): seeds, contexts, units, tokens, token size, neurons a unit; and how many times
# as fast as the best peer the field with its VJP is to be.
SIZES = {
    (16, 4, 16, 8, 4, 4): 3.0,
    (8, 4, 64, 16, 8, 8): 3.0,
    (1, 4, 4096, 8, 4, 4): 3.0,
    (1, 4, 8, 64, 64, 64): 1.0,
}
MATRICES = ("w_in", "w_out")


def operations(R: int, B: int, H: int, N: int, d: int, n: int) -> float:
    """Floating-point operations of the products of the field and its VJP, counted once each."""
    return float(R * B * H * N * 6 * 2 * d * n)


def make_case(sizes: tuple[int, ...], dtype: torch.dtype, seed: int = 0):
    """x, the two matrices and a cotangent, with neurons of O(1) at every size."""
    R, B, H, N, d, n = sizes
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=gen, dtype=torch.float64)).to(dtype)

    matrices = [normal(R, H, n, d, scale=d**-0.5), normal(R, H, d, n, scale=n**-0.5)]
    return normal(R, B, N, d), matrices, normal(R, B, N, d)


def einsum_field(x, w_in, w_out) -> torch.Tensor:
    """The formula, written down."""
    hidden = F.gelu(torch.einsum("rbtd,rhnd->rbthn", x, w_in))
    return torch.einsum("rbthn,rhdn->rbtd", hidden, w_out) / w_in.shape[1]


def product_field(x, w_in, w_out) -> torch.Tensor:
    """The units as the neurons of one wide hidden layer."""
    rows, d = x.shape[0], x.shape[-1]
    wide = w_out.movedim(2, 1).reshape(rows, d, -1)
    hidden = F.gelu(torch.bmm(x.reshape(rows, -1, d), w_in.reshape(rows, -1, d).mT))
    return torch.bmm(hidden, wide.mT).view(x.shape) / w_in.shape[1]


def jax_field(x, w_in, w_out):
    """As `einsum_field`, for jax."""
    jax = peers.import_jax()
    einsum = jax.numpy.einsum
    hidden = jax.nn.gelu(einsum("rbtd,rhnd->rbthn", x, w_in), approximate=False)
    return einsum("rbthn,rhdn->rbtd", hidden, w_out) / w_in.shape[1]


def ours(x, matrices, cotangent):
    """A call that gives the field and the derivatives in x, w_in, w_out as the peers do.

    As in `kernel.ours`: by autograd where the sizes choose the eager path.
    """
    units = Perceptrons(*matrices)
    eager = units.path(*x.shape[1:3]) is perceptrons_eager
    leaves = [x.clone().requires_grad_(), units.packed.clone().requires_grad_()]
    face = Perceptrons.from_packed(leaves[1], units.weights, units.layout)

    def call():
        if eager:
            out = face.field(leaves[0])
            return out.detach(), *torch.autograd.grad(out, leaves, cotangent)
        out, (dx, dunits) = units.field(x), units.vjp(x, cotangent)
        return out, dx, dunits.packed

    def results():
        out, dx, plain = call()
        if not eager:
            plain = plain * units.weights.unsqueeze(-2)
        parts = Perceptrons.from_packed(plain, units.weights, units.layout).parts()
        return [out, dx, *(parts[name] for name in MATRICES)]

    return call, results


def contestants(x, matrices, cotangent, with_compile: bool = True) -> dict:
    """The peers that are here, by name."""
    fields = {"einsum": einsum_field, "products": product_field}
    if with_compile and not peers.compile_failure():
        fields["compile"] = peers.compiled(einsum_field)
        fields["compiled products"] = peers.compiled(product_field)
    calls = {
        name: peers.field_and_vjp(field, x, matrices, cotangent) for name, field in fields.items()
    }
    if peers.import_jax():
        calls["jax"] = peers.jax_field_and_vjp(x, matrices, cotangent, jax_field)
    return calls


def run(quick: bool = False, progress=print) -> dict:
    """All sizes in both dtypes; peers are verified before they are timed."""
    return over_sizes(list(SIZES)[:: 3 if quick else 1], _measure, _line, quick, progress)


def _measure(size: tuple[int, ...], dtype: str, rounds: int) -> dict:
    case = make_case(size, DTYPES[dtype])
    call, results = ours(*case)
    calls = contestants(*case)
    differences = require_agreement(calls, results(), size, dtype)
    samples = interleave({"ipslimit": call, **calls}, rounds)
    contest = Contest.of(samples)
    minima = {name: float(np.nanmin(values)) for name, values in samples.items()}
    path = Perceptrons(*case[1]).path(*case[0].shape[1:3])
    return {
        "size": list(size),
        "dtype": dtype,
        "path": path.__name__.rpartition(".")[2],
        "gflops": operations(*size) / contest.times["ipslimit"] / 1e9,
        # a machine that others use delays medians, and minima less
        "minima": minima,
        "ratio_of_minima": min(minima[name] for name in calls) / minima["ipslimit"],
        "load": os.getloadavg()[0],
        "target": SIZES[size],
        "differences": differences,
        **contest.as_dict(),
    }


def _line(row: dict) -> str:
    times = "  ".join(f"{name} {1e3 * t:.3g}" for name, t in row["times"].items())
    least = "  ".join(f"{name} {1e3 * t:.3g}" for name, t in row["minima"].items())
    return (
        f"{row['dtype']} {row['size']} {row['path']}: x{row['ratio']:.2f} ({times} ms), of minima "
        f"x{row['ratio_of_minima']:.2f} ({least} ms), load {row['load']:.1f}"
    )


def table(result: dict) -> str:
    """Markdown."""
    names = [name for name in result["rows"][0]["times"] if name != "ipslimit"]
    head = ["R, B, H, N, d, n", "dtype", "path", "ours ms", *(f"{name} ms" for name in names)]
    head += ["best peer / ours", "quartiles", "of minima", "target", "ours GFLOP/s", "load"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in result["rows"]:
        times = [f"{1e3 * row['times'][name]:.3g}" for name in ("ipslimit", *names)]
        cells = [
            ", ".join(map(str, row["size"])),
            row["dtype"],
            row["path"],
            *times,
            f"**{row['ratio']:.2f}** ({row['best']})",
            spread(row["low"], row["high"]),
            f"{row['ratio_of_minima']:.2f}",
            f"{row['target']:g}",
            f"{row['gflops']:.1f}",
            f"{row['load']:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    reached = sum(row["ratio"] >= row["target"] for row in result["rows"])
    lines += ["", f"{reached} of {len(result['rows'])} reach their targets."]
    if result["compile_failure"]:
        lines.append(f"torch.compile does not work here: {result['compile_failure']}")
    if not result["jax"]:
        lines.append("jax: not installed.")
    return "\n".join(lines)
