"""What `ipslimit language` has found, as text: a summary, and a page with samples side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..intervals import over_seeds
from ..plots import rule_name
from .results import BELOW_BIGRAM, FACTORS, WITHIN, BestRate, LanguageResult, PowerLaw
from .sampling import prompts_of
from .setting import EXPONENTS


def summary(result: LanguageResult) -> str:
    """The text, the sizes, what is claimed, and what was refused."""
    parts = (_head(result), _table(result), found(result), notes(result))
    return "\n\n".join("\n".join(part) for part in parts if part)


def found(result: LanguageResult) -> list[str]:
    """What may be said: nothing of models that are not better than counting pairs."""
    if not result.claims:
        return [
            f"No claim: the limit and all models must be {BELOW_BIGRAM:g} bits below the bigram, "
            f"{result.text.bigram:.3f}; the worst of them is {-result.below_bigram:+.3f} from it. "
            "Train longer (--steps), or with another --lr."
        ]
    return [*_gap_lines(result), *_rate_lines(result), *_held_lines(result)]


def _head(result: LanguageResult) -> list[str]:
    setting, text = result.setting, result.text
    model, limit = setting.model, result.limit
    own = [f"{name} {model.option(name):g}" for name in ("lr", "eps") if model.has(name)]
    return [
        f"{text.source}: {text.counts['train']} characters to train on, {text.counts['held_out']} "
        f"held out ({len(text.held_out)} windows of {model.tokens} are measured), vocabulary "
        f"{len(text.characters)}",
        f"d={model.d}, N={model.tokens}, {model.block}, {model.stored} atoms a family, "
        f"{rule_name(model)} ({', '.join(own)}), {model.steps} steps of {model.step_contexts} "
        f"windows, {model.dtype}",
        f"bits per held-out character: unigram {text.unigram:.3f} (add-one), bigram "
        f"{text.bigram:.3f} (Witten-Bell), limit {result.final:.4f} ± {limit['error'][-1]:.1e}",
        f"limit: {limit['message']}, {limit['elements']} elements; as many evaluations of layers "
        f"as {result.limit_cost:.1f} models of L = {result.depths[-1]} with the whole law",
        f"rounding: {result.setting.model.dtype} changes the final loss of one run by "
        f"{result.rounding:.1e} bits",
    ]


def _columns(result: LanguageResult) -> list[float]:
    return [*map(float, result.heads), math.inf]


def _table(result: LanguageResult) -> list[str]:
    """Final losses and gaps, a line a depth."""
    heads = _columns(result)
    head = "".join(f"{f'H = {h:g}':>22}" for h in heads)
    lines = [f"final loss less the limit's, bits (mean over seeds ± 95 %)\n{'L':>6}{head}"]
    for depth in result.depths:
        shown = "".join(f"{_gap(result, depth, h):>22}" for h in heads)
        lines.append(f"{depth:>6}{shown}")
    return lines


def _gap(result: LanguageResult, depth: int, heads: float) -> str:
    mean = over_seeds(result.gaps(depth, heads))
    if not math.isfinite(mean.mean):
        return "diverged"
    half = "" if mean.low is None else f" ± {(mean.high - mean.low) / 2:.4f}"
    return f"{mean.mean:+.4f}{half}"


def _gap_lines(result: LanguageResult) -> list[str]:
    """Of models that are good enough."""
    deepest, most = result.depths[-1], float(result.heads[-1])
    loss = float(result.bits[deepest, most][:, -1].mean())
    lines = [
        f"At L = {deepest}, H = {most:g} the held-out loss is {loss:.3f} bits, in the limit "
        f"{result.final:.3f}: {result.below_bigram:.2f} below the bigram or more, at every size."
    ]
    parts = [
        f"H = {heads:g}: L^{exponent(fit)}" for heads, fit in result.fits.items() if fit is not None
    ]
    if parts:
        lines.append(f"Gap of the final loss to the limit's: {'; '.join(parts)}.")
    if result.in_product is not None:
        lines.append(
            f"Gap to the whole law of the same depth: (L H)^{exponent(result.in_product)}."
        )
    return lines


def exponent(fit: PowerLaw) -> str:
    """With its interval."""
    low, high = fit.interval
    return f"{fit.slope:.2f} [{low:.2f}, {high:.2f}]".replace("-", "\N{MINUS SIGN}")


def _rate_lines(result: LanguageResult) -> list[str]:
    depths = sorted(result.setting.rates.rate_depths)
    spans = {e: result.rate_span(e) for e in EXPONENTS}
    shown = [
        f"{span:.2g} with the residual factor {FACTORS[e]}{_open(result, e)}"
        for e, span in spans.items()
        if span is not None
    ]
    if not shown:
        return []
    grid = f"tried {result.setting.rates.ratio:g} times apart, least point of a parabola"
    return [
        f"From L = {depths[0]} to {depths[-1]} the best learning rate of the layers changes by a "
        f"factor of {', '.join(shown)} ({grid})."
    ]


def _held_lines(result: LanguageResult) -> list[str]:
    """How far the model is from what people train."""
    own, plain = result.own, result.plain
    if not (math.isfinite(own.bits) and math.isfinite(plain.bits)):
        return []
    ends = [name for name, held in (("own", own), ("plain", plain)) if held.at_end]
    told = f" ({' and '.join(ends)}: an end of those tried)" if ends else ""
    return [
        f"A plain Transformer (residual factor 1, trained norms, standard initialisation) of "
        f"{plain.depth} layers and {plain.parameters} parameters reaches {plain.bits:.3f} bits on "
        f"the same batches, the whole law at L = {own.depth} with {own.parameters} reaches "
        f"{own.bits:.3f}: {plain.bits - own.bits:+.3f}, at its best learning rate each, "
        f"{plain.lr:g} and {own.lr:g}{told}, one seed."
    ]


def _open(result: LanguageResult, exponent: float) -> str:
    ends = [best for best in result.rates if best.exponent == exponent]
    at_end = any(best.at_end for best in (ends[0], ends[-1]))
    return " (one of them at an end of those tried)" if at_end else ""


def notes(result: LanguageResult) -> list[str]:
    """Refused fits, diverged runs, and what the rule has to say."""
    lines = [f"note: {reason}" for reason in result.refused]
    for cell, content in result.found.items():
        name = f"L = {cell.depth}, H = {cell.heads or 'inf'}"
        if cell.kind == "size" and content["diverged"]:
            lines.append(f"note: {name}: {content['diverged']} of {len(content['bits'])} diverged")
        lines += [f"note: {name}: {text}" for text in content.get("notes", ())]
    return lines


# ---------------------------------------------------------------------- the page


def page(result: LanguageResult, name: str) -> str:
    """As Markdown: what was found, its figure, tables, and what models write."""
    parts = [
        f"# A language model and its limit\n\n{' '.join(found(result))}",
        f"![]({name}.png)",
        "\n".join(f"- {line}" for line in (*_head(result), *notes(result))),
        _size_table(result),
        _rate_table(result),
        _samples(result),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _size_table(result: LanguageResult) -> str:
    rows = []
    for depth in result.depths:
        for heads in _columns(result):
            losses = over_seeds(result.bits[depth, heads][:, -1])
            steps = ["never" if k is None else f"{k}" for k in result.horizon(depth, heads)]
            own = [f"{depth}", f"{heads:g}", losses.text(".4f"), _gap(result, depth, heads)]
            rows.append([*own, ", ".join(steps)])
    within = f"steps within {100 * WITHIN:g} % of the limit"
    table = _markdown(["L", "H", "final loss [95 %]", "less the limit's", within], rows)
    return f"## Sizes\n\nBits per held-out character; steps of each seed.\n\n{table}"


def _rate_table(result: LanguageResult) -> str:
    lrs = result.setting.rates.rates(result.setting.model.option("lr"))
    rows = []
    for best in result.rates:
        losses = result.rate_losses(best.exponent, best.depth)
        shown = [f"{loss:.3f}" if math.isfinite(loss) else "diverged" for loss in losses]
        rows.append([FACTORS[best.exponent], f"{best.depth}", *shown, best_rate(best)])
    columns = ["residual factor", "L", *(f"lr {lr:g}" for lr in lrs), "best lr"]
    rates = result.setting.rates
    return (
        f"## Learning rates\n\nBits per held-out character after {rates.rate_steps} steps, "
        f"H = {rates.rate_heads}, one seed, by the learning rate of the layers: embedding, "
        "positions and readout keep theirs. The best is the least point of a parabola in log lr "
        "through the best one tried and its neighbours, which are in brackets.\n\n"
        f"{_markdown(columns, rows)}"
    )


def best_rate(best: BestRate) -> str:
    """With the neighbours between which it lies."""
    if best.lr is None:
        return "diverged"
    if best.at_end:
        return f"{best.lr:.3g} ({best.at_end} tried)"
    return f"{best.lr:.3g} [{best.low:.3g}, {best.high:.3g}]"


def _samples(result: LanguageResult) -> str:
    """The limit and models with the most heads, the same prompt under each other."""
    limit = result.limit["samples"]
    if not limit:
        return ""
    text, most = result.text, float(result.heads[-1])
    prompts = prompts_of(text, result.setting.model.tokens)
    written = {"L = H = ∞": limit}
    for cell, content in reversed(result.found.items()):
        if cell.kind == "size" and cell.heads == most and content["samples"]:
            written[f"L = {cell.depth}, H = {cell.heads}"] = content["samples"]
    width = max(map(len, written))
    parts = [
        "## Samples\n\nDrawn with the same uniform numbers, so that models of the same "
        "probabilities write the same; `|` is where each leaves the limit's text. ⏎ ends a line."
    ]
    for i, prompt in enumerate(prompts):
        lines = [f"prompt: {_shown(text.characters.decode(prompt))}", ""]
        for name, samples in written.items():
            lines.append(f"{name:<{width}}  {_shown(_marked(samples[i], limit[i]))}")
        parts.append("```text\n" + "\n".join(lines) + "\n```")
    return "\n\n".join(parts)


def agreement(one: str, other: str) -> int:
    """Characters up to the first that differs."""
    different = np.array([a != b for a, b in zip(one, other, strict=True)], dtype=bool)
    return int(different.argmax()) if different.any() else len(one)


def _marked(sample: str, limit: str) -> str:
    count = agreement(sample, limit)
    return sample if count == len(sample) else f"{sample[:count]}|{sample[count:]}"


def _shown(text: str) -> str:
    """On one line, and with nothing that would end a block of Markdown."""
    shown = "".join(c if c.isprintable() else "\N{WHITE SQUARE}" for c in text.replace("\n", "⏎"))
    return shown.replace("```", "'''")
