"""How far a long call has come: told to a function of the user's, or shown on a terminal.

One meaning for particles and limit, progress(k, layers, share): the training step, how many layers
or depth elements there are, and how much of the work on them is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tqdm import tqdm

from .model.callbacks import require_callback

Watcher = Callable[[int, int, float], object]

BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
# Seconds before a bar appears, since most calls are over by then, and between its changes.
PATIENCE, INTERVAL = 2.0, 0.1


def require_progress(value: object, depth: str) -> None:
    """Refuse what is no bool and cannot be called as progress(k, depth, share)."""
    if not isinstance(value, bool):
        require_callback(value, "k", depth, "share", name="progress")


@contextlib.contextmanager
def watching(progress: bool | Watcher | None, doing: str) -> Iterator[Watcher | None]:
    """What is to be called inside: the function that was given, or of True one that shows a bar.

    The bar is on stderr, where that is a terminal, and leaves nothing behind. `doing` is what it
    says, a format of step and layers, as in "training {layers} layers, step {step}".
    """
    if not isinstance(progress, bool):
        yield progress
        return
    if not progress:
        yield None
        return
    options = {"leave": False, "delay": PATIENCE, "mininterval": INTERVAL, "dynamic_ncols": True}
    with tqdm(total=1.0, disable=None, bar_format=BAR, **options) as bar:

        def show(step: int, layers: int, share: float) -> None:
            bar.set_description_str(doing.format(step=step, layers=layers), refresh=False)
            bar.update(share - bar.n)

        yield None if bar.disable else show
