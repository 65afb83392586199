"""`solve_limit`, showing on a terminal how far it has come."""

from __future__ import annotations

import functools
import multiprocessing

from tqdm import tqdm

from ipslimit import solvers

BAR = "limit{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
# Seconds before a bar appears, since most solves are over by then, and between its changes.
PATIENCE, INTERVAL = 2.0, 0.1


@functools.wraps(solvers.solve_limit)
def solve_limit(*arguments, **options) -> solvers.LimitRun:
    # workers would write over each other
    if multiprocessing.parent_process() is not None:
        return solvers.solve_limit(*arguments, **options)
    bar = tqdm(
        total=1.0,
        disable=None,
        leave=False,
        delay=PATIENCE,
        mininterval=INTERVAL,
        dynamic_ncols=True,
        bar_format=BAR,
    )
    with bar:
        progress = None if bar.disable else functools.partial(_show, bar)
        return solvers.solve_limit(*arguments, **options, progress=progress)


def _show(bar: tqdm, step: int, elements: int, share: float) -> None:
    """Share of the grid that is solved; every grid begins anew."""
    bar.set_description_str(f" on a grid of {elements}, step {step}", refresh=False)
    bar.update(share - bar.n)
