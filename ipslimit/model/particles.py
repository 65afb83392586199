"""The interacting-particle transformer: L layers of H heads, residual branches scaled by 1/L.

    x_{r+1} = x_r + Gamma(x_r; nu_r) / L        forward
    p_r = p_{r+1} + (dGamma/dx)^T p_{r+1} / L   backward
    theta <- U(theta, g)                        every head of every layer, g from x_r and p_{r+1}

The forward sweep stores x only. The backward sweep computes p, the head gradients of one layer,
and applies that layer's update at once, so gradients of more than one layer never exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ..checks import require_bool, require_int, require_real, resolve_device
from ..progress import Watcher, require_progress, watching
from .batch import Batch
from .branch import Branch, States
from .callbacks import asks_to_stop, require_callback
from .draws import drawn_layers, require_layers_room, whole_layers
from .ends import Ends, EndStates
from .feed import Feed
from .layers import Layers, Training
from .layers_chosen import make_layers
from .rules import Rule
from .rules.base import is_built_in
from .rules.identity import require_identity, rule_text
from .rules.trial import require_rule
from .run_arguments import evaluated_steps, recorded_steps, require_problem, seed_indices
from .runs import ParticleRun, empty_run, repeated
from .sharded import require_group
from .tracers import all_costates, lit, lit_costate
from .training_problem import TrainingProblem
from .units import Units
from .warm import by_seed, going_on
from .work import training_work

# What a bar says meanwhile.
DOING = "training {layers} layers, step {step}"
# Called after every step k with (k, run); True stops the run there.
Callback = Callable[[int, ParticleRun], object]


def train_particles(
    problem: TrainingProblem,
    rule: Rule,
    depth: int,
    heads: int | Mapping[str, int] | None,
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
    start: ParticleRun | None = None,
    keep_state: bool = False,
    evaluate: Iterable[int] = (),
    callback: Callback | None = None,
    progress: bool | Watcher | None = None,
) -> ParticleRun:
    """Train L-layer, H-head transformers, all seeds at once, by steps of `rule`.

    Parameters
    ----------
    problem : Problem or TokenProblem
    rule : Rule
        `SGD`, `AdamW`, `BlockAdamW`, `SBOAdamW`, `GaugeAdamW` or another of `ipslimit.model.rules`,
        or `Rebalance` of one of them; or one's own, which is tried on random heads first and
        refused if it is not what `Rule` describes.
    depth : int
        L.
    heads : int, dict or None
        H, heads per layer, drawn i.i.d. from `problem.law`; for a `Block` of every family, or a
        dict such as {"attention": 16, "perceptron": 64}. None is H = infinity: every layer holds
        the whole law; nothing is random then, and all seeds share one computed answer.
    steps : int >= 0
    seeds : int n (seeds 0..n-1) or a sequence of seed indices
    root_seed : int >= 0
        The draws of a seed depend on (root_seed, L, H, seed index) alone; those of perceptrons on
        their own H.
    record : steps at which x, p and heads are kept
        The last step by default; () for none.
    residual_exponent : float
        Residual branches are scaled by L^-residual_exponent; only 1 has the ODE limit.
    device : "auto", "cpu", "cuda" or "cuda:i"
        "auto" is the card where there is one and, of these sizes, it is the faster; see `work`.
    nodes, nodes_seed : int
        For heads=None with a sampled law: its quadrature, `law.nodes(nodes, nodes_seed)`.
    group : torch.distributed process group, optional
        Share the heads of every layer out to its processes, which all make this same call. Each
        gets the whole x, p and loss (the same bits in all of them, those of a single process up to
        rounding), and keeps in `units` and `unit_atoms` only its own share.
    start : ParticleRun, optional
        A run of the same arguments to go on from, trained with keep_state: from its units and
        state at its last step, on to step `steps`, with the batches, schedule and bias corrections
        of these steps. The same bits as one run in one go.
    keep_state : bool
        Keep the rule's state after the last step in `states`; it is as large as the units, or twice
        as large.
    evaluate : steps
        At which the loss on the probes alone is taken, beside those of `record`: a forward pass.
    callback : callable (k, run), optional
        Called at every step k with the run so far (its loss up to k, and what is recorded). If it
        returns True, the run stops there, before the update of step k; with keep_state it can be
        gone on from.
    progress : callable (k, layers, share), or bool, optional
        Called with every step k as it is begun, and at the end, with L and the share in [0, 1] of
        the steps that are done, as that of `solve_limit` is. True shows a bar where stderr is a
        terminal, and nothing where it is not.

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
    block = problem.block
    depth = require_int("depth", depth)
    numbers = None if heads is None else block.numbers(heads)
    steps = require_int("steps", steps, 0)
    seeds = seed_indices(seeds)
    root_seed = require_int("root_seed", root_seed, 0)
    record = recorded_steps(record, steps, empty=True)
    evaluate = evaluated_steps(evaluate, steps, problem)
    residual_exponent = require_real("residual_exponent", residual_exponent, 0.0, 10.0)
    require_int("nodes", nodes)
    require_int("nodes_seed", nodes_seed, 0)
    block.check_nodes(nodes, nodes_seed)
    stored = numbers or dict.fromkeys(block.laws, nodes)
    distinct = seeds if numbers is not None else seeds[:1]
    sizes = depth, stored, len(distinct), steps
    device = resolve_device(device, lambda: training_work(problem, *sizes).device())
    require_layers_room(problem, depth, stored, seeds, steps, device)
    rule.require_units(problem.layouts)
    for layout in problem.layouts:
        require_rule(rule, layout, problem.dtype, device, steps)
    require_callback(callback, "k", "run")
    require_progress(progress, "layers")
    keep_state = require_bool("keep_state", keep_state)
    share = None
    if group is not None:
        require_identity("rule", rule_text(rule))
        same = {"rule": rule_text(rule), "depth": depth, "heads": numbers, "steps": steps}
        same |= {"seeds": seeds, "root_seed": root_seed, "record": record, "nodes": nodes}
        same |= {"residual_exponent": residual_exponent, "nodes_seed": nodes_seed}
        same |= {"start": None if start is None else getattr(start, "last", 0)}
        share = require_group(group, same | problem.identity)

    run = empty_run(depth, numbers, distinct, steps, problem, device)
    run.root_seed, run.residual_exponent, run.rule = root_seed, residual_exponent, rule_text(rule)
    if numbers is None and not block.exact:
        run.of |= {"nodes": str(nodes), "nodes_seed": str(nodes_seed)}
    run.of["group"] = "none" if share is None else "process {} of {}".format(*share)
    ends = problem.make_ends((len(distinct),), device)
    states, first = None, 0
    if start is not None:
        run, branch, states = going_on(start, run, problem, ends, steps, record, evaluate)
        first = start.last
    elif numbers is None:
        branch = whole_layers(problem, depth, nodes, nodes_seed, share)
    else:
        branch = drawn_layers(problem, run, numbers, share)
    own = branch.map(lambda t: t.to(device).contiguous())
    del branch  # or there would be a second copy of all units
    with watching(progress, DOING) as watch:
        options = _Options(
            group, keep_state=keep_state, evaluate=evaluate, callback=callback, progress=watch
        )
        _train(own, ends, problem, rule, steps, record, run, options, states, first)
    return run if numbers is not None else repeated(run, seeds)


