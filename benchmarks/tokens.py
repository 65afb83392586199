"""What weights of tokens cost, and a pair of tokens where there are many of them."""

from __future__ import annotations

import numpy as np
import torch

from ipslimit import XavierUniform
from ipslimit.model.sight import Sight

from .timing import interleave, spread

# (B, N, d, m, H): of lanes of heads, of few heads on many tokens, small and large.
SIZES = [(4, 8, 4, 4, 32), (8, 64, 4, 4, 8), (2, 256, 8, 8, 16), (8, 64, 32, 8, 4)]
MANY, HEADS, SIZE = (64, 256, 1024, 4096), 8, 4
DTYPES = (torch.float32, torch.float64)


def _calls(B: int, N: int, d: int, m: int, H: int, dtype, sights: dict[str, Sight]) -> dict:
    """The field and its transpose under every sight, as calls by name."""
    generator = torch.Generator().manual_seed(0)
    x, c = (torch.randn(B, N, d, generator=generator, dtype=dtype) for _ in range(2))
    heads = XavierUniform(d, m).nodes(H, 0).heads.to(dtype)

    def call(sight: Sight):
        def both():
            heads.field(x, sight)
            heads.vjp(x, c, sight)

        return both

    return {name: call(sight) for name, sight in sights.items()}


def _sights(B: int, N: int, causal: bool, dtype) -> dict[str, Sight]:
    generator = torch.Generator().manual_seed(1)
    u = 0.5 + torch.rand(B, N, generator=generator, dtype=torch.float64)
    u = (u * (N / u.sum(-1, keepdim=True))).to(dtype)
    # pairs of tokens at one position
    ends = (torch.arange(N) // 2 * 2 + 2).expand(B, N)
    plain = Sight(causal)
    return {"plain": plain, "weights": Sight(causal, u, ends if causal else None)}


def run(quick: bool = False, progress=print) -> dict:
    rounds = 5 if quick else 15
    rows, pairs = [], []
    for sizes in SIZES[:2] if quick else SIZES:
        for dtype in DTYPES:
            for causal in (False, True):
                sights = _sights(*sizes[:2], causal, dtype)
                times = interleave(_calls(*sizes, dtype, sights), rounds)
                ratios = times["weights"] / times["plain"]
                low, middle, high = np.nanpercentile(ratios, [25, 50, 75])
                rows.append(
                    {
                        "sizes": sizes,
                        "dtype": str(dtype).removeprefix("torch."),
                        "causal": causal,
                        "seconds": float(np.nanmedian(times["plain"])),
                        "ratio": float(middle),
                        "low": float(low),
                        "high": float(high),
                    }
                )
                progress(f"{sizes}, {rows[-1]['dtype']}, causal {causal}: {middle:.3f}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for tokens in MANY[:2] if quick else MANY:
        row: dict[str, object] = {"tokens": tokens}
        for dtype in DTYPES:
            calls = _calls(1, tokens, SIZE, SIZE, HEADS, dtype, {"plain": Sight()})
            seconds = float(np.nanmin(interleave(calls, 3)["plain"]))
            row[str(dtype).removeprefix("torch.")] = 1e9 * seconds / tokens**2
        pairs.append(row)
        progress(f"N = {tokens}: {row['float64']:.1f} ns a pair in float64")
    torch.set_num_threads(threads)
    return {"rows": rows, "pairs": pairs}


def table(result: dict) -> str:
    """Markdown."""
    lines = [
        "A field and its transpose of tokens with weights (with a mask also two tokens at each "
        "position), over those of equal tokens:",
        "",
        "| B, N, d, m, H | dtype | mask | equal, us | with weights |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        sizes = ", ".join(map(str, row["sizes"]))
        lines.append(
            f"| {sizes} | {row['dtype']} | {'causal' if row['causal'] else 'none'} | "
            f"{1e6 * row['seconds']:.1f} | **{row['ratio']:.3f}** "
            f"({spread(row['low'], row['high'])}) |"
        )
    lines += [
        "",
        f"Nanoseconds for a pair of tokens, field and transpose of {HEADS} heads (d = m = {SIZE}) "
        "together, no mask, one thread, least of 3 rounds:",
        "",
        "| N | float32 | float64 |",
        "|---|---|---|",
    ]
    for row in result["pairs"]:
        lines.append(f"| {row['tokens']} | {row['float32']:.1f} | {row['float64']:.1f} |")
    return "\n".join(lines)
