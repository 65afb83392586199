"""`solve_limit`, showing on a terminal how far it has come, and its answer kept for a resume."""

from __future__ import annotations

import functools
import io
import multiprocessing
from collections.abc import Callable

import torch

from ipslimit import Rule, solvers
from ipslimit.model.training_problem import TrainingProblem
from ipslimit.progress import watching
from ipslimit.solvers.limit import DOING
from ipslimit.solvers.limit_state import restored, state_of

from .frame.own import digest_of
from .frame.progress import report
from .settings import Setting
from .store import Cells, DamagedFile, cell_file, read_blob, write_blob

# Grids of a solve, at least: two pairs of one and its halving.
GRIDS = 3


@functools.wraps(solvers.solve_limit)
def solve_limit(*arguments, **options) -> solvers.LimitRun:
    told = _Reporter()
    # workers would write over each other
    if multiprocessing.parent_process() is not None:
        return solvers.solve_limit(*arguments, **options, progress=told)
    with watching(True, DOING) as shown:

        def show(step: int, elements: int, share: float) -> None:
            told(step, elements, share)
            if shown is not None:
                shown(step, elements, share)

        return solvers.solve_limit(*arguments, **options, progress=show)


class _Reporter:
    """Reports of the task that solves: as if its grids were as few as can be, for more may come."""

    def __init__(self):
        self._first = self._elements = 0
        self._before = self._share = 0.0  # work on grids before, and the share of this one

    def __call__(self, step: int, elements: int, share: float) -> None:
        self._first = self._first or elements
        if elements != self._elements or share < self._share:
            self._before += self._elements
        self._elements, self._share = elements, share
        planned = self._first * (2**GRIDS - 1)
        report(min(planned, self._before + share * elements), planned)


def settings_key(setting: Setting) -> list:
    """All that decides a limit's problem and rule: the settings, and of what class they are.

    Of one that a file of the user's defines the text counts, not its name alone.
    """
    kind = type(setting)
    return [kind.__name__, setting.key, *filter(None, [digest_of(kind)])]


class KeptLimit:
    """A solved limit that many cells are compared with, in their folder while one is missing.

    It is as large as all units at all depths, so it goes when the last cell is there.

    Parameters
    ----------
    cells : Cells
        Where it lies; damage is told in its `damaged`.
    key : tuple
        All that decides it, in plain types.
    """

    def __init__(self, cells: Cells, *key: object):
        self._cells, self.path = cells, cells.folder / cell_file("limit", *key, suffix="solved")

    def found(
        self,
        problem: TrainingProblem,
        rule: Rule,
        device: torch.device | str,
        solve: Callable[[], solvers.LimitRun],
    ) -> solvers.LimitRun:
        """What an earlier run has solved for, or else what `solve` gives, which is kept.

        Raises
        ------
        CannotWrite
        """
        try:
            run = self._read(problem, rule, device)
        except DamagedFile as damage:
            self._cells.damaged.append(f"{damage}: computed again")
            run = None
        if run is None:
            run, file = solve(), io.BytesIO()
            torch.save(state_of(run), file)
            write_blob(self.path, file.getbuffer())
        return run

    def drop(self) -> None:
        """Remove it, when no cell needs it any more."""
        self.path.unlink(missing_ok=True)

    def _read(
        self, problem: TrainingProblem, rule: Rule, device: torch.device | str
    ) -> solvers.LimitRun | None:
        content = read_blob(self.path)
        if content is None:
            return None
        try:
            state = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
            return restored(state, problem, rule)
        # torch and its unpickler raise nearly anything on bytes that are no checkpoint
        except (Exception, RecursionError) as error:
            reason = " ".join(str(error).split())[:200]
            raise DamagedFile(f"{self.path.name} does not hold a limit ({reason})") from None
