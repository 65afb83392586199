"""A rule of the user's is tried before it trains: whether it is one map of every head by itself.

The particle model calls a rule for one layer after the other, on all seeds and the heads they drew;
the limit calls it once, on all depth nodes and atoms; and equal heads of a layer are kept as one.
These are the same map only for a rule that is as `Rule` describes it. Another one trains without
complaint, and its runs change with the seeds beside them or stay away from the limit at every L.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from ...checks import shown
from ..heads import Heads, Layout
from ..units import Units
from .base import Rule, State, is_built_in
from .identity import NAMELESS, rule_text, snapshot

LAYERS, SEEDS, HEADS = 2, 2, 3
# Of the layer in which a rule is tried.
DEPTH = 0.5
# Sums in another batch may round otherwise: relative to the step, and to the heads it is added to.
OF_STEP, OF_HEADS = 1e-9, 16 * torch.finfo(torch.float64).eps
# What has been tried, so that a sweep tries its rule once.
MOST_TRIED = 200
_tried: set[tuple] = set()

ALL = slice(None)
# What a rule must do, what it does instead, and the remedy.
HEADS_APART = (
    "act on every head by itself",
    "whose step of a head changes by {} of itself with other heads beside it",
    "Sum over the entries of a head (dim=-2 of packed) and not over heads (dim=-1), in their dtype",
)
ROWS_APART = (
    "act on every seed, layer and depth node by itself",
    "whose step of one changes by {} of itself with others stacked beside it",
    "Sum over the entries of a head (dim=-2 of packed) alone, counting dimensions from the end",
)
ALL_APART = (
    "act on every head, seed, layer and depth node by itself",
    "whose step of one changes by {} of itself with others beside it",
    HEADS_APART[-1],
)
REPEATED = (
    "give one answer for the same heads, state, gradient and step",
    "whose second answer differs by {} of its step",
    "Draw nothing at random, and keep in the state what it remembers",
)
WEIGHTLESS = (
    "not look at the weights of heads",
    "whose step changes by {} of itself with other weights",
    "Equal heads must stay equal, whatever their weights",
)
CONTAINED = (
    "let a seed that diverged harm no other",
    "whose step of a seed changes by {} of itself when the gradient of another is not finite",
    "Decide nothing for all seeds at once",
)


def require_rule(
    rule: Rule, layout: Layout, dtype: torch.dtype, device: torch.device, steps: int
) -> None:
    """Refuse a rule that would train otherwise with other heads, seeds or layers beside.

    A rule that trains as one of ipslimit does is trusted. Others are tried once for heads of this
    layout, dtype and device and so many steps, and each time where they have no identity to be
    known by (`rule_text`). The trial takes some milliseconds.

    Raises
    ------
    TypeError, ValueError
        In one line, with the reason; also for a learning rate that these units cannot have.
    """
    if steps == 0:
        return
    rule = rule.suited(layout)
    rule.at(1, layout, DEPTH)
    if is_built_in(rule):
        return
    text, kind = rule_text(rule), type(rule)
    key = (text, kind.init, kind.update, layout, dtype, torch.device(device).type, steps)
    if key in _tried:
        return
    Trial(rule, layout, device, steps).run(dtype)
    if not text.startswith(NAMELESS):
        if len(_tried) >= MOST_TRIED:
            _tried.clear()
        _tried.add(key)


class Trial:
    """What a rule makes of random heads, together and by themselves.

    Gradients, which are O(1) in training, have sizes from 1e-8 to 1e4 here, by head and by step,
    and one is zero: a rule that looks at sizes (a clip, a stop) must come to do so. Heads lead with
    LAYERS SEEDS indices.
    """

    def __init__(self, rule: Rule, layout: Layout, device: torch.device, steps: int):
        self.rule, self.layout, self.device, self.steps = rule, layout, device, steps
        self.watched, self.before = True, (snapshot(rule), _told(_generators()))
        normal = self.numbers(0)
        packed = normal(layout.size, HEADS)
        self.heads, self.reweighted = (
            Heads.from_packed(packed, normal(HEADS).square(), layout) for _ in range(2)
        )
        self.inputs = {step: self.gradient(step) for step in (1, min(2, steps), steps)}

    def numbers(self, seed: int):
        """A function that draws normal numbers with the leading indices and a shape."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            numbers = torch.randn(LAYERS * SEEDS, *shape, generator=generator, dtype=torch.float64)
            return numbers.to(self.device)

        return normal

    def gradient(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of all heads at a step, and the means that go with them."""
        normal, layout = self.numbers(step), self.layout
        uniform = torch.special.ndtr(normal(1, HEADS))
        g = 10.0 ** (12.0 * uniform - 8.0) * normal(layout.size, HEADS)
        g[step % len(g), :, step % HEADS] = 0.0
        tokens = normal(layout.d, 1).expand(-1, -1, HEADS)
        return g, torch.cat([tokens, normal(layout.inner, HEADS)], dim=-2)

    def run(self, dtype: torch.dtype) -> None:
        """All of it; heads of `dtype`, too."""
        generators = _generators()
        try:
            together = self.walk(self.heads)
            self.watched = False  # what a rule does to itself and to others it has done by now
            self.require_same(self.walk(self.heads), together, REPEATED)
            for h in range(HEADS):
                one = (ALL, ALL, slice(h, h + 1))
                self.require_same(self.walk(self.heads, one), together, HEADS_APART, one)
            for r in range(LAYERS * SEEDS):
                one = (slice(r, r + 1),)
                self.require_same(self.walk(self.heads, one), together, ROWS_APART, one)
            self.require_same(self.walk_layers(), together, ROWS_APART)
            self.walk_on()
            self.require_same(self.walk(self.reweighted), together, WEIGHTLESS)
            others = (slice(1, None),)
            spoilt = [t[others] for t in self.walk(self.heads, diverged=True)]
            self.require_same(spoilt, together, CONTAINED, others)
            if dtype != torch.float64:
                self.walk(self.heads.to(dtype))
            self.require_unchanged()
        finally:
            _restore(generators)

    def walk(
        self, heads: Heads, part: tuple[slice, ...] = (ALL,), diverged: bool = False
    ) -> list[torch.Tensor]:
        """Packed heads after every step, of a part of them by itself, or with a seed spoilt."""
        heads = _part(heads, part)
        state, after = self.init(heads), []
        for step, (g, means) in self.inputs.items():
            g, means = (t[part].to(heads.dtype, copy=True) for t in (g, means))
            if diverged:
                g[0, ::2], g[0, 1::2] = torch.nan, torch.inf
            heads, state = self.update(heads, state, heads.with_packed(g), step, means)
            after.append(heads.packed)
        return after

    def walk_layers(self) -> list[torch.Tensor]:
        """The same as the particle model goes: one state of all layers, updated one by one."""
        heads = self.heads.map(lambda t: t.unflatten(0, (LAYERS, SEEDS)))
        state, after = self.init(heads), []
        for step, inputs in self.inputs.items():
            g, means = (t.unflatten(0, (LAYERS, SEEDS)) for t in inputs)
            moved = []
            for r, layer in enumerate(heads):
                old = {name: t[r] for name, t in state.items()}
                moved.append(self.update(layer, old, layer.with_packed(g[r]), step, means[r]))
            heads = heads.with_packed(torch.stack([layer.packed for layer, _ in moved]))
            state = {name: torch.stack([new[name] for _, new in moved]) for name in state}
            after.append(heads.packed.flatten(0, 1))
        return after

    def walk_on(self) -> None:
        """One head of one seed beside all of them, at all steps that rules have plans for."""
        part = (slice(-1, None), ALL, slice(-1, None))
        heads, one = self.heads, _part(self.heads, part)
        state, own = self.init(heads), self.init(one)
        for step in plausible_steps(self.steps):
            g, means = self.gradient(step)
            heads, state = self.update(heads, state, heads.with_packed(g), step, means)
            g, means = g[part].contiguous(), means[part].contiguous()
            one, own = self.update(one, own, one.with_packed(g), step, means)
            self.require_same([one.packed], [heads.packed], ALL_APART, part, f" at step {step}")

    def init(self, heads: Heads) -> State:
        state = self.call("init", [heads.packed, heads.weights], heads)
        demand = f"make a state of tensors of shape (*heads.lead, ...) with lead {(*heads.lead,)}"
        remedy = "Use zeros_like(heads.packed), or heads.packed.new_zeros(*heads.lead, ...)"
        if not isinstance(state, dict):
            self.refuse(TypeError, f"{demand}, a dict", f"whose init gave {shown(state)}", remedy)
        for name, t in state.items():
            if not isinstance(t, torch.Tensor) or t.shape[: len(heads.lead)] != heads.lead:
                self.refuse(TypeError, demand, f"whose init gave {_form(t)} for {name}", remedy)
        return state

    def update(
        self, heads: Heads, state: State, gradient: Heads, step: int, means: torch.Tensor
    ) -> tuple[Heads, State]:
        more = (means,) if self.rule.uses_means else ()
        given = [heads.packed, heads.weights, gradient.packed, *more, *state.values()]
        answer = self.call("update", given, heads, dict(state), gradient, step, *more)
        self.require_form(heads, state, answer)
        return answer

    def require_form(self, heads: Heads, state: State, answer: object) -> None:
        """Refuse anything but heads and state like those given."""
        remedy = "Return heads.with_packed(...), and a dict of what init made"
        pair = isinstance(answer, tuple) and len(answer) == 2
        if not (pair and isinstance(answer[0], Units) and isinstance(answer[1], dict)):
            self.refuse(TypeError, "return (heads, state)", f"which gave {shown(answer)}", remedy)
        moved, new = answer
        if moved.layout != heads.layout or not torch.equal(moved.weights, heads.weights):
            demand = "return heads with the weights and layout of those given"
            self.refuse(ValueError, demand, f"which gave others, {moved!r}", remedy)
        if new.keys() != state.keys():
            demand = f"keep the names of the state that init made, {sorted(state)}"
            self.refuse(ValueError, demand, f"which gave {sorted(new)}", remedy)
        pairs = {"packed": (heads.packed, moved.packed)} | {n: (state[n], new[n]) for n in new}
        for name, (was, now) in pairs.items():
            if _form(now) != _form(was):
                demand = f"leave the form of {name} as it is, {_form(was)}"
                self.refuse(TypeError, demand, f"which gave {_form(now)}", remedy)

    def call(self, method: str, given: list[torch.Tensor], *arguments):
        """Call the rule, which may change nothing of what it is given."""
        copies = [t.clone() for t in given] if self.watched else []
        rule = self.rule
        if method == "update":  # as in training
            rule = rule.at(arguments[3], self.layout, DEPTH, arguments[0].packed)
        try:
            answer = getattr(rule, method)(*arguments)
        except Exception as error:  # whatever the user's code raises
            kind = TypeError if isinstance(error, TypeError) else ValueError
            names = ("heads", "state", "gradient", "step", "means")[: len(arguments)]
            finite = all(bool(torch.isfinite(t).all()) for t in given)
            where = f"of shape {tuple(given[0].shape)}" if finite else "where a seed is not finite"
            raise kind(
                f"rule must be callable as {method}({', '.join(names)}) for heads with any leading "
                f"dimensions and numbers; got {shown(self.rule)}, which failed {where}: "
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            ) from error
        if not all(bool(_same(t, copy).all()) for t, copy in zip(given, copies, strict=False)):
            demand = "leave what it is given unchanged"
            what = f"whose {method} works in place"
            self.refuse(ValueError, demand, what, "Compute new tensors, by mul and not by mul_")
        if self.watched:  # also a rule that becomes in the end what it was
            self.require_unchanged()
        return answer

    def require_unchanged(self) -> None:
        """Refuse a rule that is another one after it was called, or has drawn random numbers."""
        (fields, generators), after = self.before, snapshot(self.rule)
        for name in {**fields, **after}:
            was, now = fields.get(name, "absent"), after.get(name, "absent")
            if was != now:
                what = f"whose {name} was {was:.60} and is {now:.60} after it was called"
                remedy = "Compute it from step, or keep it in the state"
                self.refuse(ValueError, "not change itself", what, remedy)
        if generators != _told(_generators()):
            demand = "leave the global generators of random numbers alone"
            self.refuse(ValueError, demand, "which draws or seeds", "Draw nothing at random")

    def require_same(
        self,
        after: list[torch.Tensor],
        together: list[torch.Tensor],
        reason: tuple[str, str, str],
        part: tuple[slice, ...] = (ALL,),
        when: str = "",
    ) -> None:
        """Refuse where a part of the heads went another way than with all of them together."""
        start, (demand, what, remedy) = self.heads.packed[part], reason
        shares: list[float] = []
        for one, other in zip(after, (t[part] for t in together), strict=True):
            gap = torch.where(_same(one, other), 0.0, (one - other).abs()).amax(-2)
            step = torch.maximum((one - start).abs(), (other - start).abs()).amax(-2)
            step = step.nan_to_num(torch.inf, torch.inf)  # what overflows has no size to compare by
            size = torch.maximum(start.abs(), other.abs()).amax(-2).nan_to_num(torch.inf, torch.inf)
            if not (gap <= OF_STEP * step + OF_HEADS * size).all():
                share = torch.where(gap == 0.0, 0.0, (gap / step).nan_to_num(1.0, 1.0))
                shares.append(float(share.max()))
        if shares:
            self.refuse(ValueError, demand, what.format(f"{max(shares):.2g}") + when, remedy)

    def refuse(self, kind: type[Exception], demand: str, what: str, remedy: str) -> None:
        raise kind(f"rule must {demand}; got {shown(self.rule)}, {what}. {remedy}.")


def plausible_steps(steps: int) -> list[int]:
    """The steps up to a number at which a rule may do something that it does not do at others.

    All of the first, then round numbers and powers of two, and the last.
    """
    chosen = set(range(1, 21)) | {steps}
    for power in range(1, 6):
        chosen |= set(range(10**power, 10 ** (power + 1), 10**power))
    chosen |= {2**power for power in range(20)}
    return sorted(step for step in chosen if step <= steps)


def _part(heads: Heads, part: tuple[slice, ...]) -> Heads:
    """Some of the leading indices, rows and heads, by themselves."""
    rows, _, columns = (*part, ALL, ALL)[:3]
    weights = heads.weights[rows, columns].contiguous()
    return Heads.from_packed(heads.packed[part].contiguous(), weights, heads.layout)


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Entry by entry, where NaN is NaN."""
    return (a == b) | ((a != a) & (b != b))


def _form(t: object) -> str:
    if not isinstance(t, torch.Tensor):
        return shown(t)
    gradient = " with a gradient" if t.requires_grad else ""
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)} on {t.device.type}{gradient}"


def _generators() -> tuple:
    """The states of the global generators."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _told(generators: tuple) -> tuple:
    """The same as what can be compared."""
    ours, (name, keys, *rest), python = generators
    return ours.numpy().tobytes(), name, keys.tobytes(), rest, python


def _restore(generators: tuple) -> None:
    torch.set_rng_state(generators[0])
    np.random.set_state(generators[1])
    random.setstate(generators[2])
