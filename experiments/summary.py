"""A sweep's findings as text a person can read."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from ipslimit.measure.errors import root_mean_square
from ipslimit.measure.rates.choices import QUADRATURE_FLOOR
from ipslimit.measure.rates.joint import POWERS
from ipslimit.measure.rates.share import percent

from .sweep import SweepResult

# Of a refusal that lies in the sizes alone, and where it concerns all of them.
TOO_FEW = r"\d+ size\(s\) in [LH], \d+ or more are needed"
OVER_ALL = ("all", "inf", *POWERS)


def summary(result: SweepResult, *, everything: bool = False) -> str:
    """The headline fits (rms, training contexts), the constants, and what went wrong, as text.

    `everything` adds all fits in both norms, on both sets, at every fixed size.
    """
    limit, runs = result.limit, result.runs
    lines = [f"limit: {limit['message']}", f"limit: {limit['elements']} depth elements"]
    lines += [f"limit: {note}" for note in limit.get("notes", ())]
    lines += _quadrature(limit)
    lines.append(f"runs: {runs['total']} in all, {runs['diverged']} diverged")
    lines += ["", *_headline(result)]
    if shares := _shares(result):
        lines += ["", *shares]
    if joint := _joint(result):
        lines += ["", *joint]
    if result.constant:
        lines += ["", *_constants(result)]
    theory = result.against_theory()
    if theory:
        lines += ["", "At initialisation, where the exponents are proved:"]
        for row in theory:
            if row["norm"] == "rms" and row["set"] == "train":
                fit = _find(result, row)
                lines.append(
                    f"  {row['variable']} {row['term']} in {row['in']}: "
                    f"theory {row['theory']:+.2f}, measured {fit}: {fit.verdict(row['theory'])}"
                )
    if everything:
        lines += ["", str(result.fits)]
    elif missing := missing_fits(result.fits.refused):
        lines += ["", *missing]
    return "\n".join(lines)


def _quadrature(limit: dict) -> list[str]:
    """What the nodes of a sampled law put under the fluctuations, in the norm of the headline."""
    if not limit["quadrature_error"]:
        return []
    lines = [
        f"limit: quadrature error over heads {limit['quadrature_error']:.1e} (largest "
        f"component) with {limit['nodes']} nodes"
    ]
    errors = defaultdict(list)
    for row in limit["quadrature"]:
        if (row["norm"], row["set"]) == ("rms", "train"):
            errors[row["step"], row["variable"]].append(row["error"])
    floors = [
        f"step {step} {variable} {QUADRATURE_FLOOR * root_mean_square(found):.1e}"
        for (step, variable), found in sorted(errors.items())
        if any(found)  # a symmetric law's may be exact
    ]
    if floors:  # none where a scrambling diverged
        lines.append(
            f"fits leave out fluctuations below {QUADRATURE_FLOOR:g} times the quadrature error in "
            f"their norm (rms, training contexts), {', '.join(floors)}: raise --nodes"
        )
    return lines


def missing_fits(refused: Sequence[dict]) -> list[str]:
    """How many exponents are missing that were to be had, by reason; nothing where none is.

    To be had are not those at one other size of which the sizes asked for hold too few, nor those
    of parameters before the first step, which have no error then. How many sizes or cells it was is
    no reason of its own.
    """
    reasons: Counter[str] = Counter()
    for refusal in refused:
        few = re.fullmatch(TOO_FEW, refusal["reason"]) and refusal["at"] not in OVER_ALL
        if few or (refusal["step"] == 0 and refusal["variable"].startswith("theta")):
            continue
        reason = re.sub(r"^\d+ size\(s\) in [LH]", "too few sizes", refusal["reason"])
        reasons[re.sub(r"\b\d+ (cell\(s\)|diverged runs?)", r"some \1", reason)] += 1
    if not reasons:
        return []
    number = reasons.total()
    head = f"{number} exponent{'s' * (number > 1)} could not be had (rates.json names each):"
    return [head] + [f"  {count}: {reason}" for reason, count in reasons.most_common()]


def _headline(result: SweepResult) -> list[str]:
    fits = [f for f in result.fits.select(norm="rms", set="train") if f.at in ("all", "inf")]
    width = max([8, *(len(fit.variable) for fit in fits)])
    head = f"step  {'variable':<{width}}  term         in  exponent [95 % interval]"
    lines = [f"{head}  (rms, training contexts)"]
    for fit in fits:
        note = f"  ({fit.note})" if fit.note else ""
        name = fit.variable.ljust(width)
        lines.append(f"{fit.step:>4}  {name}  {fit.term:<11}  {fit.size:<2}  {fit}{note}")
    return lines if len(lines) > 1 else [*lines, "      no exponent could be fitted"]


def _shares(result: SweepResult) -> list[str]:
    """A line for each exponent of the fluctuation in L: what it allows beside -1/2."""
    wanted = {"norm": "rms", "set": "train", "term": "fluctuation", "size": "L", "at": "all"}
    shares = [s for f in result.fits.select(**wanted) if (s := result.fits.share(f)) is not None]
    width, lines = max([5, *(len(share.variable) for share in shares)]), []
    for share in shares:
        if not share.upper:
            lines.append(f"  step {share.step} {share.variable}: {share.verdict} ({share.note})")
            continue
        bounds = " ".join(
            f"{percent(upper)} ({percent(expected)})".rjust(13)
            for upper, expected in zip(share.upper, share.expected, strict=True)
        )
        sizes = "/".join(f"{size:.0f}" for size in share.sizes)
        name, paired = share.variable.ljust(width), ", paired" if share.paired else ""
        lines.append(
            f"  step {share.step} {name} {share.rival} at L={sizes}: {bounds}  bend "
            f"{share.bend:+.1f} sd{paired}: {share.verdict}"
        )
    head = (
        "How much of the fluctuation's variance may fall more slowly than L^-1/2: 95 % bounds "
        "(expected if none does)"
    )
    return [head, *lines] if lines else []


def _joint(result: SweepResult) -> list[str]:
    chosen = [
        fit
        for fit in result.fits.joint
        if fit.norm == "rms" and fit.set == "train" and fit.variable in ("x", "p")
    ]
    formula = {"sum": "a/L + b L^-g H^-h", "quadrature": "|(a/L, b L^-g H^-h)|"}
    return [f"step {f.step} {f.variable} total = {formula[f.model]}: {f}" for f in chosen]


def _constants(result: SweepResult) -> list[str]:
    """One table of measured / predicted a step and variable: depths down, heads across."""
    lines = ["measured / predicted constant of the fluctuation [95 % interval] (training contexts)"]
    rows = [row for row in result.constant if row["set"] == "train"]
    for step, variable in sorted({(r["step"], r["variable"]) for r in rows}, key=str):
        chosen = {
            (r["L"], r["H"]): r for r in rows if (r["step"], r["variable"]) == (step, variable)
        }
        heads = sorted({h for _, h in chosen})
        lines.append(
            f"step {step} {variable}".ljust(12) + "".join(f"H={h:g}".rjust(19) for h in heads)
        )
        for depth in sorted({depth for depth, _ in chosen}):
            cells = (_ratio(chosen.get((depth, h))) for h in heads)
            lines.append(f"L={depth}".rjust(12) + "".join(cell.rjust(19) for cell in cells))
    return [*lines, *_trends(result), *result.not_linear()]


def _trends(result: SweepResult) -> list[str]:
    rows = [row for row in result.trends if row["set"] == "train"]
    if not rows:
        return []
    power, slope = ("H^-1/2", "+1/2") if result.tied else ("(L H)^-1/2", "0")
    lines = [
        f"sqrt(L H) x predicted fluctuation goes like L^g; of {power} g = {slope} [95 % interval]"
    ]
    for row in rows:
        note = f" ({row['note']})" if row["note"] else ""
        low, high = row["ci95"]
        lines.append(
            f"step {row['step']} {row['variable']}".ljust(12)
            + f"g = {row['slope']:+.2f} [{low:+.2f}, {high:+.2f}]{note}"
        )
    return lines


def _ratio(row: dict | None) -> str:
    if row is None:
        return "-"
    if row["ci95"] is None:
        return f"{row['ratio']:.2f}"
    return f"{row['ratio']:.2f} [{row['ci95'][0]:.2f}, {row['ci95'][1]:.2f}]"


def _find(result: SweepResult, row: dict):
    names = ("step", "variable", "term", "norm", "set", "at")
    (fit,) = result.fits.select(size=row["in"], **{name: row[name] for name in names})
    return fit