@dataclasses.dataclass(frozen=True)
class _Options:
    """How a run is trained, see `train_particles`."""

    group: object = None
    record_units: bool = True
    keep_state: bool = False
    evaluate: tuple[int, ...] = ()
    callback: Callback | None = None
    progress: Watcher | None = None


def train_from(
    start: Units | Branch,
    problem: TrainingProblem,
    rule: Rule,
    steps: int,
    record: Sequence[int],
    run: ParticleRun,
    residual_exponent: float = 1.0,
    device: object = "cpu",
    record_heads: bool = True,
) -> ParticleRun:
    """Train from given units with leading dimensions (L, seeds), filling `run`."""
    if isinstance(start, Units):
        start = problem.block.branch({next(iter(problem.block.laws)): start})
    rule.require_units(problem.layouts)
    for units in start.families.values():
        require_rule(rule, units.layout, units.dtype, device, steps)
    own = start.map(lambda t: t.to(device).clone(memory_format=torch.contiguous_format))
    run.residual_exponent, run.rule = residual_exponent, rule_text(rule)
    ends = problem.make_ends(own.lead[1:], device)
    options = _Options(record_units=record_heads)
    return _train(own, ends, problem, rule, steps, record, run, options)


def _train(
    branch: Branch,
    ends: Ends,
    problem: TrainingProblem,
    rule: Rule,
    steps: int,
    record: Sequence[int],
    run: ParticleRun,
    options: _Options,
    states: tuple[States, EndStates] | None = None,
    first: int = 0,
) -> ParticleRun:
    """Train these very units, filling `run`; with a process group, those of this process.

    From step `first` on, where `states` are those of the rule.
    """
    device = branch.device
    if states is None:
        states = _own_states(branch.init(rule), rule), ends.init(rule)
    states, end_states = states
    scale, sizes = float(run.depth) ** -run.residual_exponent, (problem.B, problem.N)
    tied = run.depth if problem.tied else None
    given = branch, scale, run.cost, rule, *sizes
    layers = make_layers(*given, options.group, tied)
    per_token = 1.0 / (problem.B * problem.N)
    feed = Feed(problem, device, steps)
    least = torch.full((), run.least_size, dtype=problem.dtype, device=device)
    for step in range(first, steps + 1):
        keep, run.last = step in record, step
        if options.progress is not None:
            options.progress(step, run.depth, (step - first) / (steps - first + 1))
        chosen, batch = feed(step)
        if problem.batch is not None:
            run.batches[step] = chosen
        if keep and options.record_units:
            run.units[step] = _recorded(branch, run.depth)
            run.ends |= {step: ends.tables()} if ends.families else {}
        if keep and problem.probe_count:
            _record_probes(layers, ends, problem, run, step, feed.probes)
        elif step in options.evaluate:
            probes = feed.probes, problem.B
            run.probe_loss[step] = ends.mean_loss(*probes, lambda *x: layers.forward(*x)[-1])
        x = layers.forward(ends.enter(batch.inputs), batch.sight, keep or step < steps)
        read = ends.read(x[-1], batch)
        run.loss[:, step] = read.loss
        run.flag(step, _finite(x[-1]) & torch.isfinite(run.loss[:, step]))
        if branch.norm is not None:
            least = torch.minimum(least, branch.norm.least_size(x[:-1]))
            # told where it can be read, for the host then waits for a card to say it
            if step == steps or options.callback is not None:
                run.least_size = float(least)
        run.stopped = options.callback is not None and asks_to_stop(options.callback(step, run))
        last = step == steps or run.stopped
        if last and not keep:
            break
        lit_p = _lit_costates(layers, problem, batch, x, read.costate) if keep else None
        # every layer's update is made where the costate passes it
        training = None if last else Training(rule, states, step + 1, per_token, ~run.diverged)
        p = layers.backward(x, read.costate, keep, batch.sight, training)
        # p only ever adds up, so a non-finite costate anywhere shows at the first layer
        run.flag(step, _finite(p[0]))
        if keep:
            run.x[step], run.p[step] = _recorded_tokens(layers, batch, x, p, lit_p)
        if training is not None:
            pulled = ends.pull(batch.inputs, p[0])
            end_states = ends.update(rule, end_states, read, pulled, step + 1, training.alive)
        del x, p, read  # before the next step makes its own
        if last:
            break
    if options.keep_state:
        run.units.setdefault(run.last, _recorded(branch, run.depth))
        run.ends |= {run.last: ends.tables()} if ends.families else {}
        run.end_states = {
            name: {n: t.clone() for n, t in state.items()} for name, state in end_states.items()
        }
        run.states = {
            family: {name: by_seed(t, run.depth) for name, t in state.items()}
            for family, state in states.items()
        }
    run.notes = branch.notes(rule, states, run.least_size)
    if options.progress is not None:
        options.progress(run.last, run.depth, 1.0)
    return run


