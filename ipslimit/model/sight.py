"""What the tokens of a context see of each other: a mask, and the weight of each in what is seen.

A context is a measure sum_j omega_j delta_{x_j}; a token of weight 0, a tracer, is moved and moves
nobody. With u_j = N omega_j, which is 1 where weights are equal, a softmax over tokens is

    a_ij = u_j exp(s_ij) / sum_j' u_j' exp(s_ij') = softmax_j(s_ij + log u_j)

so that a weight is a bias of its key's logits. What is passed back through such a field is the
plain gradient times N, pi_i = N dl/dx_i = u_i p_i: then its transpose is the plain one, a tracer
has no part in it, and where weights are equal pi is p.

With a mask the measure lives on (position, state): a token sees those of its own position and of
lesser ones. Inside, tokens lie in the order of their positions, so that each sees those up to some
place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from ..checks import require_bool, require_tensor, shown

# By how much a context's weights may miss a sum of 1, before they are made to meet it.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4}
# The least weight that is not taken for none at all by those of `tracers`.
LEAST = {torch.float64: 1e-100, torch.float32: 1e-15}


@dataclasses.dataclass(frozen=True, eq=False)
class Sight:
    """What tokens see, of contexts in the order of positions.

    Attributes
    ----------
    causal : bool
        Token i sees tokens j <= i only.
    weights : tensor (B, N), or None where all are 1
        u = N omega, of mean 1 in every context.
    ends : tensor (B, N) of int64, or None
        Of a mask: token i sees tokens j < ends[b, i] instead; those never decrease along a context.
    traced : tensor (B,) of bool, or None without weights
        Which contexts have tracers, on the CPU whatever the device, so that nobody need wait for a
        card to say if there are some; found of the weights where it is not given.
    """

    causal: bool = False
    weights: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    traced: torch.Tensor | None = None

    def __post_init__(self):
        if self.weights is not None and self.traced is None:
            object.__setattr__(self, "traced", (self.weights == 0).any(-1).cpu())

    @classmethod
    def of(cls, given: bool | Sight) -> Sight:
        """Of a bool, that of equal tokens with or without a mask.

        Raises
        ------
        TypeError
            For anything else.
        """
        return given if isinstance(given, cls) else cls(require_bool("causal", given))

    @property
    def plain(self) -> bool:
        """Whether a mask says it all."""
        return self.weights is None and self.ends is None

    @property
    def shifts(self) -> torch.Tensor | None:
        """log u (B, N), the biases of logits: -inf of a tracer."""
        return None if self.weights is None else self.weights.log()

    @property
    def tracers(self) -> torch.Tensor | None:
        """Which tokens have weight 0, (B, N); None if there are none."""
        if self.weights is None or not bool(self.traced.any()):
            return None
        return self.weights == 0

    def hidden(self, tokens: int, device: object) -> torch.Tensor | None:
        """Whom tokens do not see: (1 or B, N, N), or None without a mask."""
        if not self.causal:
            return None
        columns = torch.arange(tokens, device=device)
        ends = columns[None] + 1 if self.ends is None else self.ends
        return columns >= ends[..., None]

    def __getitem__(self, contexts) -> Sight:
        """That of some of the contexts."""
        if self.plain:
            return self
        on_cpu = contexts.cpu() if isinstance(contexts, torch.Tensor) else contexts
        return self._map(lambda t: t[contexts], lambda t: t[on_cpu])

    def repeated(self, times: int) -> Sight:
        """That of all contexts so many times, one after the other."""
        if times == 1:
            return self
        return self._map(lambda t: t.repeat(times, 1), lambda t: t.repeat(times))

    def to(self, device: object) -> Sight:
        """The same on a device."""
        return self._map(lambda t: t.to(device), lambda t: t)

    def weighted(self, t: torch.Tensor) -> torch.Tensor:
        """t (..., B, N, s) times the weights of its tokens."""
        return t if self.weights is None else t * self.weights[..., None]

    def _map(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        of_contexts: Callable[[torch.Tensor], torch.Tensor],
    ) -> Sight:
        """Apply one function to weights and ends, another to what is told of whole contexts."""
        if self.plain:
            return self
        parts = (None if t is None else function(t) for t in (self.weights, self.ends))
        return Sight(self.causal, *parts, None if self.traced is None else of_contexts(self.traced))


def sight_of(
    causal: bool, token_weights: object, positions: object, x: torch.Tensor, prefix: str = ""
) -> tuple[Sight, torch.Tensor | None, torch.Tensor | None]:
    """What is seen by tokens with these weights and positions, and their order of positions.

    Parameters
    ----------
    token_weights : tensor (B, N) or (N,), or None
        omega: not negative, with sum 1 in every context.
    positions : integers (B, N) or (N,), or None
        0..N-1 by default. Without a mask they change nothing.
    x : tensor (..., B, N, d)
        The tokens.
    prefix : what the arguments' names begin with in messages

    Returns
    -------
    sight : Sight
        Of the tokens in the order of their positions.
    order : tensor (B, N) of int64, or None where they lie in it
    positions : tensor (B, N) of int64, or None where none are given or there is no mask
        Of the tokens in that order.

    Raises
    ------
    TypeError, ValueError
        For anything else, and where a token would see none of positive weight.
    """
    omega = None if token_weights is None else _weights(f"{prefix}token_weights", token_weights, x)
    order = ends = places = None
    if positions is not None:
        places = _positions(f"{prefix}positions", positions, x)
        order, ends = order_of(places)
        places = places if order is None else places.gather(-1, order)
    if not causal:
        order = ends = places = None
    u = None
    if omega is not None:
        omega = omega if order is None else omega.gather(-1, order)
        # equal weights are none at all
        u = None if bool((omega == omega[0, 0]).all()) else omega * x.shape[-2]
    sight = Sight(causal, u, ends)
    if causal and u is not None:
        seen = u.cumsum(-1)
        seen = seen if ends is None else seen.gather(-1, ends - 1)
        if not bool((seen > 0).all()):
            raise ValueError(
                f"{prefix}token_weights must give every token one of positive weight to see, at "
                "its position or before it; got a position before which all weights are 0. Put a "
                "tracer at the position of a token that it is to see."
            )
    return sight, order, places


def _shape(name: str, t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As (B, N), of one of that shape or (N,)."""
    shape = tuple(x.shape[-3:-1])
    if tuple(t.shape) not in (shape, shape[1:]):
        raise ValueError(
            f"{name} must have shape (B, N) = {shape}, one for each token; got {tuple(t.shape)}. "
            "One row (N,) is taken for all contexts."
        )
    return t.expand(shape).to(x.device)


