"""Which tokens a norm is over, and how much each of them counts.

A token counts by its weight omega in its context. Tokens of weight zero, tracers, count nowhere:
they are sets of their own, "tracer" and "probe_tracer", in which all of them count alike. Whoever
asks more may name further sets, such as the first places under a mask.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..checks import require_tensor, shown

TRACERS = {"train": "tracer", "probe": "probe_tracer"}

# By the name of a set, what each token counts, (B, N) >= 0; None: all of them alike.
TokenSets = dict[str, torch.Tensor | None]


def sets_of(run: object, name: str, step: int, places: Mapping | None = None) -> TokenSets:
    """The sets of tokens that "x", "p", "probe_x" or "probe_p" of a run has at a recorded step.

    First that of its weights, then, where there are tracers, these. Of training contexts also
    `places`: by the name of a set, what the token at each place counts, (N,).
    """
    probe = name.startswith("probe")
    where, weights = "train", weights_at(run, step)
    if probe:
        where, weights = "probe", run.probe_token_weights
    found = {where: weights}
    if weights is not None and (weights == 0).any():
        found[TRACERS[where]] = (weights == 0).to(weights)
    return found if probe or not places else found | places


def weights_at(run: object, step: int) -> torch.Tensor | None:
    """omega (B, N) of the training contexts of a step, None where tokens are equal."""
    weights = run.token_weights
    if weights is not None and step in run.batches:
        weights = weights[run.batches[step].to(weights.device)]
    return weights


def require_places(sets: object, tokens: int) -> dict[str, torch.Tensor]:
    """Named sets of places as tensors, each refused where it is none."""
    if not isinstance(sets, Mapping):
        raise TypeError(
            f"sets must map names to what the token at each place counts; got {shown(sets)}. Write "
            'sets={"first": torch.tensor([1.0, 0.0])}.'
        )
    found = {}
    for name, counts in sets.items():
        require_own_name("sets", name)
        counts = require_tensor(f"sets[{name!r}]", counts, finite=True)
        if tuple(counts.shape) != (tokens,) or not ((counts >= 0).all() and counts.any()):
            raise ValueError(
                f"sets[{name!r}] must be {tokens} numbers >= 0, one for each place, not all 0; got "
                f"{shown(counts.tolist())}. A place that does not count has 0."
            )
        found[name] = counts
    return found


def require_own_name(argument: str, name: str) -> None:
    """Refuse the name of a set that there is anyway."""
    if name in (own := (*TRACERS, *TRACERS.values())):
        raise ValueError(
            f"{argument} must have names of their own, not {', '.join(own)}; got {name!r}. Choose "
            "another."
        )


def token_mean(values: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over contexts and tokens of values (..., B, N), by weights (B, N) or (N,) or all alike.

    What counts nothing may be anything.
    """
    if weights is None:
        return values.mean((-1, -2))
    weights = weights.to(values)
    total = weights.sum((-1, -2)) if weights.ndim > 1 else weights.sum() * values.shape[-2]
    return masked(values * weights, weights).sum((-1, -2)) / total


def masked(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Zero where nothing counts, were it infinite there."""
    return torch.where(weights.to(values.device) > 0, values, 0.0)
