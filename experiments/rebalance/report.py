"""What was found, as text and as rebalance.json."""

from __future__ import annotations

import textwrap

from ..frame.window import Window
from ..intervals import SeedMean
from .arms import BY_NAME
from .checks import windows_of
from .explanation import Explanation, shown
from .results import PAPER, PAPER_PARAMETERS, Gap, RebalanceResult
from .verdict import verdict

GRAMS = ("unigram", "bigram", "trigram")
WIDE = 110


class Report:
    """A result with its explanation, windows and verdicts.

    Parameters
    ----------
    result : RebalanceResult
    source : dict
        text, its tokens, and parameters: of each variant, and of each size in the first one.
    """

    def __init__(self, result: RebalanceResult, source: dict):
        self.result, self.source = result, source
        self.explanation = Explanation(result, source["sizes"])
        variants = result.setting.variants
        self.checks = [window for variant in variants for window in windows_of(result, variant)]

    def as_dict(self) -> dict:
        """The content of rebalance.json."""
        result, variants = self.result, self.result.setting.variants
        paper = [{"arm": arm, "against": of, "ppl": gap} for (arm, of), gap in PAPER.items()]
        return {
            "paper": {"gaps": paper, "parameters": PAPER_PARAMETERS, "source": "abstract"},
            "perplexity": {variant: result.perplexities(variant) for variant in variants},
            "ngrams": dict(zip(GRAMS, result.ngrams, strict=True)),
            "beside_ngrams": {variant: self.standing(variant) for variant in variants},
            "gaps": [gap.as_dict() for gap in result.gaps],
            "explanation": self.explanation.as_dict(),
            "verdict": {variant: verdict(result, variant) for variant in variants},
            "checks": [{"variant": window.of} | window.as_dict() for window in self.checks],
            "timing": result.timings(),
        }

    def standing(self, variant: str) -> str:
        """Whether the model has learnt what counts of words know."""
        setting, ngrams = self.result.setting, self.result.ngrams
        words = []
        for where, step in (("checkpoint", setting.steps), ("end", setting.whole)):
            found = self.result.plain(variant, step).mean
            above = [name for name, ngram in zip(GRAMS, ngrams, strict=True) if found < ngram]
            beside = f"below the {above[-1]}" if above else f"not below the {GRAMS[0]}"
            words.append(f"at the {where} {beside}")
        return ", ".join(words)

    def summary(self) -> str:
        """What is printed."""
        source, variants = self.source, self.result.setting.variants
        head = (
            f"{source['text']}: {source['train_tokens']} tokens to train on, perplexity on "
            f"{source['held_out_windows']} windows of {source['held_out_tokens']} held-out tokens\n"
        )
        parts = [head, *map(self.table, variants), self.explained()]
        parts += [textwrap.fill(verdict(self.result, v), WIDE) + "\n" for v in variants]
        return "\n".join([*parts, *self.check_lines()])

    def table(self, variant: str) -> str:
        """Perplexities and gaps, the paper's figures beside those of the same runs."""
        result, setting = self.result, self.result.setting
        known = ", ".join(f"{n} {ppl:.1f}" for n, ppl in zip(GRAMS, result.ngrams, strict=True))
        marks = [
            (f"at the checkpoint, step {setting.steps}", setting.steps),
            (f"at the end, step {setting.whole}", setting.whole),
            (f"at step {setting.start_steps}", setting.start_steps),
        ]
        lines = [
            f"{variant}: {self.source['parameters'][variant] / 1e6:.2f}M parameters; perplexity of "
            "the plain run",
            *(f"  {result.plain(variant, step).text('.1f'):>24} {where}" for where, step in marks),
            f"  n-grams on the same windows: {known}",
            f"  {self.standing(variant)}",
            f"  {'':<30}{'PPL':>7} {'gap [95 %]':>25} {'in nats':>26}   paper ({PAPER_PARAMETERS})",
        ]
        for gap in result.gaps:
            if gap.variant == variant:
                lines.append(_line(gap))
        return "\n".join([*lines, ""])

    def explained(self) -> str:
        """The gap along factor, size, stage and steps."""
        found, seeds = self.explanation, len(self.result.setting.probe_seeds)
        lines = [f"{found.variant}: gap of the rescaled resume, PPL and nats, {seeds} seeds"]
        for points in found.axes.values():
            for point in points:
                gap = point.gap
                ends = f"{shown(gap.ppl, 2):>26} {shown(gap.nats, 3):>26}"
                lines.append(f"  {point.label:<34}{ends}   control {point.plain.mean:.1f}")
        for step, nats in found.since:
            label = f"training loss {step} steps after"
            lines.append(f"  {label:<34}{'':>26} {shown(nats, 3):>26}")
        return "\n".join([*lines, textwrap.fill(found.sentence(), WIDE), ""])

    def check_lines(self) -> list[str]:
        lines = []
        for window in self.checks:
            lines.append(_check_line(window))
            if not window.inside:
                lines.append(f"          so looks {window.rejects}")
        for row in self.result.timings():
            what = f"one balancing, ms (share of the time at T = {row['every']})"
            lines.append(
                f"  {row['variant']:<8}{what:<62}{row['balance_ms']:>10.2f}  "
                f"({100 * row['overhead']:.3f} %)"
            )
        return lines


def _line(gap: Gap) -> str:
    label, perplexity = BY_NAME[gap.arm].label, f"{gap.perplexity.mean:.1f}"
    if gap.against != BY_NAME[gap.arm].control:
        label, perplexity = f"  against {BY_NAME[gap.against].label}", ""
    paper = PAPER.get((gap.arm, gap.against), "")
    ends = f"{_short(gap.ppl, 2):>25} {_short(gap.nats, 3):>26}"
    missing = gap.ppl.missing
    lost = f"  ({missing} diverged)" if missing else ""
    return f"  {label:<30}{perplexity:>7} {ends}   {paper}{lost}".rstrip()


def _check_line(window: Window) -> str:
    value = "not measured" if window.measured is None else f"{window.measured:.3g}"
    verdict = "" if window.inside else "   OUTSIDE"
    return f"  {window.of:<8}{window.what:<62}{value:>10}  ({window.expected}){verdict}"


def _short(value: SeedMean, digits: int) -> str:
    """Without the note on seeds that diverged, which stands in a column of its own."""
    return shown(value, digits).partition(" (")[0]