def _weights(name: str, given: object, x: torch.Tensor) -> torch.Tensor:
    omega = require_tensor(name, given, finite=True).detach()
    omega = _shape(name, omega, x)
    if omega.dtype != x.dtype:
        raise TypeError(
            f"{name} must have the dtype of the tokens, {x.dtype}; got {omega.dtype}. Convert "
            f"them with .to({x.dtype})."
        )
    if bool((omega < 0).any()):
        raise ValueError(
            f"{name} must not be negative; got {float(omega.min()):g}. A tracer has weight 0."
        )
    least = LEAST[x.dtype]
    if bool(((omega > 0) & (omega < least)).any()):
        raise ValueError(
            f"{name} must be 0 or at least {least:g} in {x.dtype}; got "
            f"{float(omega[omega > 0].min()):g}. Let such a token be a tracer, of weight 0."
        )
    sums = omega.sum(-1, keepdim=True)
    if bool(((sums - 1.0).abs() > ROUNDING[x.dtype]).any()):
        worst = float(sums.flatten()[(sums - 1.0).abs().argmax()])
        raise ValueError(
            f"{name} must have sum 1 in every context; got {worst:g}. Divide by "
            f"{name}.sum(-1, keepdim=True)."
        )
    return omega / sums


def _positions(name: str, given: object, x: torch.Tensor) -> torch.Tensor:
    try:
        positions = torch.as_tensor(given).detach()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be integers; got {shown(given)}.") from None
    if (
        positions.dtype.is_floating_point
        or positions.dtype.is_complex
        or (positions.dtype == torch.bool)
    ):
        raise TypeError(
            f"{name} must be integers; got {positions.dtype}. Number the tokens 0, 1, ..; copies "
            "and tracers share a position."
        )
    return _shape(name, positions.to(torch.int64), x)


def order_of(positions: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The order of positions, and up to where each token sees in it; None where that is plain."""
    sorted_, order = positions.sort(dim=-1, stable=True)
    places = torch.arange(positions.shape[-1], device=positions.device).expand_as(order)
    ends = torch.searchsorted(sorted_.contiguous(), sorted_.contiguous(), right=True)
    return (
        None if torch.equal(order, places) else order,
        None if torch.equal(ends, places + 1) else ends,
    )
