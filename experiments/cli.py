"""The command `ipslimit`."""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import sys
from typing import Annotated, NoReturn

import tyro

from ipslimit.checks import NoRoom
from ipslimit.cpu.dispatch import wanted_path

from .arguments import BadSetting, settings_from
from .backbone.command import BackboneCommand
from .boundary.command import BoundaryCommand
from .compare_command import CompareCommand
from .engines import EngineFailed
from .gauge.command import GaugeCommand
from .rebalance.command import RebalanceCommand
from .store import CannotWrite
from .studies.command import StudyCommand, study_command
from .studies.report import ReportCommand
from .study import Flat, StudyError
from .sweep_command import SweepCommand

COMMANDS = {
    "sweep": SweepCommand,
    "compare": CompareCommand,
    "study": StudyCommand,
    "report": ReportCommand,
    "boundary": BoundaryCommand,
    "backbone": BackboneCommand,
    "rebalance": RebalanceCommand,
    "gauge": GaugeCommand,
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exit status 2 for bad input, in one line; 130 when interrupted."""
    command = _parsed(arguments)
    try:
        wanted_path()  # the environment's settings are arguments too
        command.check()
    except (ValueError, TypeError) as error:
        _leave(2, error)
    try:
        command.run()
    # all other errors are the program's own, and keep their traceback
    except (StudyError, EngineFailed, CannotWrite, NoRoom) as error:
        _leave(2, error)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        _leave(
            2,
            f"there is not enough memory ({str(error)[-120:]}); finished cells are kept. Choose "
            "smaller sizes, or fewer workers.",
        )
    except KeyboardInterrupt:
        _leave(130, "interrupted; finished cells are kept, run the same command again to resume")


def _parsed(arguments: list[str] | None):
    """The command that the arguments ask for."""
    written = io.StringIO()
    try:
        given = sys.argv[1:] if arguments is None else arguments
        commands = COMMANDS | {"study": study_command(given)}
    except ValueError as error:
        _leave(2, error)
    try:
        with contextlib.redirect_stderr(written), settings_from(given):
            return tyro.cli(
                functools.reduce(
                    operator.or_,
                    (Annotated[c, tyro.conf.subcommand(name)] for name, c in commands.items()),
                ),
                prog="ipslimit",
                description="How fast deep, many-headed transformers approach their mean-field "
                "limit.",
                args=arguments,
                config=(Flat, tyro.conf.OmitSubcommandPrefixes),
            )
    except BadSetting as error:
        _leave(2, error)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        _leave(2, _in_one_line(written.getvalue()))


def _in_one_line(box: str) -> str:
    """What is wrong and the options that might have been meant, out of tyro's box of text."""
    sections: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip(" │")
        if not text.strip("─-"):
            sections.append([])
        elif not text.startswith(("╭", "╰")):
            sections[-1].append(text)
    sections = [section for section in sections if section]
    if "╭" not in box:  # without box characters the title is a line of its own
        sections = sections[1:] or sections
    if not sections:
        return "bad arguments. See ipslimit --help."
    options = [
        line.split()[0]
        for section in sections[1:]
        if section[0].startswith("Perhaps you meant")
        for line in section
        if line.startswith("--")
    ]
    hint = f" Perhaps you meant {' or '.join(dict.fromkeys(options))}." if options else ""
    return f"{' '.join(sections[0]).rstrip('.')}.{hint} See ipslimit --help."


def _out_of_memory(error: Exception) -> bool:
    # torch has no type of its own for the CPU's memory
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def _leave(status: int, message: object) -> NoReturn:
    print(f"ipslimit: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
