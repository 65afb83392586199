"""Units theta of one family, many at once, with weights: what every family of them has in common.

A layer's field is a mean over its units, Gamma(x; nu) = sum_u w_u f(x; theta_u). A family is a
class that declares the matrices and biases of a unit and says what one does to one context:

    class Tanh(ipslimit.Units):
        \"\"\"f(x_i; theta) = W_out tanh(W_in x_i): a hidden layer of n neurons.\"\"\"

        matrices = {"w_in": "n d", "w_out": "d n"}
        mirror = ("w_out",)

        @staticmethod
        def unit_field(x, causal, w_in, w_out):
            return torch.tanh(x @ w_in.mT) @ w_out.mT

All else (layers, limit, rules, laws) works on the packed parameters and asks the family the few
questions below. `heads.Heads` is the family that has a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from ..checks import require_bool, require_choice, require_same, require_tensor, shown
from . import by_autograd, transforms
from .layout import Layout, undeclared
from .sight import Sight


class Units:
    """A weighted collection of units of one family: nu = sum_u w_u delta_theta_u.

    Parameters
    ----------
    weights : tensor, shape (..., H), optional
        Weight of each unit in the field; 1/H by default (the mean over units).
    options : dict of name to value, optional
        What else their function depends on, as declared; the first of the values by default.
    **parts : tensors by the names of the declaration
        Matrices (..., H, rows, columns), biases (..., H, length), which may be left out. Leading
        dimensions stand for seeds, layers, depth nodes.

    Attributes
    ----------
    packed : tensor (..., P, H); see `Layout`. The parts are views of it, by their names (None where
        absent)
    weights : tensor (..., H)

    A family declares (class attributes)
    ------------------------------------
    matrices, biases : dict of name to shape
        In named sizes, such as "n d" for (n, d); "d" is that of the tokens. A vector is a bias.
    optional : names of matrices that may be left out, as any bias may
    transposed : names of matrices that are stored (columns, rows)
    mirror : names
        What must change its sign for the unit's field to change its own: then a law that is
        symmetric under that is integrated over pairs. Empty where there is no such thing.
    pairs : tuples (A, B) of names
        Symmetry: A <- c A, B <- B / c leaves the field as it is, c > 0. The first name on each side
        is the matrix whose norm counts, others (biases) go with it. (Where that depends on what the
        units are, override `pairs_of`.)
    maps : dict of matrix to (bias, input)
        Affine maps y -> W y + b of which y is "x", the tokens, or one of `inputs`.
    inputs : dict of name to (size, matrix)
        Inner inputs of `maps`, and the matrix that they scale with in `pairs` (or None).
    options : dict of name to values
        What else their function depends on, such as {"activation": ("gelu", "tanh")}: handed to
        `unit_field` by name.
    noun : what messages call the units

    Raises
    ------
    TypeError
        For tensors that are not float32/float64, or that mix dtypes or devices.
    ValueError
        For shapes that do not fit together.
    """

    matrices: ClassVar[dict[str, str]] = {}
    biases: ClassVar[dict[str, str]] = {}
    optional: ClassVar[tuple[str, ...]] = ()
    transposed: ClassVar[tuple[str, ...]] = ()
    mirror: ClassVar[tuple[str, ...]] = ()
    pairs: ClassVar[tuple] = ()
    maps: ClassVar[dict[str, tuple[str, str]]] = {}
    inputs: ClassVar[dict[str, tuple[str, str | None]]] = {}
    options: ClassVar[dict[str, tuple[str, ...]]] = {}
    noun: ClassVar[str] = "units"
    declared: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.declared = {**cls.matrices, **cls.biases}
        reason = undeclared(cls, {*dir(Units), "weights", "packed", "layout"})
        if reason:
            raise TypeError(
                f"{cls.__name__} must declare matrices as in {{'w_in': 'n d', 'w_out': 'd n'}}, "
                f"biases as in {{'b_in': 'n'}}, and name only these; got {reason}. See "
                "ipslimit.Units."
            )

    def __init__(
        self,
        weights: torch.Tensor | None = None,
        options: Mapping[str, object] | None = None,
        **parts: torch.Tensor,
    ) -> None:
        unknown = [name for name in parts if name not in self.declared]
        if unknown:
            raise TypeError(
                f"{type(self).__name__} must have parts {', '.join(self.declared)}; got "
                f"{unknown[0]}. Name them as declared."
            )
        needed = [name for name in self.matrices if name not in self.optional]
        parts = {
            name: require_tensor(name, parts.get(name))
            for name in self.declared
            if parts.get(name) is not None or name in needed
        }
        sizes, lead, count = self._sizes_of(parts)
        if weights is None:
            weights = next(iter(parts.values())).new_full((count,), 1.0 / count)
        weights = require_tensor("weights", weights)
        if weights.ndim < 1 or weights.shape[-1] != count:
            raise ValueError(
                f"weights must have shape (..., H) with H={count} as in {next(iter(parts))}; got "
                f"{tuple(weights.shape)}. Leave weights out for the mean over {self.noun}."
            )
        named = [*parts.items(), ("weights", weights)]
        require_same("dtype", named)
        require_same("device", named)
        try:
            weights = weights.expand(*lead, count).contiguous()
        except RuntimeError:
            raise ValueError(
                f"weights must broadcast to {(*lead, count)}; got {tuple(weights.shape)}. Give one "
                f"weight per {self.noun[:-1]}, or one per leading index and {self.noun[:-1]}."
            ) from None
        self.layout = self.make_layout(tuple(parts), options, **sizes)
        self.packed = self.layout.pack(parts)
        self.weights = weights.clone()  # as `packed` is: not the memory of what was given

    def _sizes_of(self, parts: dict[str, torch.Tensor]) -> tuple[dict[str, int], tuple, int]:
        """The named sizes, the leading dimensions and H, of which the first part is a measure."""
        first, tensor = next(iter(parts.items()))
        shape, axes = tuple(tensor.shape), self.declared[first].split()
        if len(shape) < 3 or 0 in shape[-3:]:
            wanted = ", ".join(("H", *axes))
            raise ValueError(
                f"{first} must have shape (..., {wanted}) with {wanted} >= 1; got {shape}. "
                f"A single {self.noun[:-1]} needs {first}[None]."
            )
        *lead, count = shape[:-2]
        sizes: dict[str, int] = {}
        for name, tensor in parts.items():
            axes = self.declared[name].split()
            if tensor.ndim >= len(axes):
                for axis, size in zip(axes, tensor.shape[-len(axes) :], strict=True):
                    sizes.setdefault(axis, size)
            expected = (*lead, count, *(sizes.get(axis, axis) for axis in axes))
            if tuple(tensor.shape) != expected or 0 in expected:
                numbers = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
                shapes = ", ".join(
                    f"{other} is (..., H, {self.declared[other].replace(' ', ', ')})"
                    for other in self.declared
                )
                raise ValueError(
                    f"{name} must have shape {expected} to fit {first} of shape {shape} "
                    f"(H={count}, {numbers}); got {tuple(tensor.shape)}. Of the parts, {shapes}."
                )
        return sizes, tuple(lead), count

    @classmethod
    def make_layout(cls, parts: tuple[str, ...] = (), options=None, **sizes: int) -> Layout:
        """The layout of units of these sizes, with those of the optional parts that are named."""
        chosen = {name: values[0] for name, values in cls.options.items()} | dict(options or {})
        for name, value in chosen.items():
            if name not in cls.options:
                known = ", ".join(cls.options) or "none"
                raise TypeError(f"options of {cls.__name__} must be of {known}; got {name}.")
            require_choice(name, value, cls.options[name])
        names = (n for n in cls.declared if n in parts or n not in (*cls.optional, *cls.biases))
        order = dict.fromkeys(axis for shape in cls.declared.values() for axis in shape.split())
        sizes = tuple((axis, sizes[axis]) for axis in order if axis in sizes)
        return Layout(cls, sizes, tuple(names), tuple(chosen.items()))

    @classmethod
    def pairs_of(cls, layout: Layout) -> tuple:
        """The symmetry pairs that units of this layout have, of those declared."""
        return cls.pairs

    @staticmethod
    def from_packed(packed: torch.Tensor, weights: torch.Tensor, layout: Layout) -> Units:
        """Units over existing storage: packed (..., P, H), weights (..., H). Not validated."""
        units = layout.family.__new__(layout.family)
        units.layout, units.packed, units.weights = layout, packed, weights
        return units

    # ------------------------------------------------------------------ the field, its transpose

    def field(
        self, x: torch.Tensor, causal: bool | Sight = False, *, kept: list | None = None
    ) -> torch.Tensor:
        """Gamma(x; nu), differentiable (once) in x and in the units; see `attention_field`.

        Parameters
        ----------
        x : tensor, shape (..., B, N, d)
            B contexts of N tokens; leading dimensions broadcast against those of the units.
        causal : bool or Sight
            Token i is moved by tokens j <= i only; or more of what tokens see, see `sight`.
        kept : list, optional, filled with what `vjp` would compute again, where that can be kept

        Returns
        -------
        tensor, shape (..., B, N, d)

        Raises
        ------
        TypeError, ValueError
            For shapes, dtypes or devices that do not fit together.
        """
        sight = self._check(x, causal)
        return transforms.field(x, self, sight, kept)

    def vjp(
        self,
        x: torch.Tensor,
        cotangent: torch.Tensor,
        causal: bool | Sight = False,
        *,
        with_units: bool = True,
        with_outputs: bool = False,
        kept: list | None = None,
    ) -> tuple:
        """Transpose of the field's derivative; see `attention_vjp`, which this is for heads.

        Parameters
        ----------
        x, causal, kept
            As in `field`, which has filled `kept`.
        cotangent : tensor, shape (..., B, N, d)
            Broadcasts to the shape of the field.
        with_units : bool
            Leave out the units' derivatives (None) where only `dx` is needed.
        with_outputs : bool
            Also return the inner inputs of the affine maps, (..., H, layout.inner), summed over
            contexts and, by their weights, tokens.

        Returns
        -------
        dx : tensor, shape of x
            Derivative of sum(cotangent * field) in x.
        dunits : Units
            PER UNIT WEIGHT: the derivative of sum(cotangent * f(.; theta_u)), summed over contexts
            and tokens; its `weights` are the derivative in the weights.
        outputs : tensor, only with `with_outputs`
        """
        sight = self._check(x, causal)
        _require_tensor("cotangent", cotangent)
        require_bool("with_units", with_units)
        if require_bool("with_outputs", with_outputs) and not with_units:
            raise ValueError(
                "with_outputs must be False where the derivatives of the units are not asked for; "
                "got True. The outputs come with those: ask for both."
            )
        require_same("dtype", [("x", x), ("cotangent", cotangent)])
        require_same("device", [("x", x), ("cotangent", cotangent)])
        return transforms.vjp(x, self, cotangent, sight, with_units, with_outputs, kept)

    @staticmethod
    def unit_field(x: torch.Tensor, causal: bool, **parts: torch.Tensor) -> torch.Tensor:
        """f(x; theta) of one unit on one context, (N, d) of x (N, d), given its parts and options.

        Of differentiable torch operations. A family with `inputs` returns (f, y, ...) with these,
        each (N, size). A family may leave this out if it has its own `path`.
        """
        raise NotImplementedError("a family of units must have unit_field, or its own path")

    def path(self, contexts: int, tokens: int):
        """What computes `field` and `vjp` on rows, for so many contexts of so many tokens.

        A module or object with the two functions of `by_autograd`.
        """
        return by_autograd

    def is_compiled(self, contexts: int, tokens: int) -> bool:
        """Whether whole sweeps over layers of such units can run in compiled loops.

        It depends on sizes, dtype and device alone, so results do not depend on anything else.
        """
        return False

    def is_swept(self, contexts: int, tokens: int) -> bool:
        """Whether the kernels of the card can take such units through whole sweeps."""
        return False

    def kept_bytes(self, contexts: int, tokens: int) -> int:
        """Of what `field` keeps for `vjp` of a leading index, by sizes alone."""
        return 0

    def _check(self, x: torch.Tensor, causal: bool | Sight) -> Sight:
        sight = Sight.of(causal)
        _require_tensor("x", x)
        d = self.layout.d
        if x.ndim < 3 or x.shape[-1] != d or 0 in x.shape:
            raise ValueError(
                f"x must have shape (..., B, N, d) with B, N >= 1 and d={d} as in {self.noun}; got "
                f"{tuple(x.shape)}. A single context needs x[None]."
            )
        require_same("dtype", [("x", x), (self.noun, self.packed)])
        require_same("device", [("x", x), (self.noun, self.packed)])
        return sight

    # ------------------------------------------------------------------ storage

    def with_packed(self, packed: torch.Tensor) -> Units:
        """The same weights and layout over other parameters."""
        return self.from_packed(packed, self.weights, self.layout)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Units:
        """Apply one function to `packed` and to `weights` (indexing, casting, copying...)."""
        return self.from_packed(function(self.packed), function(self.weights), self.layout)

    def to(self, *args: Any, **kwargs: Any) -> Units:
        """As `torch.Tensor.to`."""
        return self.map(lambda tensor: tensor.to(*args, **kwargs))

    def __getitem__(self, index: Any) -> Units:
        """Index the leading dimensions (seeds, layers, nodes), not the units."""
        if not self.lead:
            raise IndexError(
                f"these {self.noun} have no leading dimension to index; H is no such one"
            )
        used = index if isinstance(index, tuple) else (index,)
        if sum(part is not None for part in used) > len(self.lead) or any(
            part is Ellipsis for part in used
        ):
            raise IndexError(
                f"index must name leading dimensions only, of which there are {len(self.lead)}; "
                f"got {index!r} on {self!r}. The {self.noun} themselves are not indexed."
            )
        return self.map(lambda tensor: tensor[index])

    def __iter__(self) -> Iterator[Units]:
        if not self.lead:
            raise TypeError(
                f"these {self.noun} have no leading dimension to iterate; H is no such one"
            )
        return (self[i] for i in range(self.lead[0]))

    def parts(self) -> dict[str, torch.Tensor]:
        """All matrices and biases present, by name, as views."""
        return self.layout.parts(self.packed)

    @property
    def lead(self) -> torch.Size:
        """Leading dimensions, those before the units."""
        return self.packed.shape[:-2]

    @property
    def count(self) -> int:
        """H, the number of units."""
        return self.packed.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.packed.dtype

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def __getattr__(self, name: str) -> Any:
        if name in type(self).declared:
            return self.layout.part(self.packed, name)
        if "layout" in vars(self) and name in dict(self.layout.sizes + self.layout.options):
            return getattr(self.layout, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __repr__(self) -> str:
        lead = f"lead={tuple(self.lead)}, " if self.lead else ""
        sizes = ", ".join(f"{n}={v}" for n, v in self.layout.sizes + self.layout.options)
        biases = f", biases={','.join(self.layout.biases)}" if self.layout.biases else ""
        return (
            f"{type(self).__name__}({lead}H={self.count}, {sizes}{biases}, "
            f"{str(self.dtype).removeprefix('torch.')}, {self.device})"
        )


def _require_tensor(name: str, value: object) -> None:
    # not converted as elsewhere: a kernel that copies its input at each call would hide the cost
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name} must be a tensor; got {shown(value)}. Pass torch.as_tensor({name})."
        )
    require_tensor(name, value)
