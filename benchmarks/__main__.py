"""Run the benchmarks: results.json, results.md and figures in a folder."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import time
from pathlib import Path

NAMES = (
    "kernel",
    "tokens",
    "perceptrons",
    "training",
    "limit",
    "sweep",
    "growth",
    "sharding",
    "boundary",
    "optimizers",
)
TITLES = {
    "kernel": "Attention: one field and its VJP",
    "tokens": "Tokens with weights, and many of them",
    "perceptrons": "Perceptrons: one field and its VJP",
    "training": "A training step",
    "limit": "The limit: cost per digit",
    "sweep": "The default sweep",
    "growth": "Growth",
    "sharding": "One model on two processes",
    "boundary": "Boundary motion: the cost of looking and of centring",
    "optimizers": "Optimizers for any torch model: an iteration of a GPT",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="these alone")
    parser.add_argument("--quick", action="store_true", help="few sizes, fewer rounds")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    parser.add_argument("--cores", type=int, help="use this many cores only (Linux)")
    arguments = parser.parse_args()
    if arguments.cores:
        # before anything starts its threads: all libraries then see these cores only
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    run(arguments.only, arguments.quick, arguments.out)


def run(names, quick: bool, folder: Path) -> None:
    """Run some benchmarks; what is finished is written even if a later one fails."""
    import importlib

    from . import machine

    folder.mkdir(parents=True, exist_ok=True)
    print("ceilings of this machine", flush=True)
    results = {
        "date": datetime.date.today().isoformat(),
        "quick": quick,
        "machine": machine.describe(),
        "ceilings": machine.ceilings(),
        "ceilings_without_cbwr": machine.ceilings_without_cbwr(),
    }
    for name in NAMES:
        if name not in names:
            continue
        print(f"\n{TITLES[name]}", flush=True)
        module = importlib.import_module(f"benchmarks.{name}")
        start = time.perf_counter()
        results[name] = module.run(quick, lambda line: print(f"  {line}", flush=True))
        results[name]["benchmark_seconds"] = time.perf_counter() - start
        if hasattr(module, "figures"):
            module.figures(results[name], folder)
        _write(results, folder)
    print(f"\nwritten to {folder}: results.json, results.md and figures")


def _write(results: dict, folder: Path) -> None:
    (folder / "results.json").write_text(json.dumps(_plain(results), indent=1) + "\n")
    (folder / "results.md").write_text(markdown(results))


def _plain(value):
    """NaN, which JSON does not have, as null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def markdown(results: dict) -> str:
    """All tables, with the date and the machine."""
    import importlib

    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"Measured {results['date']} on {machine['processor']} ({machine['cores']} cores, "
        f"{machine['vector']}, {machine['threads']} threads; jax uses its own pool of as many "
        f"threads as cores), Python {machine['python']}, {versions}. Contestants take turns in one "
        "process; times are medians over rounds, ratios medians of the ratios of the rounds, with "
        "quartiles." + (" Quick run: fewer rounds and sizes." if results["quick"] else ""),
        "",
        "| ceiling | here | without MKL's reproducible mode |",
        "|---|---|---|",
    ]
    for name, value in results["ceilings"].items():
        lines.append(f"| {name} | {value:.3g} | {results['ceilings_without_cbwr'][name]:.3g} |")
    for name in NAMES:
        if name in results:
            module = importlib.import_module(f"benchmarks.{name}")
            lines += ["", f"## {TITLES[name]}", "", module.table(results[name])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
