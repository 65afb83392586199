"""The command `ipslimit`."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import operator
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

from ipslimit import __version__

from . import signals, streams

# Where the class of a command is. Only the chosen one is imported: torch alone takes a second.
COMMANDS = {
    "sweep": "sweep_command:SweepCommand",
    "compare": "compare.command:CompareCommand",
    "check": "check:CheckCommand",
    "study": "studies.command:StudyCommand",
    "report": "studies.report:ReportCommand",
    "boundary": "boundary.command:BoundaryCommand",
    "backbone": "backbone.command:BackboneCommand",
    "rebalance": "rebalance.command:RebalanceCommand",
    "gauge": "gauge.command:GaugeCommand",
    "language": "language.command:LanguageCommand",
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exit status 2 for bad input, in one line; 130 when interrupted; 141 unread."""
    with signals.handled(signals.leave), streams.guarded():
        try:
            try:
                _main(sys.argv[1:] if arguments is None else arguments)
            finally:
                sys.stdout.flush()
        except streams.CannotPrint as error:
            _leave(2, error)


def _main(arguments: list[str]) -> None:
    if arguments[:1] == ["--version"]:
        print(f"ipslimit {__version__}")
        return
    command = _parsed(arguments)
    # after the parser, which needs no torch for a list of commands
    import torch

    from ipslimit.checks import NoRoom
    from ipslimit.cpu.dispatch import wanted_path
    from ipslimit.resources import processors

    from .engines import EngineFailed
    from .settings import StudyError
    from .store import CannotWrite

    try:
        wanted_path()  # the environment's settings are arguments too
        command.check()
    except (ValueError, TypeError) as error:
        _leave(2, error)
    if "OMP_NUM_THREADS" not in os.environ:  # torch counts cores, and knows no quotas
        torch.set_num_threads(min(torch.get_num_threads(), processors()))
    try:
        with signals.handled(signals.interrupt), signals.not_lost():
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
    except KeyboardInterrupt as interrupt:
        number = signals.number_of(interrupt)
        _leave(signals.status(number), signals.told(number))


def command_class(name: str) -> type:
    """The class of a command, imported."""
    module, _, kind = COMMANDS[name].partition(":")
    return getattr(importlib.import_module(f".{module}", __package__), kind)


def _stand_in(name: str) -> type:
    """For a command that is not chosen: without options, and with its words in the list."""
    module, _, kind = COMMANDS[name].partition(":")
    path = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    classes = ast.parse(path.read_text(encoding="utf-8")).body
    (text,) = (ast.get_docstring(c) for c in classes if getattr(c, "name", None) == kind)
    return dataclasses.make_dataclass(kind, [], namespace={"__doc__": text})


def _parsed(arguments: list[str]):
    """The command that the arguments ask for."""
    # it takes a moment to import, in which an interrupt is to end in one line already
    import tyro

    needed = [word for word in arguments if word in COMMANDS][:1]
    if any(word.startswith("--tyro-") for word in arguments):  # a shell's completion: of all
        needed = COMMANDS
    if "--out=" in arguments or ("--out", "") in itertools.pairwise(arguments):
        # as of a shell's variable that is not set; a path it would be, of the folder one is in
        _leave(2, "out must name a folder; got ''. Write --out . for the folder you are in.")
    commands = {name: (command_class if name in needed else _stand_in)(name) for name in COMMANDS}
    written = io.StringIO()
    try:
        if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
            from ipslimit.checks import require_choice  # with torch

            require_choice("command", arguments[0], tuple(COMMANDS))
        if "study" in needed:  # perhaps one of the user's own
            commands["study"] = importlib.import_module(
                ".studies.command", __package__
            ).study_command(arguments)
        with contextlib.redirect_stderr(written), _settings(needed, arguments):
            return tyro.cli(
                functools.reduce(
                    operator.or_,
                    (Annotated[c, tyro.conf.subcommand(name)] for name, c in commands.items()),
                ),
                prog="ipslimit",
                description="How fast deep, many-headed transformers approach their mean-field "
                "limit. Options of a command: ipslimit COMMAND --help. Version: --version.",
                args=arguments,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
            )
    except ValueError as error:
        _leave(2, error)
    except SystemExit as leaving:
        if leaving.code in (None, 0, streams.UNREAD):
            raise
        _leave(2, _in_one_line(written.getvalue()))


def _settings(needed: Collection[str], arguments: Sequence[str]):
    """What makes settings of the arguments, where a command is chosen."""
    if not needed:
        return contextlib.nullcontext()
    from .arguments import settings_from  # with torch

    return settings_from(arguments)


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
