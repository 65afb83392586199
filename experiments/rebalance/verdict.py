"""What is to be said of SAGGS, out of intervals."""

from __future__ import annotations

from .explanation import shown
from .results import Gap, RebalanceResult

_WORDS = {None: "diverged beside", 1: "worse than", -1: "better than", 0: "not told apart from"}


def verdict(result: RebalanceResult, variant: str) -> str:
    """One sentence on hard and soft SAGGS, whichever way it falls."""
    seeds = result.setting.seeds
    if seeds < 2:
        return f"SAGGS, {variant}: one seed has no interval, and decides nothing."

    def each(arm: str, *references: tuple[str, str]) -> str:
        words = []
        for how in ("hard", "soft"):
            gaps = ((result.find(variant, f"{arm}-{how}", name), of) for name, of in references)
            words.append(f"{how} is " + " and ".join(_judged(gap, of) for gap, of in gaps))
        return ", ".join(words)

    resumed = each("rescaled", ("rescaled", "going on without it"), ("control", "the control"))
    started = each("start", ("start", "going on without it"), ("base", "the plain start"))
    balanced = each("control", ("control", "no SAGGS"))
    return (
        f"SAGGS, {variant}, PPL over {seeds} seeds: after a rescaled resume {resumed}; from an "
        f"imbalanced start {started}; on a model that nobody rescaled {balanced}."
    )


def _judged(gap: Gap, of: str) -> str:
    return f"{_WORDS[gap.ppl.side]} {of} ({shown(gap.ppl, 2)})"
