"""What a language model that was trained says of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..checks import require_int, require_no_transforms, shown
from .layers import Layers
from .problem_identity import require_same_problem
from .sight import Sight
from .token_problem import TokenProblem

if TYPE_CHECKING:  # a run asks here for its logits
    from .runs import ParticleRun


def run_logits(run: ParticleRun, problem: TokenProblem, k: int, ids: torch.Tensor) -> torch.Tensor:
    """`ParticleRun.logits`."""
    require_token_problem(problem, run.of, ("group", "nodes", "nodes_seed"))
    if require_int("k", k, 0) not in run.units or k not in run.ends:
        raise ValueError(
            f"k must be a recorded step, one of {sorted(run.units)}; got {k}. Pass it in record= "
            "of train_particles."
        )
    families = {n: u.map(lambda t: t.transpose(0, 1)) for n, u in run.units[k].items()}
    branch = problem.block.branch(families).map(torch.Tensor.contiguous)
    scale = float(run.depth) ** -run.residual_exponent
    layers = Layers(branch, scale, {"field": 0, "vjp": 0})
    ends = problem.ends_of(run.ends[k])
    x0 = ends.enter(problem.prefixes(ids).to(branch.device))
    return ends.logits(layers.forward(x0, Sight(problem.causal))[-1])


def require_token_problem(problem: object, of: dict[str, str], apart: tuple[str, ...] = ()) -> None:
    """Refuse what is no `TokenProblem`, or not the one that a run is of."""
    require_no_transforms("A run's logits", "Call it outside; texts go together.")
    if not isinstance(problem, TokenProblem):
        raise TypeError(f"problem must be an ipslimit.TokenProblem; got {shown(problem)}.")
    require_same_problem("problem", problem.identity, "this run", of, apart)
