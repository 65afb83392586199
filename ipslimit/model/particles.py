"""The interacting-particle transformer: L layers of H heads, residual branches scaled by 1/L.

    x_{r+1} = x_r + Gamma(x_r; nu_r) / L        forward
    p_r = p_{r+1} + (dGamma/dx)^T p_{r+1} / L   backward
    theta <- U(theta, g)                        every head of every layer, g from x_r and p_{r+1}

The forward sweep stores x only. The backward sweep computes p, the head gradients of one layer,
and applies that layer's update at once, so gradients of more than one layer never exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ..checks import require_int, require_real, require_room, resolve_device, shown
from .layers import Layers, Training
from .problem import Problem
from .rules import Rule
from .rules.base import is_built_in
from .rules.identity import require_identity, rule_text
from .rules.trial import require_rule
from .runs import ParticleRun, empty_run, repeated
from .sharded import require_group, shard
from .units import Units

# Counts of heads must be exact as float64 weights n / H.
MOST_HEADS = 2**53
# Of one call; more can be named by their indices in another.
MOST_SEEDS = 2**24


def train_particles(
    problem: Problem,
    rule: Rule,
    depth: int,
    heads: int | None,
    steps: int,
    seeds: int | Iterable[int] = 1,
    root_seed: int = 0,
    record: Iterable[int] | None = None,
    residual_exponent: float = 1.0,
    device: object = "auto",
    *,
    nodes: int = 1024,
    nodes_seed: int = 0,
    group: object = None,
) -> ParticleRun:
    """Train L-layer, H-head transformers, all seeds at once, by full-batch steps of `rule`.

    Parameters
    ----------
    problem : Problem
    rule : Rule
        `SGD`, `AdamW`, `BlockAdamW`, `SBOAdamW`, or `Rebalance` of one of them; or one's own, which
        is tried on random heads first and refused if it is not what `Rule` describes.
    depth : int
        L.
    heads : int or None
        H, heads per layer, drawn i.i.d. from `problem.law`. None is H = infinity: every layer
        holds the whole law; nothing is random then, and all seeds share one computed answer.
    steps : int >= 0
    seeds : int n (seeds 0..n-1) or a sequence of seed indices
    root_seed : int >= 0
        The draws of a seed depend on (root_seed, L, H, seed index) alone.
    record : steps at which x, p and heads are kept
        The last step by default.
    residual_exponent : float
        Residual branches are scaled by L^-residual_exponent; only 1 has the ODE limit.
    device : "auto", "cpu", "cuda" or "cuda:i"
    nodes, nodes_seed : int
        For heads=None with a sampled law: its quadrature, `law.nodes(nodes, nodes_seed)`.
    group : torch.distributed process group, optional
        Share the heads of every layer out to its processes, which all make this same call. Each
        gets the whole x, p and loss (the same bits in all of them, those of a single process up to
        rounding), and keeps in `heads` and `atoms` only its own share.

    Returns
    -------
    ParticleRun

    Raises
    ------
    TypeError, ValueError
        For bad arguments and unfit rules. A run that diverges does not raise: its seeds are
        flagged.

    Notes
    -----
    With `Atoms` the H draws are kept as min(H, M) distinct heads with multinomial weights, which
    is exact (see `Atoms`).
    """
    require_problem(problem, rule)
    depth = require_int("depth", depth)
    if heads is not None:
        heads = require_int("heads", heads, 1, MOST_HEADS)
    steps = require_int("steps", steps, 0)
    seeds = _seed_indices(seeds)
    root_seed = require_int("root_seed", root_seed, 0)
    record = recorded_steps(record, steps)
    residual_exponent = require_real("residual_exponent", residual_exponent, 0.0, 10.0)
    require_int("nodes", nodes)
    require_int("nodes_seed", nodes_seed, 0)
    problem.law.check_nodes(nodes, nodes_seed)
    device = resolve_device(device)
    stored = problem.law.stored(nodes if heads is None else heads)
    _require_room(problem, depth, stored, len(seeds), steps, device)
    rule.require_rates([problem.law.layout])
    require_rule(rule, problem.law.layout, problem.dtype, device, steps)
    share = None
    if group is not None:
        require_identity("rule", rule_text(rule))
        same = {"rule": rule_text(rule), "depth": depth, "heads": heads, "steps": steps}
        same |= {"seeds": seeds, "root_seed": root_seed, "record": record, "nodes": nodes}
        same |= {"residual_exponent": residual_exponent, "nodes_seed": nodes_seed}
        same |= {"law": type(problem.law).__name__}
        same |= {"contexts": (*problem.contexts.shape, float(problem.contexts.sum()))}
        share = require_group(group, same)

    counts = atoms = None
    if heads is None:
        whole = problem.law.whole(nodes, nodes_seed, problem.dtype)
        if share is not None:
            own = shard(whole.count, *share)
            whole = whole.map(lambda t: t[..., own])
        # a copy, also where depth is 1: training must not reach the law itself
        start = whole.map(lambda t: t.expand(depth, 1, *t.shape).clone())
    else:
        start, counts, atoms = _drawn(problem, depth, heads, seeds, root_seed, share)
    distinct = seeds if heads is not None else seeds[:1]
    run = empty_run(depth, heads, distinct, steps, problem, device)
    run.root_seed, run.counts, run.atoms = root_seed, counts, atoms
    own = start.map(lambda t: t.to(device).contiguous())
    del start  # or there would be a second copy of all heads
    _train(own, problem, rule, steps, record, run, residual_exponent, group)
    return run if heads is not None else repeated(run, seeds)


def _require_room(
    problem: Problem, depth: int, stored: int, seeds: int, steps: int, device: torch.device
) -> None:
    """Refuse sizes whose heads, or whose hidden states and losses, no memory could hold."""
    names = "depth, heads and seeds"
    require_room(names, depth * seeds * stored * problem.law.layout.size, problem.dtype)
    if device.type == "cpu":
        tokens = (depth + 1) * problem.contexts.numel()
        require_room("depth, steps and seeds", seeds * (tokens + steps), problem.dtype)


def _drawn(
    problem: Problem, depth: int, heads: int, seeds: Sequence[int], root_seed: int, share
) -> tuple[Units, torch.Tensor | None, torch.Tensor | None]:
    """Heads (L, seeds) drawn from the law, or a process's share of them; counts and atoms.

    One seed after the other, so that no more than one draw exists beside the heads.
    """
    start, counts, atoms = None, [], []
    for i, seed in enumerate(seeds):
        rng = draw_generator(root_seed, depth, heads, seed)
        draw = problem.law.drawn(heads, depth, rng, problem.dtype)
        if share is not None:
            draw = draw.share(shard(draw.packed.shape[-1], *share))
        if start is None:
            shape = (depth, len(seeds))
            empty = (t.new_empty(*shape, *t.shape[1:]) for t in (draw.packed, draw.weights))
            start = Units.from_packed(*empty, problem.law.layout)
        start.packed[:, i], start.weights[:, i] = draw.packed, draw.weights
        counts.append(draw.counts)
        atoms.append(draw.atoms)
    if counts[0] is None:
        return start, None, None
    return start, torch.stack(counts), torch.stack(atoms)


def train_from(
    start: Units,
    problem: Problem,
    rule: Rule,
    steps: int,
    record: Sequence[int],
    run: ParticleRun,
    residual_exponent: float = 1.0,
    device: object = "cpu",
    record_heads: bool = True,
) -> ParticleRun:
    """Train from given heads with leading dimensions (L, seeds), filling `run`."""
    rule.require_rates([start.layout])
    require_rule(rule, start.layout, start.dtype, device, steps)
    own = start.map(lambda t: t.to(device).clone(memory_format=torch.contiguous_format))
    return _train(own, problem, rule, steps, record, run, residual_exponent, None, record_heads)


def _train(
    heads: Units,
    problem: Problem,
    rule: Rule,
    steps: int,
    record: Sequence[int],
    run: ParticleRun,
    residual_exponent: float,
    group: object,
    record_heads: bool = True,
) -> ParticleRun:
    """Train these very heads, filling `run`; with a process group, those of this process."""
    device = heads.device
    run.residual_exponent, run.rule = residual_exponent, rule_text(rule)
    state = {name: t.contiguous() for name, t in rule.init(heads).items()}
    if not is_built_in(rule):  # they may be the heads themselves, one tensor twice, or the rule's
        state = {name: t.clone() for name, t in state.items()}
    scale = float(heads.lead[0]) ** -residual_exponent
    layers = make_layers(heads, problem.causal, scale, run.cost, rule, problem.B, problem.N, group)
    contexts, targets = problem.contexts.to(device), problem.targets.to(device)
    per_token = 1.0 / (problem.B * problem.N)
    for step in range(steps + 1):
        keep, last = step in record, step == steps
        if keep and record_heads:
            run.heads[step] = heads.map(lambda t: t.transpose(0, 1).clone())
        if keep and problem.probes:
            _record_probes(layers, problem, run, step, device)
        x = layers.forward(contexts)
        run.loss[:, step], p_end = problem.loss_and_costate(x[-1], targets)
        run.flag(step, _finite(x[-1]) & torch.isfinite(run.loss[:, step]))
        if last and not keep:
            break
        # every layer's update is made where the costate passes it
        training = None if last else Training(rule, state, step + 1, per_token, ~run.diverged)
        p = layers.backward(x, p_end, keep, training)
        # p only ever adds up, so a non-finite costate anywhere shows at the first layer
        run.flag(step, _finite(p[0]))
        if keep:
            run.x[step], run.p[step] = x.transpose(0, 1), p.transpose(0, 1)
        del x, p  # before the next step makes its own
    run.notes = rule.notes(state)
    return run


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Which seeds of (seeds, B, N, d) are finite."""
    return torch.isfinite(x).flatten(1).all(1)


