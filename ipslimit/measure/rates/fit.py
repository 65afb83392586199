"""From a table of errors to all its rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

from ...checks import require_choice
from ...frames import frame_of
from .cells import Floor
from .choices import BOOTSTRAP, CORRECTION, Choices, choices, reference_errors
from .joint import POWERS, JointFit, fit_joint
from .leastsquares import Refused
from .share import Share, find_share, rules
from .single import RateFit, estimated_offset, fit_range, fit_seeds
from .table import Cell, Table, plain, read_table

if TYPE_CHECKING:
    from pandas import DataFrame

KEYS = ("step", "variable", "norm", "set")


@dataclass(frozen=True)
class RateFits:
    """All fits of a table.

    Attributes
    ----------
    fits : list of RateFit
    joint : list of JointFit
    shares : list of Share
        One for each fit of a fluctuation: what its exponent allows beside -1/2, and a verdict.
    refused : list of dict
        What was asked and cannot be had: step, variable, term, norm, set, in, at, and the reason.
    settings : dict
        The rules behind the intervals, all fixed before the data are seen.
    """

    fits: list
    joint: list
    shares: list
    refused: list
    settings: dict

    def select(self, **criteria: object) -> list[RateFit]:
        """The `RateFit`s whose attributes equal the criteria, as in select(step=0, size="L").

        Raises
        ------
        TypeError
            If a criterion is no attribute of a `RateFit`.
        """
        for name in criteria:
            if name not in RateFit.__dataclass_fields__:
                raise TypeError(
                    f"select takes attributes of RateFit; got {name!r}. Use step, "
                    "variable, term, norm, set, size or at."
                )
        if isinstance(criteria.get("at"), Real):
            criteria["at"] = plain(criteria["at"])
        return [f for f in self.fits if all(getattr(f, k) == v for k, v in criteria.items())]

    def share(self, fit: RateFit) -> Share | None:
        """The `Share` that belongs to a `RateFit`; None unless it is one of a fluctuation."""
        names = ("step", "variable", "norm", "set", "size", "at")
        key = [getattr(fit, name) for name in names]
        found = (s for s in self.shares if [getattr(s, name) for name in names] == key)
        return next(found, None) if fit.term == "fluctuation" else None

    def as_dict(self) -> dict:
        """Plain types for JSON, under "fits", "joint", "shares", "refused" and "settings"."""
        return {
            "fits": [f.as_dict() for f in self.fits],
            "joint": [f.as_dict() for f in self.joint],
            "shares": [s.as_dict() for s in self.shares],
            "refused": [dict(r) for r in self.refused],
            "settings": self.settings,
        }

    def to_frame(self, what: str = "fits") -> DataFrame:
        """The fits as a tidy pandas DataFrame, whose `to_latex` and `to_csv` write a table.

        Parameters
        ----------
        what : "fits", "joint" or "refused"

        Returns
        -------
        DataFrame
            Of fits one row an exponent, with the attributes of `RateFit` (exponents have no unit,
            constants that of the errors) under their names, but for in (the size that varies),
            low and high (the ends of the interval), smallest and largest (of the sizes used), and
            verdict, what a fluctuation's `Share` says of -1/2. Of joint fits one row a model, with
            a, a_low, a_high, and so on. Of those that were refused, why.

        Raises
        ------
        ValueError
            For anything else.
        ModuleNotFoundError
            Without pandas: pip install "ipslimit[frames]".
        """
        require_choice("what", what, ("fits", "joint", "refused"))
        if what == "refused":
            rows, names = [dict(row) for row in self.refused], (*KEYS[:2], "term", *KEYS[2:])
            names += ("in", "at", "reason")
        elif what == "joint":
            rows, names = [fit.as_row() for fit in self.joint], JointFit.columns()
        else:
            rows = [fit.as_row() | {"verdict": _verdict(self.share(fit))} for fit in self.fits]
            names = (*RateFit.columns(), "verdict")
        return frame_of({name: [row[name] for row in rows] for name in names})

    def __str__(self) -> str:
        head = ("step", "", "term", "norm", "set", "in", "at", "exponent", "")
        rows = [
            (
                f.step,
                f.variable,
                f.term,
                f.norm,
                f.set,
                f.size,
                "all" if f.at == "all" else f"{'H' if f.size == 'L' else 'L'}={f.at}",
                f,
                f.note,
            )
            for f in self.fits
        ]
        rows = [tuple(map(str, row)) for row in [head, *rows]]
        # Numbers to the right; exponents carry their sizes behind them and so go to the left.
        width = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [
            "  ".join(
                text.ljust(width[i]) if i in (1, 2, 7, 8) else text.rjust(width[i])
                for i, text in enumerate(row)
            ).rstrip()
            for row in rows
        ]
        formula = {"sum": "a/L + b L^-g H^-h", "quadrature": "|(a/L, b L^-g H^-h)|"}
        for f in self.joint:
            note = f" ({f.note})" if f.note else ""
            lines.append(
                f"step {f.step} {f.variable} total {f.norm} {f.set} ~ {formula[f.model]}: {f}{note}"
            )
        for s in self.shares:
            lines.append(
                f"step {s.step} {s.variable} fluctuation {s.norm} {s.set} in {s.size} at {s.at}: "
                f"{s}"
            )
        for r in self.refused:
            lines.append(
                f"step {r['step']} {r['variable']} {r['term']} {r['norm']} {r['set']} "
                f"in {r['in']} at {r['at']}: no fit, {r['reason']}"
            )
        return "\n".join(lines)


def _verdict(share: Share | None) -> str:
    return "" if share is None else share.verdict


def fit_rates(
    table: Table,
    *,
    reference_error: float | Mapping | None = None,
    window: Mapping[str, Sequence[float]] | None = None,
    correction: float = CORRECTION,
    bootstrap: int = BOOTSTRAP,
    level: float = 0.95,
    seed: int = 0,
    shared_draws: bool = False,
) -> RateFits:
    """Exponents of the errors in L and in H, with intervals.

    For each step, variable, norm and set: the bias in L; fluctuation and total in L at each H and
    in H at each L; the fluctuation in L and in H over all cells, with one constant per other
    size; the total over all cells as a/L + b L^-g H^-h, added plainly and in quadrature. The
    error of a cell is sqrt(mean over seeds of error^2). Exponents of the total are apparent ones,
    since it is no power law where bias and fluctuation are of one size.

    Parameters
    ----------
    table : list of mappings, or mapping of columns (a DataFrame too)
        Columns step, variable ("x", "p", "theta"), term ("bias", "fluctuation", "total"; rows of
        other terms are ignored), norm ("rms", "sup"), set ("train", "probe"), L, H, seed, error.
        One row per seed. Bias rows have H = inf and one row per L; random terms at H = inf are
        ignored. A non-finite error is a diverged run: left out and counted. Rows of term
        "quadrature" (L = H = inf, one per scrambling, see `ipslimit.errors.quadrature_table`) say
        how well the nodes of a sampled law stand for it, see Notes.
    reference_error : float, or mapping from variable or (step, variable) to float
        The limit solution's own error, in the units of the errors (0.0 if it is exact); instead of
        a float also a mapping from every L to one, where it is known better at some depths than at
        others. Bias and total cells below 10 times it are left out, and it widens their intervals;
        the fluctuation, a difference of two particle runs, does not contain it. By default it is
        unknown, and estimated from the bias, see Notes.
    window : mapping, optional
        Smallest and largest size used, {"L": (8, 256), "H": (1, 4096)}; by default all sizes.
    correction : float
        Allowance for corrections to scaling of random terms, in units of the usual one, see Notes.
    bootstrap : int
        Resamplings of the seeds.
    level : float
        Probability that an interval is to hold the truth.
    seed : int
        Of the resampling; no global random state is read or changed.
    shared_draws : bool
        Whether a seed index means the same draws in every cell, so that seeds are resampled
        jointly over sizes; by default the cells are independent.

    Returns
    -------
    RateFits

    Raises
    ------
    TypeError, ValueError
        For a table or an argument that breaks the rules above. A fit that the data do not allow
        is no error, but listed in `RateFits.refused`.

    Notes
    -----
    *Random terms.* log e = constant + g log s + noise + k1 (L H)^-1/2 + k2/L + k3/L^2, s = L or H
    (in H the last two are part of the constants). The k's are normal with standard deviations
    1, 3 and 9 times `correction`, as large as they are on real problems, see `leastsquares`. This
    takes the place of a window: the more seeds, the less the small sizes count. The standard
    error adds in squares the noise from resampled seeds, the allowance, and the excess of the
    leave-one-size-out jackknife over both; the quantile is Student's with degrees of freedom for
    skew (chi-square-like) squared errors. Corrections beyond the allowance are noted in the fit.
    In simulations with 8 to 64 seeds and 5 or 6 sizes the 95 % intervals hold the truth in 94 to
    97 % of cases where corrections are drawn from that law, in 96 to 99 % for others of the size
    seen or none, at 1.0 to 1.1 times the width of an oracle that knows the noise and that law
    (tests/test_rates_coverage.py).

    *Shares.* Every exponent of the fluctuation comes with a verdict on -1/2, and in L with a bound
    on the part that falls more slowly, see `ipslimit.rates.Share`.

    *Quadrature.* With a sampled law the fluctuation is measured from the whole law's nodes, whose
    error delta (root mean square over scramblings) is independent of the draws:
    e^2 = fluctuation^2 + delta^2 - 2 <mean of the draws, delta>. Fluctuation cells below 3 delta
    are left out; the others widen the interval by what delta could have done to their log errors,
    (delta/e)^2/2 + (delta/e)/sqrt(seeds), in the least favourable combination of signs. In the
    total delta counts as the limit's error does. The bias is a difference of two solutions on the
    same nodes: delta moves its constant, not its exponent, and is left out of its range.

    *Bias.* Nothing is random, so the interval is called a fit range: the fit with a free k/L,
    plus or minus its largest shift to the plain fit or without one size. Where the limit's own
    error is not given, the shift to a fit with a constant offset is added to the range, and the
    offset found counts as the limit's error in the total (0 where there is no bias to find it in).
    In simulations with 5 to 7 sizes this range holds -1 in 95 to 100 % of cases for offsets up to
    30 % of the smallest bias; a range that takes the limit as exact, in 36 to 88 % from 3 % on.
    """
    chosen = choices(window, correction, bootstrap, level, seed, shared_draws)
    groups = read_table(table)
    reference = reference_errors(reference_error, groups)
    fits, joint, shares, refused = [], [], [], []
    for group, terms in groups.items():
        about = dict(zip(KEYS, group, strict=True))
        floors = pop_floors(terms, reference[group[:2]])
        for term, cells in terms.items():
            cells = [c for c in cells if _inside(c, chosen.window)]
            for size, at, part, fit in _tasks(term, cells, chosen, floors[term]):
                named = {**about, "term": term, "size": size, "at": at}
                try:
                    fits.append(RateFit(**named, **fit(part)))
                except Refused as why:
                    refused.append(_refusal(named, why))
                    continue
                if term == "fluctuation":
                    start = _proved(groups, group)
                    found = find_share(part, size, group[1], start, chosen, floors[term])
                    shares.append(Share(**_without(named, "term"), **found))
            if term == "total":
                joint += _both_models(about, cells, chosen, floors[term], refused)
    return RateFits(fits, joint, shares, refused, chosen.as_dict(rules()))


def pop_floors(terms: dict[str, list[Cell]], reference: float | dict | None) -> dict[str, Floor]:
    """term -> Floor, from the limit's own error or None and the quadrature rows, taken out."""
    unknown = reference is None
    own = Floor(estimated_offset(terms.get("bias", ())) if unknown else reference)
    scrambled = [c for c in terms.pop("quadrature", ()) if c.errors.any()]
    quadrature = max((math.exp(c.log_error) for c in scrambled), default=0.0)
    return {
        "bias": Floor(unknown=True) if unknown else own,
        "fluctuation": Floor(0.0, quadrature),
        "total": own.plus(quadrature),  # of the bias too, which the draws do not average
    }


