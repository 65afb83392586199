"""Cost per digit of the limit: solves at frozen heads, and a whole training run."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import torch

from ipslimit import Heads, train_particles
from ipslimit.experiments.settings import Setting
from ipslimit.solvers import solve_limit

from . import limit_peers
from .limit_peers import METHODS, OURS, Frozen
from .timing import interleave

AT = 1e-6  # the error at which methods are compared
STEPS = 5
# Seconds: a call that takes longer is timed once, and no finer setting is tried if it is accurate
# or takes longer than the second.
SLOW, TOO_SLOW = 0.5, 2.0
DEPTHS = (64, 128, 256)  # Euler networks from which the order-1 extrapolation starts


def weak_case() -> Frozen:
    """The default study's problem at initialisation: 32 heads, d = m = 4, N = 8, B = 4."""
    problem = Setting().make_problem()
    heads = problem.law.heads
    return Frozen(problem.contexts, heads, _normal(*problem.contexts.shape, seed=1))


def strong_case() -> Frozen:
    """256 heads, d = m = 8, N = 16, B = 4, and the field ten times larger.

    Entries have standard deviation 0.6, at which dopri5 needs 250 evaluations for 1e-6.
    """
    H, d, N, B = 256, 8, 16, 4
    q, k, v, o = (0.6 * _normal(H, d, d, seed=i) for i in range(4))
    return Frozen(_normal(B, N, d, seed=4), Heads(q, k, v, 10.0 * o), _normal(B, N, d, seed=5))


CASES = {"weak": weak_case, "strong": strong_case}


def _normal(*shape: int, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen, dtype=torch.float64)


def run(quick: bool = False, progress=print) -> dict:
    frozen = []
    for name in ["weak"] if quick else CASES:
        for gradient in (False, True):
            frozen.append(_frozen(name, gradient, 5 if quick else 7, 10.0 if quick else 25.0))
            progress(_line(frozen[-1]))
    trained = _trained(5 if quick else 7)
    progress(f"after {STEPS} training steps: {trained}")
    return {"frozen": frozen, "trained": trained}


def _frozen(name: str, gradient: bool, rounds: int, budget: float) -> dict:
    """Error and time of every method at all its settings."""
    case = CASES[name]()
    expected = limit_peers.reference(case)[: 1 + gradient]
    calls, errors, samples = {}, {}, {}
    for method, (make, settings) in METHODS.items():
        for setting in settings:
            call = make(case, setting, gradient)
            if call is None:
                continue
            call()  # compiles
            start = time.perf_counter()
            found = call()
            once = time.perf_counter() - start
            key = f"{method}|{setting:g}"
            errors[key] = max(
                float(np.abs(np.asarray(a) - e).max()) for a, e in zip(found, expected, strict=True)
            )
            if once > SLOW:
                samples[key] = np.array([once])
            else:
                calls[key] = call
            if once > TOO_SLOW or (once > SLOW and errors[key] < AT / 10):
                break
    samples |= interleave(calls, rounds, budget=budget)
    points = {}
    for key in errors:
        method, setting = key.split("|")
        point = {"setting": float(setting), "error": errors[key]}
        points.setdefault(method, []).append(point | {"seconds": float(np.nanmedian(samples[key]))})
    return {
        "case": name,
        "gradient": gradient,
        "points": points,
        "at": {method: time_at(p) for method, p in points.items()},
    }


def time_at(points: list[dict], error: float = AT) -> float:
    """Seconds to reach an error, on the straight line between points in both logarithms.

    NaN where no setting reaches it; beyond the coarsest setting, that setting's time.
    """
    best = math.nan
    ordered = sorted(points, key=lambda p: -p["error"])
    for p in ordered:
        if p["error"] <= error and not p["seconds"] > best:
            best = p["seconds"]
    for a, b in itertools.pairwise(ordered):
        if a["error"] > error >= b["error"] > 0:
            share = math.log(a["error"] / error) / math.log(a["error"] / b["error"])
            between = math.exp(
                (1 - share) * math.log(a["seconds"]) + share * math.log(b["seconds"])
            )
            best = between if math.isnan(best) else min(best, between)
    return best


