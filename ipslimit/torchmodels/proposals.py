"""What a kind of module is taken to be, to be accepted or tried."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from .pairs import Pair
from .shards import original_class
from .trials import TOLERANCE, Trials
from .wrappers import uncompiled

# Rotary positions under any spelling, and not every Property.
_ROTARY = re.compile("(?i:rotary)|RoPE|ROPE|Rope|(?:^|_)rope")


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Pairs that a module may have: the first alternative that its function bears out.

    Attributes
    ----------
    alternatives : tuple of functions that build pairs
        Each raises ValueError where a part is no plain parameter.
    doubt : str
        Why none may be taken without a trial, or "" if the module's parts show that it can.
    certain : bool
        No trial is needed: the function of the module is torch's own, or the module says so.
    """

    alternatives: tuple[Callable[[], list[Pair]], ...]
    doubt: str = ""
    certain: bool = False

    def accepted(self, module: nn.Module, trials: Trials) -> list[Pair]:
        """The pairs of the first alternative that holds.

        Raises
        ------
        ValueError
            With the reason, if none does.
        """
        refusal = ""
        for build in self.alternatives:
            try:
                pairs = build()
            except ValueError as error:
                refusal = refusal or str(error)
                continue
            if self.certain:
                return pairs
            change = trials.change(module, pairs)
            if change is None and self.doubt:
                kind = original_class(module).__name__
                refusal = refusal or f"{self.doubt}, and {kind} could not be tried alone"
            elif change is None or change <= TOLERANCE:
                return pairs
            else:
                refusal = refusal or (
                    f"rescaling {pairs[0]} changes what {original_class(module).__name__} computes "
                    f"by {change:.2g} of its size" + (f": {self.doubt}" if self.doubt else "")
                )
        raise ValueError(refusal)


class Found(NamedTuple):
    """What a recogniser makes of a module.

    Attributes
    ----------
    kinds : dict
        "qk", "vo" or "mlp" -> a `Proposal`, the reason why there is none, or a list of such.
    parts : tuple of str
        Which parts of the module it has looked at: paths of modules; "" is all of it.
    """

    kinds: dict[str, Proposal | str | list[Proposal | str]]
    parts: tuple[str, ...] = ("",)


def part_at(module: nn.Module, path: str) -> nn.Module | None:
    """The part of a module at the end of a path of names, without wrappers; None if there is none.

    The empty path leads to the module itself.
    """
    for name in path.split(".") if path else ():
        module = uncompiled(getattr(module, name, None))
        if not isinstance(module, nn.Module):
            return None
    return uncompiled(module)


def strangers(module: nn.Module, expected: tuple[str, ...]) -> str:
    """A part whose place in the forward pass is not known may stand between two matrices."""
    containers = {"", *(name.rpartition(".")[0] for name in expected)}
    for container in sorted(containers):
        inside = part_at(module, container)
        if inside is None:
            continue
        for child_name, child in inside.named_children():
            path = f"{container}.{child_name}" if container else child_name
            child = uncompiled(child)
            harmless = isinstance(child, (nn.Dropout, nn.Identity)) or _ROTARY.search(
                original_class(child).__name__
            )
            if path not in expected and path not in containers and not harmless:
                return (
                    f"it holds {path} ({original_class(child).__name__}), which may stand between "
                    "the matrices"
                )
    return ""
