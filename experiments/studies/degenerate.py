"""Two problems whose head gradients vanish where a generic problem's do not.

A step of Adam with a small eps is nearly lr sign(g). Noise of order delta = (L H)^-1/2 turns that
sign wherever the limit's |g| is below delta: in depth an interval of width delta about a simple
zero, so that x, an average over depth, moves by lr delta like everything else; of width delta^1/2
about a double zero; everywhere if g vanishes identically. Once delta is well below eps, where a
step is linear in g, these differences are gone.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch

from ipslimit import Atoms, Heads, Problem, train_particles
from ipslimit.measure.errors import root_mean_square
from ipslimit.measure.rates import fit_trend

from ..frame.fields import Positive
from ..plots import cells_of
from ..settings import DTYPES, Setting
from ..sweep import SweepResult
from .base import find_fit
from .finding import Measured
from .scaling import SymmetricSetting

# Of the tangential problem: P(1), for which P_1(s) = (s - 1/2)^2.
LAST_COSTATE = (0.25, -1.0, 2.0)
SHAPE = {"d": 3, "m": 3, "tokens": 1, "contexts": 1, "probes": 0, "law": "atoms"}


@dataclasses.dataclass(frozen=True, init=False)
class FlatSetting(SymmetricSetting):
    """Gradient of the limit identically zero, at every depth and training step.

    Atoms come in pairs (O, -O), so the mean field is zero and X(s) = X(0); every target is the mean
    of its context, which is then the prediction, so P = 0 and g = 0. Without weight decay nothing
    moves in the limit. In the particles P is of order (L H)^-1/2, of one sign in all layers.
    """

    d: int = 3
    m: int = 2
    tokens: int = 4
    contexts: int = 2
    probes: int = 0
    steps: int = 5

    OPTIONS: ClassVar[dict[str, object]] = {"atoms": 4, "lr": 0.1, "weight_decay": 0.0}

    def make_problem(self) -> Problem:
        plain = super().make_problem()
        return Problem(plain.contexts, plain.contexts.mean(-2), plain.law, plain.causal)


@dataclasses.dataclass(frozen=True, init=False)
class TangentialSetting(Setting):
    """A component of the limit's costate that touches zero, P_1(s) = (s - 1/2)^2, before step 1.

    One context of one token, so that a head is the linear map O V; V = 1 and the atoms' O are
    A + spread B and A - spread B with random B, so their mean is A, the shift e1 -> e2 -> e3 -> 0.
    Then dX/ds = A X and -dP/ds = A^T P, and P_1(s) is the polynomial of degree 2 that P(1) makes
    it: P_3 = 2, P_2 = 1 - 2 s, P_1 = (s - 1/2)^2. The target is X(1) - P(1)/2. The first row of
    the gradient of O is P_1(s) X(s)^T, where X(s) > 0. (In L layers P_1 comes down to
    about -1/(2 L), so the zero is double only while the noise is larger than that.)
    """

    d: int = 3
    m: int = 3
    tokens: int = 1
    contexts: int = 1
    probes: int = 0
    steps: int = 1
    spread: Positive = 0.1
    """Size of the entries by which atoms differ from their mean."""

    OPTIONS: ClassVar[dict[str, object]] = FlatSetting.OPTIONS

    def check(self) -> None:
        for name, value in SHAPE.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name} must be {value} in the tangential problem; got "
                    f"{getattr(self, name)!r}. Leave it out."
                )
        super().check()
        if self.option("atoms") % 2:
            raise ValueError(
                f"atoms must be even, they come in pairs; got {self.option('atoms')}. Add one."
            )

    def make_law(self) -> Atoms:
        mean, rng = _shift(), self._generators()["attention"]
        apart = torch.from_numpy(rng.standard_normal((self.option("atoms") // 2, 3, 3)))
        o = torch.cat([mean + self.spread * apart, mean - self.spread * apart])
        none, v = torch.zeros_like(o), torch.eye(3, dtype=o.dtype).expand_as(o)
        return Atoms(Heads(none, none, v, o).to(DTYPES[self.dtype]))

    def make_problem(self) -> Problem:
        context = torch.ones(3, dtype=torch.float64)
        end = torch.linalg.matrix_exp(_shift()) @ context
        target = end - torch.tensor(LAST_COSTATE, dtype=torch.float64) / 2
        law = self.make_law()
        return Problem(
            context[None, None].to(law.heads.dtype), target[None].to(law.heads.dtype), law
        )


def _shift() -> torch.Tensor:
    return torch.diag(torch.ones(2, dtype=torch.float64), -1)


# name -> (setting, power of L H that x falls like while eps is far below the noise)
DEGENERATE = {"identically zero": (FlatSetting, 0.0), "double zero": (TangentialSetting, -0.25)}


def turned_shares(
    setting: TangentialSetting, depth: int, heads: int, seeds: int, root_seed: int, device: object
) -> dict[str, list[float]]:
    """Shares of the layers whose first step is of another sign than without noise, per seed.

    Of the first two rows of O, whose gradients P_1(s) X(s)^T and P_2(s) X(s)^T have a double and a
    simple zero at s = 1/2; and what the noise delta of the seed's own costate there predicts:
    |2 (-delta)^(1/2)| of P_1 where delta < 0, none where it is not, and |delta| / 2 of P_2.
    """
    problem, rule = setting.make_problem(), setting.make_rule()
    run, whole = (
        train_particles(problem, rule, depth, count, 1, n, root_seed, (0, 1), device=device)
        for count, n in ((heads, seeds), (None, 1))
    )
    # all atoms' O have the same gradient, so it does not matter which of them a layer drew
    steps, exact = ((r.heads[1].o - r.heads[0].o)[:, :, 0].sign() for r in (run, whole))
    turned = (steps != exact).double().mean((1, 3))
    noise = (run.p[0] - whole.p[0])[:, depth // 2, 0, 0]
    least = whole.p[0][0, :, 0, 0, 0].min()  # in L layers P_1 is below zero already

    def width(lowest: torch.Tensor) -> torch.Tensor:
        return 2 * (-lowest).clamp(min=0).sqrt()

    return {
        "double": turned[:, 0].tolist(),
        "double predicted": (width(least + noise[:, 0]) - width(least)).abs().tolist(),
        "simple": turned[:, 1].tolist(),
        "simple predicted": (noise[:, 1].abs() / 2).tolist(),
    }


def compared(share: list[float], predicted: list[float]) -> dict:
    """Means over seeds of two lists, their correlation, and the first list itself."""
    spread = min(np.std(share), np.std(predicted))
    return {
        "share": float(np.mean(share)),
        "predicted": float(np.mean(predicted)),
        "correlation": float(np.corrcoef(share, predicted)[0, 1]) if spread > 0 else None,
        "seeds": share,
    }


def turned_trend(turned: list[dict], zero: str) -> Measured | None:
    """Exponent in L of the mean share of turned steps; None where no seed has any."""
    rows = [row for row in turned if row["zero"] == zero]
    theory = {"double": "-1/4", "simple": "-1/2"}[zero]
    try:
        # the trend is that of a root mean square, and a share its own root's square
        fit = fit_trend(
            [row["L"] for row in rows], [np.sqrt(row["seeds"]) for row in rows], shared_draws=False
        )
    except ValueError:
        return None
    what = f"share of layers whose first step is turned, at a {zero} zero, in L"
    return Measured(what, theory, 2 * fit.slope, (2 * fit.interval[0], 2 * fit.interval[1]))


def collapses(results: dict[tuple[str, float], SweepResult]) -> list[dict]:
    """How far x at neighbouring eps is from one curve in eps sqrt(L H), where both have it.

    x is multiplied by the power of L H that it falls like while eps is far below the noise.
    """
    rows = []
    for name, (_, power) in DEGENERATE.items():
        curves = {
            eps: scaled_curve(result, eps, power)
            for (n, eps), result in results.items()
            if n == name
        }
        ordered = sorted(curves, reverse=True)
        for eps, smaller in pairwise(ordered):
            (u, y), (v, z) = (np.log(curves[e]) for e in (eps, smaller))
            both = (v >= u[0]) & (v <= u[-1])
            if both.any():
                factor = math.exp(float(np.abs(np.interp(v[both], u, y) - z[both]).max()))
                rows.append(
                    {"problem": name, "power": power, "eps": eps, "next": smaller, "factor": factor}
                )
    return rows


def scaled_curve(result: SweepResult, eps: float, power: float) -> tuple[np.ndarray, np.ndarray]:
    """eps sqrt(L H), and x (L H)^-power, mean over the cells of one L H."""
    cells = cells_of(result.rows, last_step(result), "x")["fluctuation"]
    sizes = sorted({depth * heads for depth, heads in cells})
    values = [
        np.exp(
            np.mean(
                [
                    np.log(root_mean_square(e))
                    for (depth, h), e in cells.items()
                    if depth * h == size
                ]
            )
        )
        * size**-power
        for size in sizes
    ]
    return eps * np.sqrt(sizes), np.array(values)


def last_step(result: SweepResult) -> int:
    return max(row["step"] for row in result.rows)


def exponent(
    results: dict, name: str, eps: float, variable: str, size: str, term: str = "fluctuation"
):
    """The fit over all cells of one problem, or None where it was refused."""
    result = results[name, eps]
    return find_fit(result, last_step(result), variable, term, size)
