"""A particle run beside the limit, and the tables of how far it is from it."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch

from ipslimit import ParticleRun
from ipslimit.measure.rows import layer_depths, mean_square
from ipslimit.measure.wasserstein import Distances, head_distances, token_distances
from ipslimit.solvers import LimitRun

from ..plots import rule_name
from ..settings import Setting

PATH_COLUMNS = ["rule", "step", "variable", "context", "token", "component", "s", "model", "value"]
ERROR_COLUMNS = [
    "rule",
    "step",
    "variable",
    "r",
    "s",
    "rms",
    "rms_low",
    "rms_high",
    "bias",
    "limit_error",
    "quadrature_error",
]
DISTANCE_COLUMNS = ["rule", "step", "variable", "r", "s", "w2", "w2_low", "w2_high", "bias"]
DISTANCE_COLUMNS += ["method", "exact"]

# Pairs of points up to which Wasserstein distances are exact here, where there are many of them: a
# thousand clouds of 256 tokens take two seconds.
PAIRS = 2**16


@dataclasses.dataclass
class Comparison:
    """A particle run (some seeds), the same depth with the whole law, and the limit."""

    setting: Setting
    run: ParticleRun
    whole: ParticleRun
    limit: LimitRun

    @property
    def rule(self) -> str:
        """The rule's name, for tables and figures."""
        return rule_name(self.setting)

    def cases(self) -> list[tuple[int, str]]:
        """(step, variable) in the order shown."""
        return [(step, variable) for step in self.setting.recorded for variable in "xp"]

    def depths(self) -> torch.Tensor:
        """s = r / L of the layers."""
        return layer_depths(self.run)

    def limit_summary(self) -> dict:
        """What became of the limit, and how far it is known."""
        limit = self.limit
        return {
            "rule": self.rule,
            "status": limit.status,
            "message": limit.message,
            "error": limit.error,
            "quadrature_error": limit.quadrature_error,
            "elements": limit.grid.elements,
            "nodes": limit.nodes,
        }

    def error_rows(self) -> list[dict]:
        """Distances from the limit, layer by layer, as root mean squares over contexts and tokens.

        `rms` over seeds too, with the 5 % and 95 % quantiles of the seeds; `bias` of the whole law
        at this depth; `limit_error`, the limit's own in depth, the estimated largest of a
        component; `quadrature_error`, what the nodes of a sampled law add to that, in the norm of
        `rms`. Diverged seeds are left out.
        """
        s = self.depths()
        rows = []
        for step, variable in self.cases():
            limit = getattr(self.limit, variable)(step, s)
            values = getattr(self.run, variable)[step][~self.run.diverged]
            bias = np.sqrt(_mean_square(getattr(self.whole, variable)[step][0] - limit))
            rms, low, high = _over_seeds(_mean_square(values - limit))
            own = self.limit.error_at(variable, step, s)
            quadrature = self._quadrature(step, variable, s)
            for r in range(len(s)):
                rows.append(
                    {"rule": self.rule, "step": step, "variable": variable}
                    | {"r": r, "s": float(s[r])}
                    | {"rms": float(rms[r]), "rms_low": float(low[r]), "rms_high": float(high[r])}
                    | {"bias": float(bias[r]), "limit_error": float(own[r])}
                    | {"quadrature_error": float(quadrature[r])}
                )
        return rows

    @functools.cached_property
    def distances(self) -> list[dict]:
        """Wasserstein-2 distances of measures from the limit's, layer by layer.

        Variable "x" is of the clouds of tokens, context by context; "theta" (or that of every
        family) of the measures of heads, where these are kept: of laws with atoms. `w2` is the root
        mean square over seeds and contexts, with the 5 % and 95 % quantiles of the seeds; `bias`
        that of the whole law at this depth. Where not all are `exact` they are lower bounds.
        """
        rows = []
        for step in self.setting.recorded:
            found, bias = (
                {"x": token_distances(run, self.limit, step, largest=PAIRS)}
                | (head_distances(run, self.limit, step, largest=PAIRS) if run.units else {})
                for run in (self.run, self.whole)
            )
            for variable, distances in found.items():
                square = _mean_of_contexts(distances)
                rms, low, high = _over_seeds(square[~self.run.diverged.cpu().numpy()])
                own = np.sqrt(_mean_of_contexts(bias[variable])[0])
                for r in range(len(rms)):
                    rows.append(
                        {"rule": self.rule, "step": step, "variable": variable}
                        | {"r": r, "s": r / self.run.depth}
                        | {"w2": float(rms[r]), "w2_low": float(low[r]), "w2_high": float(high[r])}
                        | {"bias": float(own[r]), "method": " and ".join(distances.methods)}
                        | {"exact": distances.exact}
                    )
        return rows

    def distances_of(self, step: int, variable: str) -> list[dict]:
        """Those of a recorded step and a variable, layer by layer."""
        return [r for r in self.distances if (r["step"], r["variable"]) == (step, variable)]

    def _quadrature(self, step: int, variable: str, s: torch.Tensor) -> np.ndarray:
        """Root mean square over scramblings, contexts and tokens at depths s; 0 with atoms."""
        gaps = self.limit.quadrature_gaps.get((variable, step))
        if gaps is None:  # atoms, or a scrambling that diverged
            return np.full(len(s), self.limit.quadrature_error)
        at_nodes = np.sqrt(_mean_square(gaps).mean(axis=0))
        return np.interp(s, self.limit.grid.nodes, at_nodes)

    def path_rows(self) -> list[dict]:
        """Every component of every token at every layer, of the first seed and of the limit."""
        s = self.depths()
        rows = []
        for step, variable in self.cases():
            paths = {
                "particles": getattr(self.run, variable)[step][0],
                "limit": getattr(self.limit, variable)(step, s),
            }
            for model, values in paths.items():
                for (r, context, token, component), value in np.ndenumerate(values.cpu().numpy()):
                    rows.append(
                        {"rule": self.rule, "step": step, "variable": variable}
                        | {"context": context, "token": token, "component": component}
                        | {"s": float(s[r]), "model": model}
                        | {"value": float(value)}
                    )
        return rows


def _over_seeds(square: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Root mean square, and quantiles, of squared errors (seeds, layers) over seeds."""
    with np.errstate(invalid="ignore"):
        quantiles = np.quantile(square, [0.05, 0.95], axis=0)
    # errors beyond 1e154 have infinite squares, and so has what lies between two of them
    low, high = np.sqrt(np.where(np.isnan(quantiles), np.inf, quantiles))
    return np.sqrt(square.mean(axis=0)), low, high


def _mean_of_contexts(distances: Distances) -> np.ndarray:
    """Squared distances (seeds, layers)."""
    with np.errstate(over="ignore"):  # as the squares of errors are, those may be infinite
        square = np.square(distances.values)
    return np.moveaxis(square.mean(axis=-1) if square.ndim > 2 else square, 0, 1)


def _mean_square(gap: torch.Tensor) -> np.ndarray:
    return mean_square(gap.double()).cpu().numpy()