def _record_probes(layers: Layers, problem: Problem, run: ParticleRun, step: int, device) -> None:
    contexts, targets = (t.to(device) for t in problem.probes)
    x = layers.forward(contexts)
    run.probe_loss[step], p_end = problem.loss_and_costate(x[-1], targets)
    p = layers.backward(x, p_end, keep=True)
    run.probe_x[step], run.probe_p[step] = x.transpose(0, 1), p.transpose(0, 1)


def draw_generator(root_seed: int, depth: int, heads: int, seed: int) -> np.random.Generator:
    """The random generator of one run's draws: a function of these four numbers alone."""
    return np.random.default_rng(np.random.SeedSequence((root_seed, depth, heads, seed)))


def require_problem(problem: object, rule: object) -> None:
    if not isinstance(problem, Problem):
        raise TypeError(f"problem must be ipslimit.Problem; got {type(problem).__name__}.")
    if not isinstance(rule, Rule):
        raise TypeError(
            f"rule must be an optimizer rule such as ipslimit.AdamW(lr=0.02); got {shown(rule)}. "
            "A class must be called first; a torch optimizer is not a rule."
        )


def recorded_steps(record: Iterable[int] | None, steps: int) -> tuple[int, ...]:
    """Sorted distinct steps to record; the last one by default."""
    if record is None:
        return (steps,)
    if not _is_sequence(record):
        raise TypeError(
            f"record must be a sequence of steps; got {shown(record)}. Use e.g. [0, {steps}]."
        )
    chosen = sorted({require_int("record", k, 0) for k in record})
    if not chosen or chosen[-1] > steps:
        raise ValueError(
            f"record must name at least one step of 0..{steps}; got {chosen}. Raise steps, or "
            "record earlier ones."
        )
    return tuple(chosen)


