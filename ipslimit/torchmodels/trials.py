"""Whether a rescaling leaves what a module computes as it is, found out by calling it alone."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .bare import Bare, kind_of
from .pairs import Pair, Part

# Powers of two change no mantissa. So large that whatever is clamped in between is reached.
SCALES = (2.0**8, 2.0**-8)
TOLERANCE = 1e-5
_SEEN = 1e-2  # by how much the outputs must change where one half alone is rescaled, or both are
_TOKENS = 6
_HEADS = ("num_heads", "n_heads", "heads", "num_attention_heads", "n_head")
_ROTARY = ("rotary_ndims", "rotary_dim", "head_dim", "head_size", "attention_head_size")
_CONTEXT = ("key_value_states", "encoder_hidden_states", "context", "memory")
# which of them say where a token goes, and which with what weight
_ROUTES = {"top_k_index": True, "top_k_weights": False}
_DISTANCES = 1024
_WINDOW = 1024  # tokens of the largest window that is filled
_LEFT = object()  # the argument is left out
_MOST = 60  # calls to be tried of one shape
Call = tuple[tuple, dict]


class Trials:
    """Tries pairs in the module they were found in, every kind of module once."""

    def __init__(self):
        self._changes: dict[tuple, float | None] = {}
        self._site: nn.Module | None = None

    def change(self, site: nn.Module, pairs: Sequence[Pair]) -> float | None:
        """The largest change of an output by a rescaling, relative to that by one half alone.

        None if the module cannot be called alone, or does not use the pairs. Of many pairs the
        first and the last are tried: they are blocks of the same matrices.
        """
        tried = pairs if len(pairs) <= 2 else (pairs[0], pairs[-1])
        places = {id(p): i for i, p in enumerate(site.parameters())}
        parts = [part for pair in tried for part in pair.parts]
        if not all(id(part.parameter) in places for part in parts):
            return None
        where = tuple(
            tuple((places[id(part.parameter)], part.key()[1], n) for part, n in pair.powers)
            for pair in tried
        )
        if self._site is not site:
            self._site, self._kind, self._subject = site, kind_of(site), None
        key = (self._kind, where)
        if key not in self._changes:
            with torch.device("cpu"):
                if self._subject is None:
                    self._subject = _Subject(site)
                self._changes[key] = self._subject.change(tried)
        return self._changes[key]


class _Subject:
    """A bare copy of a site, and how it is called."""

    def __init__(self, site: nn.Module):
        self.site = site
        self._calls: list[tuple[Call, list[torch.Tensor]]] = []
        self._untried: Iterator[Call] | None = None
        try:
            self._bare = Bare(site)
        except (ValueError, NotImplementedError, RuntimeError):
            self._bare = None

    def change(self, pairs: Sequence[Pair]) -> float | None:
        """As `Trials.change`, of all these: by the first call on which each has an influence."""
        if self._bare is None or not pairs:
            return None
        for call, expected in self._working(pairs[0].first.matrix):
            found = [
                self._changes(call, expected, pair, scale)
                for pair, scale in itertools.product(pairs, SCALES)
            ]
            if not all(max(change) > _SEEN for change in found):
                continue
            worst = max(both / min(max(both, half), 1.0) for both, half in found)
            if worst > TOLERANCE or self._uses_all(call, pairs):
                return worst
        return None

    def _working(self, matrix: Part) -> Iterator[tuple[Call, list[torch.Tensor]]]:
        """Calls that give finite outputs, and these; known ones first."""
        yield from self._calls
        if self._untried is None:
            self._untried = _ways(self.site, _width(matrix))
        for call in self._untried:
            try:
                outputs = self._outputs(call)
            except Exception:  # whatever a module raises of inputs it is not made for
                continue
            if outputs and all(bool(torch.isfinite(x).all()) for x in outputs):
                self._calls.append((call, outputs))
                yield call, outputs

    @torch.no_grad()
    def _outputs(self, call: Call) -> list[torch.Tensor]:
        return _floating(self._bare(*call[0], **call[1]))

    @torch.no_grad()
    def _changes(
        self, call: Call, expected: list[torch.Tensor], pair: Pair, scale: float
    ) -> tuple[float, float]:
        """How much the outputs change by a pair's scale, and by that of its first half alone."""
        blocks = [part.of(self._bare.parameter(part.parameter)) for part in pair.parts]
        before = [block.clone() for block in blocks]
        try:
            self._multiply(pair, scale, (1,))
            half = _difference(self._outputs(call), expected)
            self._multiply(pair, scale, (-1,))
            return _difference(self._outputs(call), expected), half
        except Exception:  # what could be called cannot be once it is rescaled
            return math.inf, math.inf
        finally:
            for block, values in zip(blocks, before, strict=True):
                block.copy_(values)

    def _multiply(self, pair: Pair, scale: float, halves: tuple[int, ...]) -> None:
        for part, n in pair.powers:
            if n in halves:
                part.of(self._bare.parameter(part.parameter)).mul_(scale**n)

    def _uses_all(self, call: Call, pairs: Sequence[Pair]) -> bool:
        """Whether every weight of the site beside those of the pairs has a part in the outputs.

        One that has none may be used in other calls, and to another effect.
        """
        own = {id(self._bare.parameter(part.parameter)) for pair in pairs for part in pair.parts}
        weights = [p for p in self._bare.module.parameters() if p.dim() > 1 and id(p) not in own]
        if not weights:
            return True
        for weight in weights:
            weight.requires_grad_(True)
        try:
            with torch.enable_grad():
                outputs = _floating(self._bare(*call[0], **call[1]))
                total = sum(
                    (x * torch.linspace(1.0, 2.0, x.numel()).view_as(x)).sum() for x in outputs
                )
                found = torch.autograd.grad(total, weights, allow_unused=True)
            return all(g is not None and bool(g.any()) for g in found)
        except Exception:  # some functions have no gradient
            return False
        finally:
            for weight in weights:
                weight.requires_grad_(False)


