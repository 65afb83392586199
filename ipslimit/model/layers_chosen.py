"""Which passes through layers are made: compiled or swept ones, where sizes and rule allow it."""

from __future__ import annotations

from .branch import Branch
from .layers import Layers
from .rules import Rule


def make_layers(
    branch: Branch,
    scale: float,
    cost: dict[str, int],
    rule: Rule | None,
    contexts: int,
    tokens: int,
    group=None,
    tied: int | None = None,
) -> Layers:
    """The passes for these sizes (units per layer, contexts and tokens) and this rule.

    Without a rule nothing is trained. With a process group, `branch` holds the units of this
    process.
    """
    arguments = branch, scale, cost, group, tied
    if tied is None and group is None and branch.is_swept(contexts, tokens):
        from ..card.swept_layers import SweptLayers, fits  # which needs Triton

        return (SweptLayers if fits(branch, rule, contexts) else Layers)(*arguments)
    if tied is not None or not branch.is_compiled(contexts, tokens):
        return Layers(*arguments)
    from ..cpu.layers import CompiledLayers  # numba takes a second to import
    from ..cpu.rules import is_compiled

    families = branch.families.values()
    compiled = rule is None or all(is_compiled(rule, units) for units in families)
    return (CompiledLayers if compiled else Layers)(*arguments)
