"""What our torch optimizers cost: an iteration of a GPT, and the step by itself.

An iteration is zero_grad, forward, backward and step. On a machine that others use the wall clock
counts their work too, so that all is timed once more on one thread by what the process itself took.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ipslimit import BoundaryProbe
from ipslimit.nn import decay_groups
from ipslimit.optim import SAGGS, SBOAdamW, find_pairs

from .timing import PAUSE, interleave, spread

LAYERS, WIDTH, HEADS, WORDS, TOKENS = 6, 384, 6, 65, 256
EVERY = 100  # steps between two balancings of SAGGS
BASES = {"foreach": "AdamW(foreach=True)", "fused": "AdamW(fused=True)"}
# what it is called, and what an iteration is to cost in those of AdamW(foreach=True)
KINDS = {
    "SBO": ("SBOAdamW", 1.05),
    "SBO ema": ('SBOAdamW(centre="ema")', 1.08),
    "probe": ("AdamW(foreach=True), BoundaryProbe(every=1)", 1.10),
    "SAGGS": (f"SAGGS(AdamW(foreach=True), every={EVERY})", 1.01),
}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two layers with a ReLU between them."""

    def __init__(self, width: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """Attention and an MLP, each behind its norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A language model of some 10 million parameters."""

    def __init__(self, layers=LAYERS, width=WIDTH, heads=HEADS, words=WORDS, tokens=TOKENS):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Training:
    """A model with its optimizer, and one sequence of tokens."""

    def __init__(self, kind: str, tokens: int = TOKENS, **sizes: int):
        gen = torch.Generator().manual_seed(0)
        self.words = torch.randint(sizes.get("words", WORDS), (1, tokens + 1), generator=gen)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = GPT(**sizes, tokens=tokens)
        self.optimizer = self._optimizer(kind)

    def _optimizer(self, kind: str) -> torch.optim.Optimizer:
        if kind.startswith("SBO"):
            return SBOAdamW(self.model, centre="ema" if kind.endswith("ema") else "batch")
        groups = decay_groups(self.model, 0.01)
        adamw = torch.optim.AdamW(groups, foreach=kind != "fused", fused=kind == "fused")
        if kind == "probe":
            self.probe = BoundaryProbe(self.model, adamw)
        if kind == "SAGGS":
            return SAGGS(adamw, find_pairs(self.model), EVERY)
        return adamw

    def backward(self) -> float:
        """Gradients of the loss, which is returned."""
        self.optimizer.zero_grad()
        logits = self.model(self.words[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), self.words[:, 1:].flatten())
        loss.backward()
        return loss.item()

    def iterate(self, clock: Callable[[], float] = time.perf_counter) -> tuple[float, ...]:
        """One iteration; returns its loss, what it took up to the step, and what the step took."""
        start = clock()
        loss = self.backward()
        middle = clock()
        self.optimizer.step()
        return loss, middle - start, clock() - middle


def run(quick: bool = False, progress=print) -> dict:
    """Iterations, the step by itself, and both in the process's own time on one thread."""
    names = (*BASES, *KINDS)
    rounds, budget = (5, 60.0) if quick else (15, 240.0)
    threads = torch.get_num_threads()
    trainings = {name: Training(name) for name in names}
    rows = [_measure(trainings, time.perf_counter, threads, rounds, budget, progress)]
    torch.set_num_threads(1)
    try:
        rows.append(_measure(trainings, time.process_time, 1, rounds, budget, progress))
    finally:
        torch.set_num_threads(threads)
    parameters = sum(p.numel() for p in trainings["foreach"].model.parameters())
    return {"rows": rows, "parameters": parameters, "balancing": _balancing(trainings)}


def _measure(trainings: dict, clock, threads: int, rounds: int, budget: float, progress) -> dict:
    """Medians and ratios of whole iterations and of their steps, of all contestants in turn."""
    whole, steps = ({name: [] for name in trainings} for _ in range(2))
    names = list(trainings)
    start = time.perf_counter()
    for i in range(rounds + 1):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            time.sleep(PAUSE)
            trainings[name].backward()  # untimed: caches are its own then
            _, before, step = trainings[name].iterate(clock)
            if i:  # the first is compilation
                whole[name].append(before + step)
                steps[name].append(step)
        if i >= 3 and time.perf_counter() - start > budget:
            break
    row = {
        "threads": threads,
        "clock": "wall" if clock is time.perf_counter else "process",
        "iterations": _over(whole),
        "steps": _over(steps),
        "load": os.getloadavg()[0],
    }
    progress(_line(row))
    return row


def _over(samples: dict[str, list[float]]) -> dict:
    """Medians in seconds, least times, and quartiles of the ratios to both bases round by round."""
    found = {"times": {}, "least": {}, "ratios": {base: {} for base in BASES}}
    for name, values in samples.items():
        found["times"][name] = float(np.median(values))
        found["least"][name] = float(np.min(values))
        for base, ratios in found["ratios"].items():
            quotients = np.array(values) / np.array(samples[base])
            ratios[name] = [float(q) for q in np.percentile(quotients, [25, 50, 75])]
    return found


def _balancing(trainings: dict) -> dict:
    """What a balancing of SAGGS takes, in iterations of the optimizer in it."""
    training = trainings["SAGGS"]
    samples = interleave(
        {"balancing": training.optimizer.balance, "iteration": training.iterate}, 5
    )
    ratio = samples["balancing"] / samples["iteration"]
    return {
        "seconds": float(np.nanmedian(samples["balancing"])),
        "iterations": float(np.nanmedian(ratio)),
    }


def _line(row: dict) -> str:
    parts = [
        f"{name} {row['iterations']['ratios']['foreach'][name][1]:.3f}" for name in (*BASES, *KINDS)
    ]
    return f"{row['threads']} threads, {row['clock']} time, of AdamW foreach: " + ", ".join(parts)


def table(result: dict) -> str:
    """Markdown."""
    lines = [
        f"A GPT of {result['parameters'] / 1e6:.1f} million parameters ({LAYERS} layers, "
        f"d = {WIDTH}, every projection and both layers of every MLP with a bias) on one sequence "
        f"of {TOKENS} tokens, float32. Ratios to AdamW are those of the rounds: median and "
        "quartiles."
    ]
    for row in result["rows"]:
        clock = {"wall": "wall clock", "process": "time of the process itself"}[row["clock"]]
        lines += [
            "",
            f"{row['threads']} threads, {clock}, load {row['load']:.1f}:",
            "",
            "| optimizer | iteration ms | of foreach | wanted | least of least | of fused | "
            "step ms | step of fused |",
            "|---|---|---|---|---|---|---|---|",
        ]
        whole, steps = row["iterations"], row["steps"]
        for name in (*BASES, *KINDS):
            label, wanted = KINDS.get(name, (BASES.get(name), None))
            ratios = {base: whole["ratios"][base][name] for base in BASES}
            cells = [
                f"`{label}`",
                f"{1e3 * whole['times'][name]:.0f}",
                _ratio(ratios["foreach"]),
                f"{wanted:.2f}" if wanted else "",
                f"{whole['least'][name] / whole['least']['foreach']:.3f}",
                _ratio(ratios["fused"]),
                f"{1e3 * steps['times'][name]:.1f}",
                f"{steps['ratios']['fused'][name][1]:.2f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    balancing = result["balancing"]
    lines += [
        "",
        f"A balancing of SAGGS takes {1e3 * balancing['seconds']:.0f} ms, or "
        f"{balancing['iterations']:.2f} of an iteration: once in {EVERY} steps that is "
        f"{100 * balancing['iterations'] / EVERY:.2f} %. The rows above are of steps without it.",
    ]
    return "\n".join(lines)


def _ratio(quartiles: list[float]) -> str:
    low, middle, high = quartiles
    return f"**{middle:.3f}** ({spread(low, high)})"
