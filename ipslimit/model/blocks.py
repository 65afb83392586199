"""Blocks: which families of units a layer has, their laws, and the norm in front of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch

from ..checks import require_bool, require_int, shown
from .branch import Branch, family_of
from .laws import Law
from .norm import Norm
from .units import Units

# Counts of units must be exact as float64 weights n / H.
MOST_HEADS = 2**53
# By family: what its units are, and a law of them.
EXAMPLES = {
    "attention": ("Heads", "XavierUniform(d, m)"),
    "perceptron": ("Perceptrons", "XavierPerceptrons(d, n)"),
}


class Block:
    """The law of a layer with attention heads, perceptrons, or both, behind a norm.

        Gamma(x; nu) = sum_h w_h f(norm(x); heads_h) + sum_u w_u f(norm(x); perceptrons_u)

    It goes wherever a law goes: `Problem(contexts, targets, law=Block(...))`.

    Parameters
    ----------
    attention : law of `Heads`, optional
    perceptron : law of `Perceptrons`, or of any other units but heads, optional
    norm : None, "rms" or "layer"
        x / sqrt(mean x^2 + norm_eps), of x or of x less its mean over the d components (d >= 3),
        of every token by itself, before either family reads it; without trainable gain.
    norm_eps : float > 0
    sequential : bool
        In the particle transformer perceptrons act on what attention has made of the tokens (two
        Euler steps a layer, as people's transformers do), and not beside it. The limit is the same.

    Raises
    ------
    TypeError, ValueError
        For laws that are not such or are of different d, and where there is none at all.

    Notes
    -----
    Every family has a measure of its own, with weights 1/H of its own number of units, and its own
    O(1) gradient g = L H dJ/dtheta. The theorem of Gibson & Reisinger, arXiv:2605.11059, is on
    attention; perceptrons beside it, and norms, are our extension of it.
    """

    def __init__(
        self,
        attention: Law | None = None,
        perceptron: Law | None = None,
        norm: str | None = None,
        norm_eps: float = 1e-5,
        sequential: bool = False,
    ):
        given = {"attention": attention, "perceptron": perceptron}
        laws = {name: law for name, law in given.items() if law is not None}
        for name, law in laws.items():
            if not isinstance(law, Law) or family_of(law.units) != name:
                got = f"a law of {law.units.__name__}" if isinstance(law, Law) else shown(law)
                example = (
                    "XavierUniform(d, m)" if name == "attention" else "XavierPerceptrons(d, n)"
                )
                kind = "Heads" if name == "attention" else "Perceptrons"
                raise TypeError(
                    f"{name} must be a law of {kind}; got {got}. Use ipslimit.{example}, or "
                    f"Atoms of {kind}."
                )
        if not laws:
            raise ValueError(
                "attention and perceptron must not both be None; a block without units moves no "
                "token. Give one of them a law."
            )
        # norm_eps is looked at even where it is not used
        given = Norm("rms" if norm is None else norm, norm_eps)
        self._set(laws, None if norm is None else given, sequential)

    @classmethod
    def of(cls, law: Block | Law) -> Block:
        """A law of units as the block that has no other family and no norm."""
        if isinstance(law, Block):
            return law
        block = cls.__new__(cls)
        block._set({family_of(law.units): law}, None, False)
        return block

    def _set(self, laws: dict[str, Law], norm: Norm | None, sequential: bool) -> None:
        self.laws, self.norm = laws, norm
        self.sequential = require_bool("sequential", sequential)
        sizes = {law.layout.d for law in laws.values()}
        if len(sizes) > 1:
            raise ValueError(
                f"attention and perceptron must have the same d; got {sorted(sizes)}. "
                "Both read the same tokens."
            )
        if norm is not None and norm.kind == "layer" and self.d < 3:
            raise ValueError(
                f'norm "layer" must have d >= 3; got d={self.d}, of which it leaves one sign. Use '
                'norm="rms".'
            )

    @property
    def d(self) -> int:
        return next(iter(self.laws.values())).layout.d

    @cached_property
    def exact(self) -> bool:
        """Whether the integrals over all units are finite sums."""
        return all(law.exact for law in self.laws.values())

    @property
    def size(self) -> int:
        """Parameters of one unit of every family together."""
        return sum(law.layout.size for law in self.laws.values())

    def numbers(self, heads: object) -> dict[str, int]:
        """Units of every family in a layer, of one number for all or of a dict by family.

        Raises
        ------
        TypeError, ValueError
            For anything else.
        """
        if not isinstance(heads, Mapping):
            count = require_int("heads", heads, 1, MOST_HEADS)
            return dict.fromkeys(self.laws, count)
        if set(heads) != set(self.laws):
            raise ValueError(
                f"heads must give a number for each of {', '.join(self.laws)}; got "
                f"{shown(dict(heads))}. One number for all will do too."
            )
        return {
            name: require_int(f"heads[{name!r}]", heads[name], 1, MOST_HEADS) for name in self.laws
        }

    def stored(self, numbers: Mapping[str, int]) -> int:
        """Parameters that a layer of so many draws of every family takes in memory."""
        return sum(law.stored(numbers[name]) * law.layout.size for name, law in self.laws.items())

    def check_nodes(self, n: object, seed: object) -> None:
        """Refuse bad arguments of `nodes` of the laws."""
        for law in self.laws.values():
            law.check_nodes(n, seed)

    def whole(self, n: int, seed: int, depths: torch.Tensor, dtype: torch.dtype) -> Branch:
        """The whole law at every depth s of `depths` (S,): a branch with leading dimension (S,)."""
        families = {}
        for name, law in self.laws.items():
            units = law.whole(n, seed, dtype)
            copies = units.map(lambda t: t.expand(len(depths), *t.shape))
            families[name] = law.along(copies, depths)
        return self.branch(families)

    def branch(self, families: Mapping[str, Units]) -> Branch:
        """Units of the families as a layer's branch."""
        return Branch(families, self.norm, self.sequential)

    def __repr__(self) -> str:
        parts = [f"{name}={law!r}" for name, law in self.laws.items()]
        if self.norm is not None:
            parts += [f"norm={self.norm.kind!r}", f"norm_eps={self.norm.eps:g}"]
        parts += ["sequential=True"] if self.sequential else []
        return f"Block({', '.join(parts)})"