def _seed_indices(seeds: int | Iterable[int]) -> tuple[int, ...]:
    if _is_sequence(seeds):
        indices = tuple(require_int("seeds", s, 0) for s in seeds)
        if not indices or len(set(indices)) != len(indices):
            raise ValueError(
                f"seeds must be distinct indices, at least one; got {list(indices)}. "
                "Repeated seeds would count the same draws twice."
            )
        return indices
    return tuple(range(require_int("seeds", seeds, 1, MOST_SEEDS)))


def _is_sequence(value: object) -> bool:
    if isinstance(value, (str, bytes)):
        return False
    try:
        iter(value)
    except TypeError:  # also of tensors and arrays without a dimension, which claim to be iterable
        return False
    return True


def make_layers(
    heads: Units,
    causal: bool,
    scale: float,
    cost: dict[str, int],
    rule: Rule,
    contexts: int,
    tokens: int,
    group=None,
) -> Layers:
    """The passes for these sizes (heads per layer, contexts and tokens) and this rule.

    With a process group, `heads` are those of this process.
    """
    if not heads.is_compiled(contexts, tokens):
        return Layers(heads, causal, scale, cost, group)
    from ..cpu.layers import CompiledLayers  # numba takes a second to import
    from ..cpu.rules import is_compiled

    kind = CompiledLayers if is_compiled(rule, heads) else Layers
    return kind(heads, causal, scale, cost, group)