def _trained(rounds: int) -> dict:
    """A training run at true error 1e-6: our solver against the network that is deep enough."""
    setting = Setting()
    problem, rule = setting.make_problem(), setting.make_rule()
    exact = solve_limit(problem, rule, STEPS, tol=2e-9, max_elements=1024)
    depths = torch.linspace(0.0, 1.0, 65, dtype=torch.float64)

    def error_of(x: torch.Tensor, p: torch.Tensor) -> float:
        pairs = (x - exact.x(STEPS, depths), p - exact.p(STEPS, depths))
        return max(float(gap.abs().max()) for gap in pairs)

    tolerance, error = math.nan, math.inf
    for tol in (1e-3, 1e-4, 3e-5, 1e-5, 3e-6, 1e-6, 1e-7):
        run = solve_limit(problem, rule, STEPS, tol=tol)
        error = error_of(run.x(STEPS, depths), run.p(STEPS, depths))
        if error <= AT:
            tolerance = tol
            break

    def network(depth: int):
        run = train_particles(problem, rule, depth, None, STEPS)
        every = slice(None, None, depth // 64)
        return run.x[STEPS][0, every], run.p[STEPS][0, every]

    found = [network(depth) for depth in DEPTHS]
    errors = [error_of(*pair) for pair in found]
    extrapolated = [
        error_of(*(2 * b - a for a, b in zip(coarse, fine, strict=True)))
        for coarse, fine in itertools.pairwise(found)
    ]
    calls = {"solve_limit": lambda: solve_limit(problem, rule, STEPS, tol=tolerance)}
    calls |= {
        f"L={depth}": lambda depth=depth: train_particles(problem, rule, depth, None, STEPS)
        for depth in DEPTHS
    }
    seconds = {
        name: float(np.nanmedian(values)) for name, values in interleave(calls, rounds).items()
    }
    # marginal cost of a layer, without what a run costs at any depth
    per_layer = (seconds[f"L={DEPTHS[-1]}"] - seconds[f"L={DEPTHS[0]}"]) / (DEPTHS[-1] - DEPTHS[0])
    needed = errors[-1] / AT * DEPTHS[-1]
    order = math.log2(extrapolated[0] / extrapolated[1])
    # pairs (L, 2L); the errors measured were those of the pair whose finer one is DEPTHS[-1]
    richardson = DEPTHS[-1] * (extrapolated[-1] / AT) ** (1.0 / order)
    return {
        "tol": tolerance,
        "error": error,
        "elements": run.grid.elements,
        "reference_error": exact.error,
        "seconds": seconds,
        "errors": dict(zip(map(str, DEPTHS), errors, strict=True)),
        "order": math.log2(errors[-2] / errors[-1]),
        "layers_needed": needed,
        "euler_seconds": needed * per_layer,
        "ratio": needed * per_layer / seconds["solve_limit"],
        "richardson_errors": extrapolated,
        "richardson_order": order,
        "richardson_layers": richardson,
        "richardson_ratio": 1.5 * richardson * per_layer / seconds["solve_limit"],
    }


def _line(row: dict) -> str:
    times = "  ".join(f"{name} {1e3 * t:.3g}" for name, t in row["at"].items())
    what = "X(1) and P(0)" if row["gradient"] else "X(1)"
    return f"{row['case']}, {what}, ms at error {AT:g}: {times}"


def table(result: dict) -> str:
    """Markdown."""
    names = list(METHODS)
    head = ["frozen heads", "wanted", *names, "best ODE peer / ours"]
    lines = [
        f"Milliseconds to error {AT:g} (largest entry), between settings by interpolation; "
        "compilation of jax not counted.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for row in result["frozen"]:
        at = row["at"]
        ours = min(t for t in (at.get(name) for name in OURS[:3]) if t and t == t)
        others = [t for name, t in at.items() if name not in OURS and t == t]
        ratio = f"**{min(others) / ours:.2f}**" if others else ""
        cells = [f"{1e3 * at[n]:.3g}" if at.get(n, math.nan) == at.get(n) else "-" for n in names]
        wanted = "X(1), P(0)" if row["gradient"] else "X(1)"
        lines.append("| " + " | ".join([row["case"], wanted, *cells, ratio]) + " |")
    t = result["trained"]
    lines += [
        "",
        f"Default problem after {STEPS} training steps at true error {AT:g}: `solve_limit` "
        f"{1e3 * t['seconds']['solve_limit']:.1f} ms (tol {t['tol']:g}, true error "
        f"{t['error']:.1e}). The Euler network needs {t['layers_needed']:.3g} layers at its "
        f"measured order {t['order']:.2f}, {t['euler_seconds']:.3g} s: **{t['ratio']:.0f}** times "
        f"longer. With Richardson (order {t['richardson_order']:.2f}) {t['richardson_layers']:.3g} "
        f"layers and half as many: {t['richardson_ratio']:.2g} times.",
    ]
    return "\n".join(lines)


def figures(result: dict, folder) -> None:
    """error-time.png: error against time of every method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from ipslimit.experiments.plots import look

    rows = result["frozen"]
    figure, axes = plt.subplots(
        1, len(rows), figsize=(4.2 * len(rows), 3.8), squeeze=False, layout="constrained"
    )
    for ax, row in zip(axes[0], rows, strict=True):
        for i, name in enumerate(METHODS):
            points = row["points"].get(name)
            if points:
                dashes = "-" if name in OURS[:3] else "--" if name in OURS else ":"
                xs, ys = [p["seconds"] for p in points], [p["error"] for p in points]
                width = {"markersize": 4, "linewidth": 1.2}
                ax.loglog(xs, ys, ls=dashes, label=name, **look(i, len(METHODS)), **width)
        ax.axhline(AT, color="0.7", linewidth=0.8)
        ax.set_title(f"{row['case']}: " + ("X(1) and P(0)" if row["gradient"] else "X(1)"))
        ax.set_xlabel("seconds")
    axes[0, 0].set_ylabel("largest error")
    handles = {}
    for ax in axes[0]:
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=8, fontsize=8)
    figure.savefig(folder / "error-time.png", dpi=150)
    plt.close(figure)
