"""`ipslimit study NAME`."""

from __future__ import annotations

import dataclasses
from functools import reduce
from operator import or_
from typing import Annotated

import tyro

from .base import ClauseStudy
from .causal import Causal
from .constant import Constant
from .dimension import Dimension
from .epsilon import Epsilon
from .influence import Influence
from .laws import Laws
from .rates import Rates
from .scaling import Scaling
from .sharpness import Sharpness
from .steps import Steps
from .tokens import Tokens
from .uniform import Uniform

STUDIES: tuple[type[ClauseStudy], ...] = (
    Rates,
    Uniform,
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
)


def _subcommand(study: type[ClauseStudy]) -> object:
    # the first paragraph: the whole docstring, which the report shows, would bury the list
    description = " ".join(study.design().split("\n\n")[0].split())
    command = tyro.conf.subcommand(study.NAME, description=description, prefix_name=False)
    return Annotated[study, command]


OF = reduce(or_, map(_subcommand, STUDIES))


@dataclasses.dataclass(frozen=True)
class StudyCommand:
    """Measure one clause of the theorem: a figure, a table, a JSON and one sentence.

    Finished cells are kept in OUT/cells: run the same command again to resume.
    """

    study: OF

    def check(self) -> None:
        self.study.check()

    def run(self) -> None:
        self.study.run()
