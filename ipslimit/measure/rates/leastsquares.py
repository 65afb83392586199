"""The one estimator behind every fit over seeds.

Log errors are y = f(parameters) + corrections to scaling + noise. A correction is a column of the
design with an amplitude k whose size is known beforehand only: k ~ N(0, allowance^2). Least
squares with the penalty (k / allowance)^2 then does what a window does, without its edge: where
seeds are few the correction is left at zero and small sizes count fully, where seeds are many it
is fitted and small sizes fade. Either way the allowance enters the variance (systematic part).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .noise import Noise
from .quantiles import student

# How large corrections to log e are, in (L H)^-1/2, 1/L and 1/L^2: standard deviations, as wide as
# on real problems. After 20 steps at H = 4 the second is -1.5 for x and -2.5 for p; the third, the
# square of the second, is what sqrt(L/(L + c)) = exp(-c/(2 L) + c^2/(4 L^2) - ..) has beside it,
# without which such a factor reads as a slower law.
CORRECTIONS = (1.0, 3.0, 9.0)
# A fitted correction larger than this many expected standard deviations is reported.
SURPRISE = 2.5
BEYOND = "departs from a power law by more than the allowance for small sizes"


class Refused(Exception):
    """A fit that was asked for and cannot be had; the text says why."""


def corrections(L: np.ndarray, H: np.ndarray, of: str) -> np.ndarray:
    """Columns of the corrections to scaling of log e, of a random term e, in L or in H.

    (L H)^-1/2, 1/L and 1/L^2 times `CORRECTIONS`, so that amplitudes have standard deviation 1. At
    fixed L only the first changes with H.
    """
    columns = np.column_stack([(L * H) ** -0.5, 1 / L, L**-2.0]) * CORRECTIONS
    return columns[:, :1] if of == "H" else columns


@dataclass(frozen=True)
class Estimate:
    """Variances of the parameters: from the seeds, from the model, and what size tells of both."""

    map: np.ndarray  # change of the parameters per change of each log error
    stat: np.ndarray
    syst: np.ndarray
    degrees: np.ndarray
    left: np.ndarray  # variance left of each parameter, were the weights the true noise
    allowance: np.ndarray

    def surprising(self, parameters: np.ndarray) -> bool:
        """Whether a fitted correction is larger than its allowance lets one expect."""
        known = np.isfinite(self.allowance)
        expected = np.sqrt(np.maximum(self.allowance[known] ** 2 - self.left[known], 0.0))
        return bool(np.any(np.abs(parameters[known]) > SURPRISE * expected))

    def half_width(self, j: int, level: float) -> float:
        """Half the interval of parameter j: a t quantile times the whole standard error."""
        total = self.stat[j] + self.syst[j]
        # The systematic part is not estimated from seeds, so it costs no degrees of freedom.
        degrees = self.degrees[j] * (total / self.stat[j]) ** 2 if self.stat[j] > 0 else np.inf
        return float(student(0.5 + level / 2, degrees) * np.sqrt(total))


def estimate(
    design: np.ndarray,
    residual: np.ndarray,
    noise: Noise,
    weight_variance: np.ndarray,
    allowance: np.ndarray,
    groupings: Sequence[np.ndarray],
) -> Estimate:
    """Variances of a penalised least-squares fit at its solution.

    Parameters
    ----------
    design : (cells, parameters) array
        Derivatives of the model's log error, corrections included.
    residual : (cells,) array
        Log errors minus the model without its corrections.
    noise : Noise
        Covariance of the log errors over seeds.
    weight_variance : (cells,) array
        Variances that the weights are made of.
    allowance : (parameters,) array
        Standard deviation known beforehand; inf for free parameters.
    groupings : list of (cells,) arrays
        Sizes to leave out one at a time (one array for L, one for H).

    Returns
    -------
    Estimate
        `syst` is the allowance's part plus, per grouping, the excess of the leave-one-size-out
        jackknife variance over what noise and allowance explain (never below zero): noise is
        counted once.

    Raises
    ------
    Refused
        If the normal equations are singular.
    """
    weight = 1.0 / weight_variance
    penalty = np.diag(1.0 / allowance**2)
    inverse, mapping = _solve(design, weight, penalty)
    # shared draws may cancel to below zero by rounding
    stat = np.maximum(np.einsum("pi,ij,pj->p", mapping, noise.covariance, mapping), 0.0)
    syst = np.diag(inverse @ penalty @ inverse).copy()
    known = np.isfinite(allowance)
    spread = design[:, known] * allowance[known]
    explained = noise.covariance + spread @ spread.T
    # Corrections stay as fitted: without one of few sizes they could be anything.
    corrected = np.eye(len(weight)) - design[:, known] @ mapping[known]
    free = np.flatnonzero(~known)
    for sizes in groupings:
        values = np.unique(sizes)
        excess = np.zeros(len(free))
        for value in values:
            keep = np.where(sizes == value, 0.0, weight)
            part = _solve(design[:, free], keep, penalty[np.ix_(free, free)])[1]
            shift = part @ corrected - mapping[free]
            excess += (shift @ residual) ** 2
            excess -= np.einsum("pi,ij,pj->p", shift, explained, shift)
        syst[free] += np.maximum(0.0, excess) * (len(values) - 1) / len(values)
    degrees = np.array(
        [noise.degrees(row) if s > 0 else 1.0 for row, s in zip(mapping, stat, strict=True)]
    )
    return Estimate(mapping, stat, syst, degrees, np.diag(inverse), allowance)


def _solve(
    design: np.ndarray, weight: np.ndarray, penalty: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    normal = design.T @ (weight[:, None] * design) + penalty
    scale = 1.0 / np.sqrt(np.maximum(np.diag(normal), 1e-300))
    scaled = normal * scale[:, None] * scale
    if np.linalg.cond(scaled) > 1e12:
        raise Refused("the sizes do not determine all parameters; add sizes")
    inverse = np.linalg.inv(scaled) * scale[:, None] * scale
    return inverse, inverse @ (design.T * weight)
