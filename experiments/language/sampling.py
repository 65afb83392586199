"""Text that models write, drawn with the same numbers, so that it can be laid side by side."""

from __future__ import annotations

import numpy as np
import torch

from ipslimit import ParticleRun, TokenProblem
from ipslimit.solvers import LimitRun

from ..text.characters import CharacterWindows
from .setting import LanguageSetting

PROMPTS = 3
# Characters of a prompt, if windows have so many.
PROMPT = 24


def prompts_of(text: CharacterWindows, tokens: int) -> np.ndarray:
    """The beginnings (prompts, n) of held-out windows spread over all of them."""
    count = min(PROMPTS, len(text.held_out))
    chosen = (np.arange(count) * len(text.held_out)) // count
    return text.held_out[chosen, : min(PROMPT, tokens)].astype(np.int64)


def write(
    run: ParticleRun | LimitRun,
    problem: TokenProblem,
    setting: LanguageSetting,
    text: CharacterWindows,
) -> list[str]:
    """What the model writes after each prompt, after its last step; of the first seed.

    A character is the one at which the cumulated probability, in the order of their numbers,
    passes a uniform number of (sample seed, place) alone: models of nearly the same probabilities
    write the same but for few characters, until the first of these. The last N characters are read.
    """
    if not setting.sample:
        return []
    ids = prompts_of(text, problem.N)
    prompt = ids.shape[1]
    uniforms = np.random.default_rng(setting.sample_seed).random((setting.sample, len(ids)))
    for numbers in uniforms:
        read = torch.from_numpy(ids[:, -problem.N :])
        logits = run.logits(problem, setting.model.steps, read)
        if logits.ndim == 4:  # of seeds
            logits = logits[0]
        ids = np.column_stack([ids, drawn(logits[:, -1], numbers)])
    return [text.characters.decode(written[prompt:]) for written in ids]


def drawn(logits: torch.Tensor, uniforms: np.ndarray) -> np.ndarray:
    """Of logits (n, V) and a number in [0, 1) for each."""
    cumulated = torch.softmax(logits.double().cpu(), -1).cumsum(-1).numpy()
    below = (cumulated <= uniforms[:, None] * cumulated[:, -1:]).sum(1)
    return np.minimum(below, logits.shape[1] - 1)
