"""The norm in front of a layer's branch, of each token by itself, and its transpose."""

from __future__ import annotations

import dataclasses
import math

import torch

from ..checks import require_choice, require_real

KINDS = ("rms", "layer")
# Where tokens come so near to zero, in units of sqrt(eps), and the norm is so steep in them,
# the depth solver loses its order, and costates grow.
NEAR_ZERO, STEEP = 10.0, 10.0


@dataclasses.dataclass(frozen=True)
class Norm:
    """y = x / sqrt(mean x^2 + eps), of x itself ("rms") or of x less its mean ("layer").

    Without trainable gain or shift: a gain is in the matrices that read y.
    """

    kind: str = "rms"
    eps: float = 1e-5

    def __post_init__(self):
        require_choice("norm", self.kind, KINDS)
        eps = require_real("norm_eps", self.eps, 0.0, include_low=False)
        object.__setattr__(self, "eps", eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The normed tokens, of x (..., d)."""
        return self._parts(x)[0]

    def pull(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """The transpose of the derivative at x, of cotangents dy of the normed tokens."""
        y, inverse = self._parts(x)
        out = dy - y * (dy * y).mean(-1, keepdim=True)
        if self.kind == "layer":
            out = out - dy.mean(-1, keepdim=True)
        return inverse * out

    def sizes(self, x: torch.Tensor) -> torch.Tensor:
        """sqrt(mean x^2) of every token, of x less its mean for "layer": (...,) of x (..., d)."""
        return self._centred(x).square().mean(-1).sqrt()

    def is_undirected(self, x: torch.Tensor) -> torch.Tensor:
        """Which tokens are zero, or for "layer" constant up to rounding: (...,) of x (..., d)."""
        rounding = 0.0
        if self.kind == "layer":
            rounding = 4.0 * torch.finfo(x.dtype).eps * x.abs().amax(-1)
        return self._centred(x).abs().amax(-1) <= rounding  # no square, that may underflow

    def require_directed(self, name: str, x: torch.Tensor, what: str = "no token") -> None:
        """Refuse tokens that have no direction.

        Raises
        ------
        ValueError
        """
        if bool(self.is_undirected(x).any()):
            kind = "zero" if self.kind == "rms" else "constant over its components"
            raise ValueError(
                f"{name} must have {what} that is {kind}, for norm={self.kind!r}; got one, which "
                "has no direction. Leave it out, or use norm=None."
            )

    def least_size(self, x: torch.Tensor) -> torch.Tensor:
        """The least size of a token, (); those that are not finite are left out."""
        return self.sizes(x).nan_to_num(torch.inf).min()

    def warning(self, least: float) -> str | None:
        """What to say of tokens whose least size is this; None where it is large enough."""
        near = least < NEAR_ZERO * math.sqrt(self.eps)
        if not near or least**2 + self.eps > STEEP**-2:
            return None
        return (
            f"tokens in front of the norm come down to a size of {least:.1e}, near "
            f"sqrt(norm_eps) = {math.sqrt(self.eps):.1e}, where the norm is steep: the order in "
            "depth is lost and costates grow; raise norm_eps, or take other contexts"
        )

    def _centred(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(-1, keepdim=True) if self.kind == "layer" else x

    def _parts(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        centred = self._centred(x)
        inverse = (centred.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return centred * inverse, inverse
