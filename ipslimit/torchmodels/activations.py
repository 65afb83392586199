"""Which activations let a positive scale through: f(c z) = c f(z)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .shards import original_class
from .wrappers import uncompiled

# Small and large arguments: GELU is linear far out, ReLU6 near zero
_POINTS = (-30.0, -4.0, -1.3, -0.2, -0.01, 0.01, 0.2, 1.3, 4.0, 30.0)
_SCALES = (0.5, 3.0, 10.0)
_HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.Identity, nn.Dropout)
_TOLERANCE = 1e-5  # float32 rounding of an activation that computes in float32


def refusal_of_activation(activation: object) -> str:
    """Why two matrices around this activation are no symmetry pair, or "" if they are.

    The activation is evaluated at a few points, so a function of any name is judged by what it
    does: ReLU, LeakyReLU and the identity pass, GELU, SiLU, tanh and ReLU6 do not.
    """
    activation = uncompiled(activation)
    if original_class(activation) in _HOMOGENEOUS:  # some are random, or have one slope per channel
        return ""
    name = _name(activation)
    if not isinstance(activation, Callable):
        return f"{name} is no function that could be looked at"
    try:
        ratios = _ratios(activation)
    except Exception as error:
        return f"{name} could not be evaluated on a vector ({type(error).__name__}: {error})"
    for degree in (1, 2, 3):
        if all(
            torch.allclose(ratio, torch.full_like(ratio, scale**degree), rtol=_TOLERANCE)
            for scale, ratio in ratios
        ):
            if degree == 1:
                return ""
            return (
                f"{name} is homogeneous of degree {degree}, f(c z) = c^{degree} f(z), and needs an "
                f"exponent of its own: A times c goes with B over c^{degree}, not over c"
            )
    return f"{name} is not homogeneous, f(c z) is not c f(z), so that A times c changes the network"


@torch.no_grad()
def _ratios(activation: Callable) -> list[tuple[float, torch.Tensor]]:
    """(c, f(c z) / f(z) where f(z) is not zero) for every scale; f(c z) = 0 = f(z) counts as 1."""
    owned = activation.parameters() if isinstance(activation, nn.Module) else ()
    parameter = next(iter(owned), None)
    points = torch.tensor(_POINTS, dtype=torch.float64)
    points = points if parameter is None else points.to(parameter)
    base = activation(points)
    found = []
    for scale in _SCALES:
        scaled, kept = activation(scale * points), base != 0
        if bool((scaled[~kept] != 0).any()):  # zero that does not stay zero
            return [(scale, torch.full_like(base, torch.nan))]
        found.append((scale, scaled[kept] / base[kept]))
    return found


def _name(activation: object) -> str:
    if isinstance(activation, nn.Module):
        return f"the activation {type(activation).__name__}"
    return f"the activation {getattr(activation, '__name__', activation)!s}"
