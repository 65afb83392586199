"""Densities of the entries of a unit's matrices, by their quantiles: what sampled laws share.

Each goes before `laws.SampledLaw` among the bases of a law, whose fields it reads.
"""

from __future__ import annotations

import math

import numpy as np
import scipy

from ..checks import require_real


class XavierEntries:
    """Uniform in +-gain sqrt(6 / (d + m)), m standing for the inner size of the units."""

    def __post_init__(self):
        super().__post_init__()
        sizes = dict(sorted(self.layout.sizes))
        self.gain = require_real("gain", self.gain, 0.0, include_low=False)
        self.bound = require_real(
            f"gain * sqrt(6 / ({' + '.join(sizes)}))",
            self.gain * math.sqrt(6.0 / sum(sizes.values())),
            0.0,
            include_low=False,
        )

    def quantile(self, u: np.ndarray) -> np.ndarray:
        return (2.0 * u - 1.0) * self.bound


class TruncatedNormalEntries:
    """Normal with standard deviation `std` before truncation to [-bound, bound]."""

    def __post_init__(self):
        super().__post_init__()
        self.std = require_real("std", self.std, 0.0, include_low=False)
        self.bound = require_real("bound", self.bound, 0.0, include_low=False)

    def quantile(self, u: np.ndarray) -> np.ndarray:
        # odd about u = 1/2
        scale = math.sqrt(2.0) * self.std
        if self.bound <= 1e-8 * scale:  # uniform to rounding, and the quantiles would underflow
            return (2.0 * u - 1.0) * self.bound
        entries = scale * scipy.special.erfinv(
            (2.0 * u - 1.0) * scipy.special.erf(self.bound / scale)
        )
        return np.clip(entries, -self.bound, self.bound)