def _floating(outputs: object) -> list[torch.Tensor]:
    leaves = tree_leaves(outputs)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]


def _width(matrix: Part) -> int:
    """How many inputs a matrix has."""
    return matrix.parameter.shape[-2 if matrix.transposed else -1]


def _difference(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest change of an output, relative to its largest entry."""
    if len(outputs) != len(expected):
        return math.inf
    changes = [
        float((a - b).abs().amax() / b.abs().amax().clamp_min(1e-30))
        for a, b in zip(outputs, expected, strict=True)
        if b.numel()
    ]
    return math.inf if any(map(math.isnan, changes)) else max(changes, default=0.0)


def _ways(module: nn.Module, width: int) -> Iterator[Call]:
    """Arguments to try: tokens of a width in every layout, and what else forward asks for by name.

    What is not known by its name is None, as caches and biases of attention may be.
    """
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    generator = torch.Generator().manual_seed(1)
    for lead in _leads(module):
        x = torch.randn(*lead, width, generator=generator, dtype=torch.float32)
        values = {p.name: _values(p.name, module, x) for p in named[1:]}
        choices = {
            p.name: values[p.name] or (None,) if p.default is p.empty else (_LEFT, *values[p.name])
            for p in named[1:]
            if p.default is p.empty or (values[p.name] and "mask" not in p.name)
        }
        tried = itertools.islice(itertools.product(*choices.values()), _MOST)
        for chosen in tried:
            given = dict(zip(choices, chosen, strict=True))
            yield (x,), {name: value for name, value in given.items() if value is not _LEFT}


def _leads(module: nn.Module) -> Iterator[tuple[int, ...]]:
    """Leading shapes of tokens: as many as fit a window, if the module has one."""
    yield 2, _TOKENS
    for value in (getattr(part, "window_size", None) for part in module.modules()):
        sides = value if isinstance(value, (tuple, list)) else (value, value)
        fit = len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides)
        if fit and sides[0] * sides[1] <= _WINDOW:
            yield 2, sides[0] * sides[1]
            yield 2, sides[0] * sides[1] + 1  # with a token of the class
            yield 2, *sides
            break
    yield (max(2 * _TOKENS, _experts(module)),)
    yield 2, 4, 4


def _values(name: str, module: nn.Module, x: torch.Tensor) -> tuple:
    """Values for an argument of this name, of which one may do."""
    batch, tokens = x.shape[0], x.shape[-2]
    if name == "position_embeddings":
        return tuple(_cosines(tokens, n) for n in _rotary_widths(module))
    if "mask" in name:  # none, nothing added, everything attended to
        square = (batch, 1, tokens, tokens)
        return None, torch.zeros(square), torch.ones(square)
    if name == "residual":
        return (torch.zeros_like(x),)
    if name == "alibi":
        heads = next((n for n in (getattr(module, h, None) for h in _HEADS) if n), 1)
        return None, torch.zeros(batch * heads, 1, tokens)
    if name in _CONTEXT:
        return (x.flip(-2),)
    if name == "rel_embeddings":  # of as many distances as there may be
        return (x.reshape(-1, x.shape[-1])[torch.arange(_DISTANCES) % (batch * tokens)],)
    experts = _experts(module)
    if experts and x.dim() == 2 and name in _ROUTES:
        first = torch.arange(tokens) % experts
        routes = torch.stack([first, (first + 1) % experts], dim=1)
        return (routes,) if _ROUTES[name] else (torch.full(routes.shape, 0.5),)
    return ()


def _cosines(tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.linspace(0.0, 3.0, tokens * width).view(1, tokens, width)
    return angles.cos(), angles.sin()


def _rotary_widths(module: nn.Module) -> list[int]:
    """What the cosines of rotary positions may have as their last dimension."""
    found = [getattr(part, name, None) for part in module.modules() for name in _ROTARY]
    whole = list(dict.fromkeys(n for n in found if isinstance(n, int) and n > 1))
    return list(dict.fromkeys([*whole, *(n // 2 for n in whole)]))


def _experts(module: nn.Module) -> int:
    """How many experts a module holds in tensors of three dimensions; 0 if it has none."""
    return next((len(p) for p in module._parameters.values() if p is not None and p.dim() == 3), 0)
