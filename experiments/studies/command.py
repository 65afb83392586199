"""`ipslimit study NAME`, and `ipslimit report` over what studies have found."""

from __future__ import annotations

import dataclasses
from functools import reduce
from operator import or_
from typing import Annotated

import tyro

from .base import ClauseStudy
from .causal import Causal
from .constant import Constant
from .epsilon import Epsilon
from .laws import Laws
from .rates import Rates
from .steps import Steps

STUDIES: tuple[type[ClauseStudy], ...] = (Rates, Steps, Epsilon, Laws, Constant, Causal)
OF = reduce(
    or_,
    (Annotated[study, tyro.conf.subcommand(study.NAME, prefix_name=False)] for study in STUDIES),
)


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
