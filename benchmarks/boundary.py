"""What looking at boundaries costs: a training step with a probe, and a centered layer."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from ipslimit import BoundaryProbe
from ipslimit.nn import CenteredLinear, Recentring, center_linears, decay_groups
from ipslimit.optim import SBOAdamW

from .timing import interleave, spread

LAYERS, WIDTH, HEADS, INNER, WORDS = 4, 64, 4, 256, 1000
BATCHES = ((32, 64), (32, 256))  # sequences, tokens of each
ROWS = (64, 2048)  # that enter one layer
LIMIT = 0.05  # of a step, for the probe
KINDS = {
    "probe": "BoundaryProbe",
    "probe every 10": "BoundaryProbe(every=10)",
    "SBO": "SBOAdamW",
    "SBO and probe": "SBOAdamW, BoundaryProbe",
    "centered": "CenteredLinear, Recentring",
}


class Classifier(nn.Module):
    """A transformer on tokens, from nn.TransformerEncoderLayer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, dropout=0.0, batch_first=True)
                for _ in range(LAYERS)
            )
        )
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)).mean(1))


def make_step(kind: str, sequences: int, tokens: int) -> Callable[[], float]:
    """A function that makes one training step and returns its loss."""
    gen = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (sequences, tokens), generator=gen)
    labels = torch.randint(2, (sequences,), generator=gen)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Classifier()
    if kind == "centered":
        center_linears(model)
    if kind.startswith("SBO"):
        optimizer = SBOAdamW(model, exclude="*out_proj", foreach=True)
    else:
        optimizer = torch.optim.AdamW(decay_groups(model, 0.01), foreach=True)
    if "probe" in kind:
        BoundaryProbe(model, optimizer, every=10 if kind.endswith("10") else 1)
    if kind == "centered":
        Recentring(model, optimizer)

    def step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(words), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def make_layers(rows: int) -> dict[str, Callable[[], object]]:
    """A Linear, the same centred, and what centring by hand costs."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(rows, WIDTH, generator=gen)
    linear = nn.Linear(WIDTH, INNER)
    centred = CenteredLinear.from_linear(copy.deepcopy(linear)).recentre_(x.mean(0))

    def subtracted():
        return nn.functional.linear(x - centred.centre, centred.weight, centred.beta)

    return {
        "Linear": lambda: linear(x),
        "CenteredLinear": lambda: centred(x),
        "S (x - c) + beta": subtracted,
    }


def run(quick: bool = False, progress=print) -> dict:
    rounds, budget = (7, 20.0) if quick else (21, 90.0)
    steps = []
    for sequences, tokens in BATCHES[: 1 if quick else None]:
        calls = {kind: make_step(kind, sequences, tokens) for kind in ("AdamW", *KINDS)}
        samples = interleave(calls, rounds, sample=0.1, budget=budget)
        row = {"sequences": sequences, "tokens": tokens, **_over(samples, "AdamW")}
        steps.append(row)
        progress(_line(f"{sequences} x {tokens} tokens", row))
    layers = []
    for rows in ROWS:
        for backward in (False, True):
            calls = make_layers(rows)
            if backward:
                calls = {name: _with_backward(call) for name, call in calls.items()}
            else:
                calls = {name: torch.no_grad()(call) for name, call in calls.items()}
            samples = interleave(calls, rounds, budget=budget)
            row = {"rows": rows, "backward": backward, **_over(samples, "Linear")}
            layers.append(row)
            progress(_line(f"{rows} rows{', backward' if backward else ''}", row))
    return {"steps": steps, "layers": layers, "threads": torch.get_num_threads()}


def _with_backward(call: Callable[[], torch.Tensor]) -> Callable[[], None]:
    return lambda: call().sum().backward()


def _over(samples: dict[str, np.ndarray], base: str) -> dict:
    """Median seconds, and the share that each adds to the base, round by round."""
    added = {
        name: [float(q) for q in np.nanpercentile(values / samples[base] - 1.0, [25, 50, 75])]
        for name, values in samples.items()
        if name != base
    }
    return {"times": {n: float(np.nanmedian(v)) for n, v in samples.items()}, "added": added}


def _line(label: str, row: dict) -> str:
    return f"{label}: " + ", ".join(
        f"{name} {100 * middle:+.1f} %" for name, (_, middle, _) in row["added"].items()
    )


def table(result: dict) -> str:
    """Markdown."""
    lines = [
        f"A training step of a transformer of {LAYERS} layers, d = {WIDTH}, inner width {INNER}, "
        f"float32, {result['threads']} threads. What each adds to a step of torch.optim.AdamW, "
        f"median and quartiles; the aim for the probe is {100 * LIMIT:.0f} %.",
        "",
        "| sequences x tokens | AdamW ms | " + " | ".join(KINDS.values()) + " |",
        "|" + "---|" * (2 + len(KINDS)),
    ]
    for row in result["steps"]:
        cells = [f"{row['sequences']} x {row['tokens']}", f"{1e3 * row['times']['AdamW']:.1f}"]
        lines.append("| " + " | ".join(cells + [_percent(row, kind) for kind in KINDS]) + " |")
    lines += [
        "",
        f"One layer {WIDTH} -> {INNER}; what it adds to nn.Linear:",
        "",
        "| rows | pass | Linear us | CenteredLinear | S (x - c) + beta as written |",
        "|---|---|---|---|---|",
    ]
    for row in result["layers"]:
        passes = "forward, backward" if row["backward"] else "forward"
        cells = [str(row["rows"]), passes, f"{1e6 * row['times']['Linear']:.1f}"]
        cells += [_percent(row, name) for name in ("CenteredLinear", "S (x - c) + beta")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _percent(row: dict, name: str) -> str:
    low, middle, high = (100 * q for q in row["added"][name])
    return f"**{middle:+.1f} %** ({spread(low, high)})"
