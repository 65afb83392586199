"""Rows of a table of errors: what names a cell, and the two norms of what differs."""

from __future__ import annotations

import torch

from ..model.runs import ParticleRun
from .token_sets import masked, token_mean

Row = dict[str, object]


def row_key(run: ParticleRun, step: int, variable: str, term: str | None, where: str) -> Row:
    key: Row = {"step": step, "variable": variable}
    if term is not None:
        key["term"] = term
    key |= {"set": where, "L": run.depth, "H": float(run.head_count)}
    if len(set(run.unit_numbers.values())) > 1:
        key |= {f"H_{family}": float(number) for family, number in run.unit_numbers.items()}
    return key


def layer_depths(run: ParticleRun) -> torch.Tensor:
    """s = r/L of all hidden states, (L+1,)."""
    return torch.arange(run.depth + 1, dtype=torch.float64) / run.depth


def norm_rows(
    key: Row, seeds, square: torch.Tensor, weights: torch.Tensor | None = None
) -> list[Row]:
    """rms and sup rows of squared distances (seeds, layers, ., .), which count by weights."""
    mean = token_mean(square, weights)
    largest = square if weights is None else masked(square, weights)
    rms = mean[:, peak_of(mean)].sqrt()
    return error_rows(key, "rms", seeds, rms) + error_rows(
        key, "sup", seeds, largest.flatten(1).amax(1).sqrt()
    )


def squared(gap: torch.Tensor) -> torch.Tensor:
    return gap.square().sum(-1)


def error_rows(key: Row, norm: str, seeds, errors: torch.Tensor) -> list[Row]:
    return [
        key | {"norm": norm, "seed": seed, "error": error}
        for seed, error in zip(seeds, errors.tolist(), strict=True)
    ]


def mean_square(gap: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """mean_{b,i} |gap|^2 for gap (..., B, N, d), by weights (B, N) of tokens or all alike."""
    return token_mean(squared(gap), weights)


def peak_of(square: torch.Tensor) -> int:
    """Layer at which the mean over the seeds that are finite is largest; square (seeds, layers)."""
    finite = torch.isfinite(square).all(1)
    return int(square[finite].mean(0).argmax()) if finite.any() else 0
