"""Studies of cells beside one limit: every depth, with drawn heads and with the whole law."""

from __future__ import annotations

import abc
import dataclasses

from ipslimit import Problem, Rule
from ipslimit.solvers import LimitRun

from ..engines import Engine, OneThread
from ..frame.task import Task
from ..limit import KeptLimit, settings_key, solve_limit
from ..settings import StudyError
from ..store import Cells
from .base import ClauseStudy

# L, and H or None for the whole law.
Cell = tuple[int, int | None]


@dataclasses.dataclass(frozen=True)
class BesideLimit(ClauseStudy):
    """A study of what cells (L, H) are against the limit; a subclass says what one computes."""

    @abc.abstractmethod
    def _task(self, depth: int, heads: int | None) -> Task:
        """What a cell computes, given the limit."""

    def cells(self, progress: bool = True) -> tuple[dict[Cell, dict], list[str]]:
        """What the cells found, and damaged ones; the limit is solved for if one is missing."""
        tasks = {
            (depth, heads): self._task(depth, heads)
            for depth in self.sizes.depths
            for heads in (None, *self.sizes.heads)
        }

        cells = Cells(self.folder / "cells")
        kept = KeptLimit(cells, settings_key(self.setting), self.tol)
        given = self.setting.make_problem(), self.setting.make_rule()

        def limit(missing: list, engine: Engine) -> tuple[LimitRun]:
            return (kept.found(*given, self.device, lambda: self._limit(*given)),)

        done, damaged = self.computed(self.NAME, tasks, progress, limit, OneThread)
        kept.drop()
        return {cell: done[cell] for cell in tasks}, [*damaged, *cells.damaged]

    def _limit(self, problem: Problem, rule: Rule) -> LimitRun:
        setting = self.setting
        given = problem, rule, setting.steps, self.tol, setting.recorded, self.device
        limit = solve_limit(*given, **setting.quadrature())
        if limit.status == "diverged":
            raise StudyError(f"the limit of this study cannot be compared with: {limit.message}")
        return limit
