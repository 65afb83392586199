"""A tiny setting of `ipslimit rebalance`, as an object and as a command line."""

from pathlib import Path

from ipslimit.experiments.rebalance.arms import Treatment
from ipslimit.experiments.rebalance.experiment import RebalanceExperiment
from ipslimit.experiments.rebalance.setting import Probes, RebalanceSetting
from ipslimit.experiments.text.training import Recipe, Schedule

TEXT = str(Path(__file__).parent / "text.txt")  # made up, and never changed
TINY = RebalanceSetting(
    data=TEXT,
    seeds=1,
    steps=12,
    resumed_steps=12,
    start_steps=7,
    vocabulary=300,
    context=8,
    width=16,
    layers=1,
    heads=2,
    dropout=0.1,
    held_out_windows=16,
    recipe=Recipe(batch=4, lr=1e-2, schedule=Schedule(0, 0.5)),
    treatment=Treatment(every=2),
    probes=Probes(factors=(4.0,), widths=(8,), depths=(1,), stages=(0.25,)),
)
# the same
COMMAND = (
    f"rebalance --data {TEXT} --seeds 1 --steps 12 --resumed-steps 12 --start-steps 7 "
    "--vocabulary 300 --context 8 --width 16 --layers 1 --heads 2 --dropout 0.1 "
    "--held-out-windows 16 --batch 4 --lr 1e-2 --warmup 0 --floor 0.5 --every 2 "
    "--factors 4 --widths 8 --depths 1 --stages 0.25"
).split()


def run(setting, folder):
    """What the runs give, computed in this process."""
    return RebalanceExperiment(setting, folder).run(workers=1, progress=False)


def without_seconds(cells):
    return {cell: {k: v for k, v in c.items() if k != "seconds"} for cell, c in cells.items()}
