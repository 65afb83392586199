"""`ipslimit study NAME`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from ipslimit.checks import require_choice

from ..frame.command import Options
from ..frame.own import is_own, own_class
from .base import ClauseStudy
from .batches import Batches
from .blocks import Blocks
from .causal import Causal
from .chaos import Chaos
from .constant import Constant
from .dimension import Dimension
from .epsilon import Epsilon
from .flow import Flow
from .horizon import Horizon
from .influence import Influence
from .laws import Laws
from .rates import Rates
from .report import ReportCommand
from .scaling import Scaling
from .sharpness import Sharpness
from .steps import Steps
from .tokens import Tokens
from .uniform import Uniform
from .varied import VariedStudy

STUDIES: tuple[type[ClauseStudy], ...] = (
    Rates,
    Uniform,
    Flow,
    Tokens,
    Dimension,
    Steps,
    Epsilon,
    Laws,
    Constant,
    Causal,
    Scaling,
    Influence,
    Sharpness,
    Blocks,
    Batches,
    Horizon,
    Chaos,
)


@dataclasses.dataclass(frozen=True)
class All(Options):
    """Every built-in study, one after another, and their report: OUT/NAME and OUT/report.html."""

    quick: bool = False
    """Sizes of about a minute each on two cores (default: at most ten)."""
    out: Path = Path("results/report")
    """Folder for a folder of every study, and for report.html."""

    NAME: ClassVar[str] = "all"

    @property
    def studies(self) -> list[ClauseStudy]:
        """Each as it is by itself, but for the flags given here."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return [study(**given | {"out": self.out / study.NAME}) for study in STUDIES]

    def check(self) -> None:
        super().check()
        for study in self.studies:
            study.check()

    def run(self) -> None:
        found = {}
        for study in self.studies:
            found[study.NAME] = study.done().numbers
            self.tell("")
        folders = tuple(study.folder for study in self.studies)
        self.tell(ReportCommand(folders, self.out / "report.html").written())
        self.print_json(found)


def own_study(text: str) -> type[ClauseStudy]:
    """The study NAME of FILE, where `text` is FILE.py:NAME.

    Raises
    ------
    ValueError
        If there is no such class, or it leaves open what is studied.
    """
    study = own_class("study", text, ClauseStudy)
    wanted = "NAME TITLE THEORY QUICK FULL".split()
    wanted += ["VARY", "VALUES"] if issubclass(study, VariedStudy) else []
    lacking = [name for name in wanted if not hasattr(study, name)]
    lacking += sorted(study.__abstractmethods__)
    if inspect.getdoc(study) == inspect.getdoc(VariedStudy) or study.__doc__ == _signature(study):
        lacking.append("a docstring")
    if lacking:
        raise ValueError(
            f"study must name a class that says what is studied; {text} lacks "
            f"{', '.join(lacking)}. Write that into the class."
        )
    for field in dataclasses.fields(study):
        if getattr(study, field.name, field.default) is not field.default:
            raise ValueError(
                f"study must name a dataclass; {text} sets {field.name}, which is none of its "
                "fields. Write @dataclasses.dataclass(frozen=True) above the class, and "
                f"{field.name}: {getattr(field.type, '__name__', field.type)} = ... in it."
            )
    return study


def _signature(kind: type) -> str:
    """What `dataclasses` writes where a docstring is missing."""
    return kind.__name__ + str(inspect.signature(kind)).replace(" -> None", "")


def _subcommand(kind: type, name: str) -> object:
    # the first paragraph: the whole docstring, which the report shows, would bury the list
    description = " ".join(inspect.getdoc(kind).split("\n\n")[0].split())
    return Annotated[kind, tyro.conf.subcommand(name, description=description, prefix_name=False)]


OF = reduce(or_, (_subcommand(kind, kind.NAME) for kind in (*STUDIES, All)))


@dataclasses.dataclass(frozen=True)
class StudyCommand:
    """Measure one clause of the theorem: a figure, a table, a JSON and one sentence.

    A study of your own, out of a file: ipslimit study mine.py:Temperature, where Temperature is a
    class of ipslimit.experiments.studies.VariedStudy that says what varies. Finished cells are kept
    in OUT/cells: run the same command again to resume.
    """

    study: OF

    def check(self) -> None:
        self.study.check()

    def run(self) -> None:
        self.study.run()


def study_command(arguments: Sequence[str]) -> type[StudyCommand]:
    """The command, which knows the study of the user's own that the arguments may name.

    Raises
    ------
    ValueError
        If they name no study, or one that `own_study` refuses.
    """
    text = arguments[1] if len(arguments) > 1 and arguments[0] == "study" else ""
    if not is_own(text):
        if text and not text.startswith("-"):
            require_choice("study", text, tuple(kind.NAME for kind in (*STUDIES, All)))
        return StudyCommand
    fields = [("study", OF | _subcommand(own_study(text), text))]
    own = {"__doc__": StudyCommand.__doc__}
    return dataclasses.make_dataclass(
        "StudyCommand", fields, bases=(StudyCommand,), namespace=own, frozen=True
    )
