"""`ipslimit` by itself: its list of commands, its version, and what they import."""

import inspect
import re
import subprocess
import sys

import pytest

import ipslimit
from ipslimit.experiments.cli import COMMANDS, command_class, main

HEAVY = "matplotlib numba scipy tokenizers torch".split()
PROGRAM = """
import contextlib, io, sys
from ipslimit.experiments.cli import main
for line in {lines}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as printed:
        main(line)
    assert printed.getvalue(), line
print(*(name for name in {heavy} if name in sys.modules))
"""


def imported(*lines):
    """What is imported of what is slow to import, once these command lines were answered."""
    program = PROGRAM.format(lines=lines, heavy=HEAVY)
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def words_of(text):
    """Without the boxes that text stands in, and the places where its lines end."""
    return " ".join(re.sub("[│╭╮╰╯─•]", " ", text).split())


def printed_by(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert not left.value.code
    return words_of(capsys.readouterr().out)


def test_the_list_of_commands_and_the_version_import_nothing_slow():
    assert imported(["--help"], ["--version"]) == []


def test_the_help_of_a_command_imports_neither_figures_nor_compilers():
    assert not {"matplotlib", "numba"} & set(imported(*([name, "--help"] for name in COMMANDS)))


def test_importing_the_package_imports_nothing_slow_and_its_names_are_all_there():
    program = (
        "import sys, ipslimit\n"
        "assert not {'torch', 'numba', 'scipy'} & sys.modules.keys()\n"
        "from ipslimit import *\n"
        "assert {*ipslimit.__all__} <= {*globals()} & {*dir(ipslimit)}\n"
        "assert ipslimit.optim.SAGGS and ipslimit.nn.CenteredLinear and ipslimit.model.rules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_name_of_the_package_is_refused_as_by_any_module():
    with pytest.raises(AttributeError, match="module 'ipslimit' has no attribute 'Head'"):
        _ = ipslimit.Head


def test_the_list_says_of_every_command_what_its_class_says(capsys):
    listed = printed_by(["--help"], capsys)
    for name in COMMANDS:
        assert f"{name} {words_of(inspect.getdoc(command_class(name)))}" in listed


def test_the_version_is_the_packages(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"ipslimit {ipslimit.__version__}\n"
    assert "--version" in printed_by(["--help"], capsys)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["swep"], "command must be one of sweep, compare, check, study, report, boundary,"),
        (["study", "rate"], "study must be one of rates, uniform, flow, tokens, dimension, steps"),
        (["sweep", "--out", ""], "out must name a folder; got ''. Write --out . for the folder"),
        (["sweep", "--out="], "out must name a folder; got ''"),
    ],
)
def test_a_wrong_word_is_one_line_that_tells_the_right_ones(line, said, capsys):
    with pytest.raises(SystemExit) as left:
        main(line)
    printed = capsys.readouterr()
    assert left.value.code == 2 and printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith(f"ipslimit: {said}")


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "ipslimit", "--version"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == f"ipslimit {ipslimit.__version__}\n"


def test_a_shells_completion_knows_the_options_of_every_command(capsys):
    script = printed_by(["--tyro-print-completion", "bash"], capsys)
    assert all(option in script for option in ("--depths", "--against", "--beta2", "--methods"))