def _tasks(term: str, cells: Sequence[Cell], chosen: Choices, floor: Floor) -> Iterator[tuple]:
    """(size that varies, fixed size, cells, fit) of every single exponent of a term."""
    if term == "bias":
        yield "L", "inf", cells, lambda part: fit_range(part, chosen, floor)
        return
    for of, other, at, part in random_parts(term, cells):
        yield of, at, part, lambda p, of=of, other=other: fit_seeds(p, of, other, chosen, floor)


def random_parts(
    term: str, cells: Sequence[Cell]
) -> Iterator[tuple[str, str | None, float | str, list[Cell]]]:
    """Every exponent over seeds: (size that varies, size with constants or None, at, cells)."""
    for of, other in (("L", "H"), ("H", "L")):
        for value in sorted({getattr(c, other) for c in cells}):
            yield of, None, plain(value), [c for c in cells if getattr(c, other) == value]
        if term == "fluctuation":
            yield of, other, "all", cells


def _both_models(
    about: dict, cells: Sequence[Cell], chosen: Choices, floor: Floor, refused: list[dict]
) -> list[JointFit]:
    found = []
    for model in POWERS:
        try:
            found.append(fit_joint(cells, model, chosen, floor))
        except Refused as why:
            refused.append(_refusal({**about, "term": "total", "size": "joint", "at": model}, why))
    least = min((f["residual"] for f in found), default=None)
    return [JointFit(**about, **f, better=f["residual"] == least) for f in found]


def _proved(groups: dict, group: tuple) -> dict[tuple[float, float], Cell]:
    """Step 0 of a group by (L, H), where its fluctuation has exponents -1/2 [C]."""
    step, variable, *rest = group
    if step == 0 or variable not in ("x", "p"):
        return {}
    return {(c.L, c.H): c for c in groups.get((0, variable, *rest), {}).get("fluctuation", ())}


def _refusal(named: dict, why: Exception) -> dict:
    return _without({**named, "in": named["size"], "reason": str(why)}, "size")


def _without(named: dict, name: str) -> dict:
    return {key: value for key, value in named.items() if key != name}


def _inside(cell: Cell, window: dict) -> bool:
    # The whole law (bias, H = inf) lies beyond every window in H.
    sizes = {"L": cell.L} if math.isinf(cell.H) else {"L": cell.L, "H": cell.H}
    return all(window[of][0] <= value <= window[of][1] for of, value in sizes.items())
