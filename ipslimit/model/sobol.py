"""Scrambled Sobol points, which laws of units and of tokens make their quadrature nodes of."""

from __future__ import annotations

import math

import numpy as np
import scipy


def sobol_points(dims: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """n points (n, dims) inside the unit cube; other scramblings are independent."""
    sobol = scipy.stats.qmc.Sobol(dims, scramble=True, rng=rng)
    # next power of two, then cut: the sequence's own balance where n allows it
    u = sobol.random_base2(math.ceil(math.log2(n)))[:n]
    # a scrambled point can round to 0, where a quantile may be infinite
    return np.clip(u, 2**-53, 1 - 2**-53)
