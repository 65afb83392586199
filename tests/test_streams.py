"""What a command prints: into pipes that nobody reads, full disks, closed and old terminals."""

import errno
import io
import os
import subprocess
import sys

import pytest

from ipslimit.experiments import cli

COMMAND = [sys.executable, "-m", "ipslimit"]
WORDS = "error ± 0.1 — of W₂\n"


def left_by(arguments, **options):
    """Status, output and messages of the command itself, which imports nothing slow for these."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    done = subprocess.run([*COMMAND, *arguments], text=True, **options)
    return done.returncode, done.stdout, done.stderr


def test_a_pipe_that_nobody_reads_ends_the_command_without_a_word():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as unread:
        assert left_by(["--help"], stdout=unread) == (141, None, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_one_line():
    with open("/dev/full", "w") as full:
        status, _, said = left_by(["--help"], stdout=full)
        assert status == 2 and said.count("\n") == 1
        assert said.startswith("ipslimit: the output cannot be written (No space left on device);")
        assert left_by(["--version"], stderr=full)[0] == 0


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
def test_closed_streams_change_no_status(tmp_path):
    script = '"$@" 2>&-; echo $?; "$@" >&- 2>&-; echo $?'
    command = ["sh", "-c", script, "sh", *COMMAND, "compare", "--out", ""]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("2\n2\n", "") and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1"])
def test_a_terminal_of_few_characters_gets_question_marks_and_no_traceback(encoding):
    environment = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": encoding}
    status, out, said = left_by(["--help"], env=environment, encoding=encoding)
    assert (status, said) == (0, "") and "sweep" in out


class Refusing(io.StringIO):
    """A stream that takes no more."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def write(self, text):
        raise OSError(self.number, os.strerror(self.number))

    flush = fileno = lambda self: self.write("")


class Speaking:
    """A command whose run says something on both streams."""

    def __init__(self):
        self.told = []

    def check(self):
        pass

    def run(self):
        for name in ("stderr", "stdout"):
            print(WORDS, end="", file=getattr(sys, name), flush=True)
            self.told.append(name)


@pytest.fixture
def speaking(monkeypatch):
    command = Speaking()
    monkeypatch.setattr(cli, "_parsed", lambda arguments: command)
    return command


def test_what_cannot_be_encoded_is_replaced(speaking, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    cli.main(["sweep"])
    assert written.getvalue() == b"error ? 0.1 ? of W?\n"


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC, errno.EIO])
def test_a_run_goes_on_where_nobody_hears_its_messages(speaking, monkeypatch, capsys, number):
    monkeypatch.setattr(sys, "stderr", Refusing(number))
    cli.main(["sweep"])
    assert speaking.told == ["stderr", "stdout"] and capsys.readouterr().out == WORDS


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (errno.EPIPE, 141, ""),
        (
            errno.EIO,
            2,
            f"ipslimit: the output cannot be written ({os.strerror(errno.EIO)}); what is finished "
            "is kept. Send it elsewhere, and run the same command again to resume.\n",
        ),
    ],
)
def test_results_that_cannot_be_printed_end_the_command(
    speaking, monkeypatch, capsys, number, status, said
):
    monkeypatch.setattr(sys, "stdout", Refusing(number))
    with pytest.raises(SystemExit) as left:
        cli.main(["sweep"])
    assert left.value.code == status and speaking.told == ["stderr"]
    assert capsys.readouterr().err == WORDS + said


def test_streams_are_the_callers_again(speaking, capsys):
    before = sys.stdout, sys.stderr
    cli.main(["sweep"])
    assert (sys.stdout, sys.stderr) == before
