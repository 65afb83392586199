"""A piece of work whose result is kept."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable

from ..store import cell_file


@dataclasses.dataclass(frozen=True)
class Task:
    """One run of an experiment.

    Attributes
    ----------
    name : str
        What a reader of the folder calls it.
    function : importable by name
        Gives the result, which JSON can hold.
    arguments : tuple
        What it is called with, behind what the runner's `prepare` gives to all tasks; the results
        of `after` follow.
    key : tuple
        All that the result depends on, and nothing else, in plain types.
    form : see `store.require_form`
        What the result looks like, for reading it back.
    cost : float
        Its share of the progress bar.
    after : tuple
        Keys, in the same `run`, of the tasks whose results this one needs.
    intact : callable, optional
        Whether the files are there that tasks `after` this one read besides its result; asked only
        where such a task must be computed. Raises `DamagedFile` to say what is wrong with them.
    seconds : float
        Estimate on one core; short work is not worth the start of workers.
    group : hashable, optional
        Successive tasks of a group that are too short to be sent one by one are sent together.
    """

    name: str
    function: Callable[..., dict]
    arguments: tuple
    key: tuple
    form: object = None
    cost: float = 1
    after: tuple[Hashable, ...] = ()
    intact: Callable[[], bool] | None = None
    seconds: float = math.inf
    group: Hashable = None

    @functools.cached_property
    def file(self) -> str:
        """Name of the cell."""
        return cell_file(self.name, *self.key)
