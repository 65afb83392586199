"""Which runs `ipslimit boundary` makes, in rounds: each depends on what the ones before found."""

from __future__ import annotations

import dataclasses
import os

import numpy as np

from ..engines import Engine
from ..frame.experiment import Experiment
from ..frame.task import Task
from ..settings import StudyError
from ..text.corpus import corpus_key
from ..text.source import read_text, require_windows
from ..text.tokens import token_key, tokenize
from .criteria import CRITERIA
from .runs import BASELINE_FORM, FORM, BaselineCell, BoundaryCell, run_baselines, run_cell
from .search import Search, search
from .setting import BoundarySetting

Cell = BoundaryCell | BaselineCell


def tuning_cells(setting: BoundarySetting, task: str, method: str, lr: float) -> list[BoundaryCell]:
    """The runs whose validation says how good a learning rate is for a method."""
    return seed_cells(setting, task, method, lr)[: setting.plan(task).tuning_seeds]


def seed_cells(setting: BoundarySetting, task: str, method: str, lr: float) -> list[BoundaryCell]:
    """The runs of all seeds of a method at a learning rate."""
    width = setting.plan(task).width
    return [BoundaryCell(task, method, lr, width, seed) for seed in range(setting.seeds)]


def baseline_cells(setting: BoundarySetting, task: str) -> list[BaselineCell]:
    """Of every seed, where each has its own data; else of one."""
    return [BaselineCell(task, seed) for seed in range(setting.seeds if task == "reviews" else 1)]


def width_cells(setting: BoundarySetting) -> dict[int, list[BoundaryCell]]:
    """The runs of AdamW on reviews by their width.

    At the middle learning rate, which larger widths have in proportion to 1 / width.
    """
    if "reviews" not in setting.tasks:
        return {}
    usual, middle = setting.reviews.plan.width, setting.reviews.plan.middle
    seeds = dict.fromkeys(setting.widths, setting.width_seeds)
    if setting.wide is not None:
        seeds.setdefault(setting.wide, 1)
    return {
        width: [
            BoundaryCell("reviews", "adamw", middle * usual / width, width, seed)
            for seed in range(seeds[width])
        ]
        for width in sorted(seeds)
    }


def searched(setting: BoundarySetting, found: dict[Cell, dict], task: str, method: str) -> Search:
    """How far the search for a method's learning rate has come with these runs."""

    def score(lr: float) -> tuple[float, ...] | None:
        runs = [found.get(cell) for cell in tuning_cells(setting, task, method, lr)]
        return None if None in runs else CRITERIA[task].mean_score(runs)

    return search(setting.plan(task).lrs, setting.extensions, score)


class BoundaryExperiment(Experiment):
    """The runs of a `BoundarySetting`.

    Attributes
    ----------
    found : dict cell -> result
        What `cells` goes on from: which runs there are depends on it.
    """

    NAME = "boundary"

    def __init__(
        self, setting: BoundarySetting, folder: str | os.PathLike, cache: str | None = None
    ):
        super().__init__(setting, folder)
        self.found: dict[Cell, dict] = {}
        self._sources, self._keys = {"reviews": ()}, {}
        if "reviews" in setting.tasks:
            self._keys["reviews"] = corpus_key(setting.reviews.corpus)
        if "language" in setting.tasks:
            runs = setting.language
            text = read_text(runs.language_data, cache)
            key = token_key(text, runs.language_vocabulary)
            tokens = tokenize(text, runs.language_vocabulary, self.folder, self.damaged)
            require_windows(tokens.train, tokens.held_out, runs.language_context)
            _require_two(tokens.held_out, runs.language_context)
            self._sources["language"], self._keys["language"] = (self.folder, key), {"tokens": key}

    @property
    def ONE_DISK(self) -> str:  # as the class attribute that it stands for
        """Of the language model alone."""
        return "whose tokens lie in a folder" if "language" in self.setting.tasks else ""

    def cells(self) -> list[Cell]:
        """The runs of this round and of those before."""
        setting = self.setting
        cells: dict[Cell, None] = {}
        for of_width in reversed(width_cells(setting).values()):  # the long ones first
            cells |= dict.fromkeys(of_width)
        for task in setting.tasks:
            cells |= dict.fromkeys(baseline_cells(setting, task))
            for method in setting.methods:
                state = searched(setting, self.found, task, method)
                for lr in state.grid:
                    cells |= dict.fromkeys(tuning_cells(setting, task, method, lr))
                if state.best is not None:
                    cells |= dict.fromkeys(seed_cells(setting, task, method, state.best))
        return list(cells)

    def run(
        self, workers: int = 0, progress: bool = True, engine: Engine | None = None
    ) -> dict[Cell, dict]:
        """The result of every run, round by round: until none is missing that a search asks for."""
        while True:
            self.found = super().run(workers, progress, engine)
            if self.found.keys() >= set(self.cells()):
                return self.found

    def task(self, cell: Cell) -> Task:
        setting = self.setting
        runs, plan = getattr(setting, cell.task), setting.plan(cell.task)
        data, source = self._keys[cell.task], self._sources[cell.task]
        if isinstance(cell, BaselineCell):
            return Task(
                name=f"{cell.task}-baselines-seed{cell.seed}",
                function=run_baselines,
                arguments=(setting, source, cell),
                key=(self.NAME, "baselines", data, runs.decides_baselines(), cell.seed),
                form=BASELINE_FORM,
                cost=plan.steps / 4,
            )
        return Task(
            name=f"{cell.task}-{cell.method}-lr{cell.lr:g}-d{cell.width}-seed{cell.seed}",
            function=run_cell,
            arguments=(setting, source, cell),
            key=(
                self.NAME,
                data,
                runs.decides(),
                dataclasses.asdict(setting.schedule_of(cell.task)),
                setting.early,
                dataclasses.asdict(cell),
            ),
            form=FORM,
            # steps, each as long as one at the usual width
            cost=plan.steps * (cell.width / plan.width) ** 1.6,
        )


def _require_two(held_out: np.ndarray, length: int) -> None:
    """Refuse a held-out text that has no window for validation and another for the test."""
    if len(held_out) <= 2 * length:
        raise StudyError(
            f"data must hold two windows of {length} tokens or more that are held out, for "
            f"validation and test; got {len(held_out)} tokens. Give a longer text, or choose a "
            "smaller --language-context."
        )