def _own_states(states: States, rule: Rule) -> States:
    """States that a rule has made, as tensors that may be written to."""

    def own(t: torch.Tensor) -> torch.Tensor:
        # those of a user's rule may be the units themselves, one tensor twice, or the rule's
        return t.contiguous() if is_built_in(rule) else t.contiguous().clone()

    return {f: {name: own(t) for name, t in state.items()} for f, state in states.items()}


def _recorded(branch: Branch, depth: int) -> dict[str, Units]:
    return {n: u.map(lambda t: by_seed(t, depth)) for n, u in branch.families.items()}


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Which seeds of (seeds, B, N, d) are finite."""
    return torch.isfinite(x).flatten(1).all(1)


def _record_probes(
    layers: Layers, ends: Ends, problem: TrainingProblem, run: ParticleRun, step: int, batch: Batch
) -> None:
    x = layers.forward(ends.enter(batch.inputs), batch.sight, True)
    read = ends.read(x[-1], batch)
    run.probe_loss[step] = read.loss
    lit_p = _lit_costates(layers, problem, batch, x, read.costate)
    p = layers.backward(x, read.costate, True, batch.sight)
    run.probe_x[step], run.probe_p[step] = _recorded_tokens(layers, batch, x, p, lit_p)


def _lit_costates(
    layers: Layers, problem: TrainingProblem, batch: Batch, x: torch.Tensor, p_end: torch.Tensor
) -> torch.Tensor | None:
    """What is passed back in the light of `tracers`; None where there are none."""
    if batch.sight.tracers is None:
        return None
    return layers.backward(x, lit_costate(problem, x[-1], p_end, batch), True, lit(batch.sight))


def _recorded_tokens(
    layers: Layers, batch: Batch, x: torch.Tensor, pi: torch.Tensor, lit_pi: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and p at the layers, (seeds, L+1, B, N, d), of tokens as the user gave them."""
    p, at_layers = all_costates(pi, lit_pi, batch.sight), slice(None, None, layers.stages)
    return tuple(batch.restored(t[at_layers]).transpose(0, 1) for t in (x, p))
