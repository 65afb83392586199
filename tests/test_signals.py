"""Ctrl-C and SIGTERM: handled where everything can be put in order, heard by one process alone."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from ipslimit.experiments import cli
from ipslimit.experiments.signals import ENDING, Terminated, deferred, handled, interrupt, not_lost

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread()
    or not hasattr(signal, "pthread_sigmask"),
    reason="signals come in the main thread, and are blocked where there is such a thing",
)


@pytest.fixture(autouse=True)
def heard():
    """Signals as in front: behind & a shell has Ctrl-C ignored, which what it begins inherits."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDING}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


LEAVING = """
import signal
from ipslimit.experiments.signals import handled, leave
with handled(leave):
    signal.raise_signal(signal.{name})
"""
ASKING = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"


@pytest.mark.parametrize(
    ("name", "status", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")]
)
def test_before_anything_is_computed_the_program_leaves_at_once_with_a_line(name, status, word):
    script = LEAVING.format(name=name)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == status and done.stdout == ""
    assert done.stderr == (
        f"ipslimit: {word}; finished cells are kept, run the same command again to resume\n"
    )


@pytest.mark.parametrize("number", ENDING)
def test_what_is_computing_is_interrupted_and_handlers_are_as_before(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt) as raised, handled(interrupt):
        signal.raise_signal(number)
    assert isinstance(raised.value, Terminated) == (number == signal.SIGTERM)
    assert signal.getsignal(number) is before


def test_a_signal_that_a_shell_has_ignored_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with handled(interrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_wait_until_processes_are_begun_and_these_never_hear_ctrl_c():
    begun = []
    with pytest.raises(Terminated), handled(interrupt), deferred():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        begun.append(subprocess.run([sys.executable, "-c", ASKING], capture_output=True).stdout)
    assert begun == [b"True\n"]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_signal_that_was_deferred_is_not_lost_to_an_error():
    with pytest.raises(KeyboardInterrupt), handled(interrupt), deferred():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("it could not be begun")


def test_other_threads_defer_nothing_that_is_not_theirs():
    found = []

    def inside():
        with deferred():
            found.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == [True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


class Dropping:
    def __init__(self, error):
        self.error = error

    def __del__(self):
        raise self.error


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Terminated])
def test_an_interrupt_that_python_drops_comes_again(kind):
    with pytest.raises(KeyboardInterrupt) as raised, handled(interrupt), not_lost():
        Dropping(kind())
        for _ in range(200):
            time.sleep(0.05)
    assert type(raised.value) is kind


def test_other_errors_that_python_drops_are_shown_as_before(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: shown.append(str(told.exc_value)))
    with not_lost():
        Dropping(ValueError("something else"))
    assert shown == ["something else"]


@pytest.mark.parametrize(
    ("kind", "status", "word"),
    [(KeyboardInterrupt, 130, "interrupted"), (Terminated, 143, "terminated")],
)
def test_a_command_that_is_interrupted_ends_in_one_line(monkeypatch, capsys, kind, status, word):
    class Command:
        def check(self):
            pass

        def run(self):
            raise kind

    monkeypatch.setattr(cli, "_parsed", lambda arguments: Command())
    with pytest.raises(SystemExit) as left:
        cli.main(["sweep"])
    line = f"ipslimit: {word}; finished cells are kept, run the same command again to resume\n"
    assert left.value.code == status and capsys.readouterr().err == line
