"""Runs of `ipslimit language`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from ipslimit import Block

from ..cells import SECONDS_A_UNIT
from ..engines import Engine
from ..frame.experiment import Experiment
from ..frame.task import Task
from ..text.characters import CharacterWindows
from ..text.source import read_text
from .plain import plain_layers
from .runs import FORMS, limit_run, loss_run, plain_model_run, size_run
from .setting import EXPONENTS, LanguageSetting

# Evaluations of a layer for an element of the limit's grid; and of all its grids together in
# elements of the finest one.
_FIELDS, _GRIDS = 4, 2


class LanguageCell(NamedTuple):
    """What names a run: the limit, one (L, H), a learning rate, or a size in the other dtype.

    `heads` None is the whole law; the residual factor is L^-exponent. A "plain" run is of a plain
    Transformer of `depth` layers, an "own" one of the model that it is held against.
    """

    kind: str
    depth: int = 0
    heads: int | None = None
    exponent: float = 1.0
    lr: float = 0.0


LIMIT = LanguageCell("limit")
OTHER = {"float32": "float64", "float64": "float32"}


def size_cells(setting: LanguageSetting) -> list[LanguageCell]:
    """Every (L, H), and every L with the whole law."""
    heads = (*sorted(setting.models.heads), None)
    return [LanguageCell("size", d, h) for d in sorted(setting.models.depths) for h in heads]


def rate_cells(setting: LanguageSetting) -> list[LanguageCell]:
    """Every learning rate, for every residual factor and depth."""
    rates = setting.rates
    return [
        LanguageCell("rate", depth, rates.rate_heads, exponent, lr)
        for exponent in EXPONENTS
        for depth in sorted(rates.rate_depths)
        for lr in rates.rates(setting.model.option("lr"))
    ]


def rounding_cell(setting: LanguageSetting) -> LanguageCell:
    """One seed of a middle depth, with the most heads."""
    depths = sorted(setting.models.depths)
    return LanguageCell("rounding", depths[len(depths) // 2], max(setting.models.heads))


class Compared(NamedTuple):
    """A depth of the whole law, parameters of its units, and layers of a plain Transformer."""

    depth: int
    parameters: int
    layers: int


def compared(setting: LanguageSetting) -> Compared:
    """Of the depths there are, the one whose parameters a plain Transformer most nearly has."""
    model = setting.model
    units = model.stored * Block.of(model.make_law()).size

    def mismatch(depth: int) -> float:
        layers, a_layer = plain_layers(depth * units, model.d)
        return abs(layers * a_layer / (depth * units) - 1.0)

    depth = min(sorted(setting.models.depths), key=mismatch)
    return Compared(depth, depth * units, plain_layers(depth * units, model.d)[0])


def own_cells(setting: LanguageSetting) -> list[LanguageCell]:
    """The model that a plain Transformer is held against, at other learning rates than its own."""
    depth, lr = compared(setting).depth, setting.model.option("lr")
    factors = [factor for factor in sorted(setting.plain.own_factors) if factor != 1.0]
    rates = [float(f"{factor * lr:.6g}") for factor in factors]
    return [LanguageCell("own", depth, None, 1.0, rate) for rate in rates]


def plain_cells(setting: LanguageSetting) -> list[LanguageCell]:
    """The plain Transformer, at every learning rate."""
    layers = compared(setting).layers
    return [LanguageCell("plain", layers, lr=lr) for lr in sorted(setting.plain.plain_rates)]


class LanguageExperiment(Experiment):
    """The runs of a `LanguageSetting`.

    Attributes
    ----------
    text : CharacterWindows
    """

    NAME = "language"

    def __init__(
        self, setting: LanguageSetting, folder: Path, device: str = "cpu", cache: str | None = None
    ):
        super().__init__(setting, folder)
        self.device, model = device, setting.model
        sizes = (setting.vocabulary, model.tokens, model.contexts, model.probes)
        self.text = CharacterWindows.of(read_text(setting.data, cache), *sizes)
        model.make_problem(self.text)  # refuses what does not go together

    def cells(self) -> list[LanguageCell]:
        setting = self.setting
        runs = [*size_cells(setting), *rate_cells(setting), rounding_cell(setting)]
        runs += [*own_cells(setting), *plain_cells(setting)]
        # the longest first
        return [LIMIT, *sorted(runs, key=self._cost, reverse=True)]

    def prepare(self, missing: list[LanguageCell], engine: Engine) -> tuple:
        return (self.text,)

    def task(self, cell: LanguageCell) -> Task:
        """A run of that name, of the setting that it needs and no more."""
        setting, models = self.setting, self.setting.models
        given, function, more = setting, limit_run, ()
        if cell.kind == "limit":
            decides = (setting.evaluate, setting.tol, setting.elements, setting.max_elements)
        else:
            decides = (models.root_seed, cell.depth, cell.heads)
            more = (cell.depth, cell.heads)
        if cell.kind == "size":
            function = size_run
            decides += (setting.evaluate, models.seeds if cell.heads else 1)
        if cell.kind in ("limit", "size"):
            decides += (setting.sample, setting.sample_seed)
        elif cell.kind == "plain":
            decides = (cell.depth, cell.lr, setting.plain.plain_decay, models.root_seed)
            function, more = plain_model_run, (cell.depth, cell.lr)
        else:
            model = setting.model
            if cell.kind == "rate":
                model = model.units_at(cell.lr, setting.rates.rate_steps)
            elif cell.kind == "own":
                model = model.at(cell.lr, model.steps)
            else:
                model = model.varied(dtype=OTHER[model.dtype])
            given = dataclasses.replace(setting, model=model)
            function, more = loss_run, (*more, cell.exponent)
            decides += (cell.exponent,)
        cost = self._cost(cell)
        return Task(
            name=_name(cell),
            function=function,
            arguments=(given, self.device, *more),
            key=(self.NAME, cell.kind, given.model.as_dict(), self.text.digest, *decides),
            form=FORMS[cell.kind],
            cost=cost,
            seconds=SECONDS_A_UNIT * cost,
        )

    def _cost(self, cell: LanguageCell) -> float:
        """Numbers touched, about."""
        setting, model = self.setting, self.setting.model
        steps = setting.rates.rate_steps if cell.kind == "rate" else model.steps
        atoms = model.stored
        units = atoms * (1.0 - (1.0 - 1.0 / atoms) ** cell.heads) if cell.heads else atoms
        layers = float(cell.depth)
        if cell.kind == "limit":
            layers = _FIELDS * _GRIDS * setting.max_elements
        if cell.kind == "size" and cell.heads:
            layers *= setting.models.seeds
        if cell.kind == "plain":
            layers *= 3.0
        if cell.kind == "rounding":
            layers *= 2.0 if model.dtype == "float32" else 0.5
        own = {"attention": model.tokens}
        width = sum(model.d + own.get(family, model.inner) for family in model.families)
        return (steps + 1) * layers * units * model.step_contexts * model.tokens * width


def _name(cell: LanguageCell) -> str:
    if cell.kind == "limit":
        return cell.kind
    if cell.kind == "plain":
        return f"plain-{cell.depth}-lr{cell.lr:g}"
    size = f"L{cell.depth}-H{cell.heads or 'inf'}"
    if cell.kind == "own":
        return f"{size}-lr{cell.lr:g}"
    if cell.kind == "rate":
        return f"{size}-factor{cell.exponent:g}-lr{cell.lr:g}"
    return size if cell.kind == "size" else f"{size}-{cell.kind}"
