"""Generated command lines, in process: they run, or end with status 2 and one line that helps."""

import contextlib
import io
import re
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipslimit.experiments import cli
from ipslimit.experiments.choices import CHOICES
from ipslimit.experiments.settings import Setting

README = str(Path(__file__).parents[1] / "README.md")
FIXED = {name: [] for name in cli.COMMANDS}
FIXED |= {name: ["--data", README] for name in ("rebalance", "language")}
in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def run(*arguments):
    """Exit status (0 if it returned) and what went to stderr."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)
                cli.main(list(arguments))
        except SystemExit as stopped:
            return stopped.code, said.getvalue(), printed.getvalue()
    return 0, said.getvalue(), printed.getvalue()


def flags(command):
    _, _, text = run(command, "--help")
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)) - {"--help", "--out"})


FLAGS = {command: flags(command) for command in cli.COMMANDS}
COMMANDS = st.sampled_from(sorted(name for name, found in FLAGS.items() if found))
word = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=6)
number = st.one_of(
    st.integers(-3, 9).map(str),
    st.floats().map(str),
    st.integers().map(str),
    st.sampled_from(("1e400", "1e-320", "0.5", "-0", "1_0", "٣", "0x10", str(10**30))),
)
known = st.sampled_from(
    (
        "adamw",
        "sgd",
        "sbo",
        "block-adamw",
        "gauge-adamw",
        "xavier",
        "atoms",
        "truncated-normal",
        "float32",
        "attention+perceptron",
        "perceptron",
        "relu",
        "rms",
        "layer",
        "warmup-cosine",
        "cpu",
        "cuda:9",
        "ema",
        "None",
        "True",
        "False",
        "/dev/null",
        "imdb:/none",
        "classic",
        "qk",
        "head",
    )
)
values = st.lists(st.one_of(number, known, word), max_size=3)


def names_of(flag):
    """What a message may call a flag: by its name, or by that of the sizes it is one of."""
    plain = flag.removeprefix("--").removeprefix("no-")
    return {plain, plain.replace("-", "_"), flag}


@pytest.fixture
def checked(monkeypatch):
    """Commands that check their settings and do nothing."""
    for command in map(cli.command_class, cli.COMMANDS):
        monkeypatch.setattr(command, "run", lambda self: None)


def expect_one_line(status, said, flag=None):
    assert status in (0, 2)
    if status == 0:
        assert said == ""
        return
    assert said.startswith("ipslimit: ") and said.count("\n") == 1 and said.endswith("\n"), said
    assert len(said) < 1500, said
    assert not re.search(r"Traceback|Error:|[│╭╰]", said), said
    if flag is not None:
        assert any(name in said for name in names_of(flag)), (flag, said)


@pytest.mark.parametrize("command", sorted(name for name, found in FLAGS.items() if found))
@in_one_folder
@given(st.data())
def test_any_value_of_a_flag_is_taken_or_refused_in_one_line(checked, tmp_path, command, data):
    flag = data.draw(st.sampled_from(FLAGS[command]))
    given_values = data.draw(values)
    status, said, _ = run(command, *FIXED[command], "--out", str(tmp_path), flag, *given_values)
    # a surplus word is named itself, not the flag before it
    expect_one_line(status, said, None if "nrecognized" in said or len(given_values) != 1 else flag)


@pytest.mark.slow
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(COMMANDS, st.data())
def test_several_flags_at_once_are_taken_or_refused_in_one_line(checked, tmp_path, command, data):
    chosen = data.draw(st.lists(st.tuples(st.sampled_from(FLAGS[command]), values), max_size=5))
    line = [part for flag, given_values in chosen for part in (flag, *given_values)]
    status, said, _ = run(command, *FIXED[command], "--out", str(tmp_path), *line)
    expect_one_line(status, said)


@pytest.mark.slow
@settings(max_examples=100)
@given(st.lists(st.one_of(word, known, number, COMMANDS, st.sampled_from(FLAGS["sweep"]))))
def test_any_words_end_in_one_line(words):
    if {"-h", "--help"} & set(words):
        return
    with pytest.MonkeyPatch.context() as patch:
        for command in map(cli.command_class, cli.COMMANDS):
            patch.setattr(command, "check", lambda self: None)
            patch.setattr(command, "run", lambda self: None)
        expect_one_line(*run(*words)[:2])


TINY = [
    "--d",
    "2",
    "--m",
    "1",
    "--tokens",
    "2",
    "--contexts",
    "1",
    "--probes",
    "1",
    "--steps",
    "1",
    "--seeds",
    "2",
    "--tol",
    "1",
    "--nodes",
    "4",
]
EXTREMES = {
    "lr": ("1e-300", "0.02", "10", "1e20", "1e300"),
    "eps": ("0", "1e-320", "1e-60", "0.01", "1e30"),
    "weight_decay": ("0", "0.1", "1e300"),
    "gain": ("1e-300", "1", "1e3", "1e100"),
    "std": ("1e-300", "1", "1e300"),
    "bound": ("1e-20", "2", "1e100"),
    "atoms": ("2",),
}


BOTH = ("--block", "attention+perceptron")
BLOCKS = (
    (),
    BOTH,
    (*BOTH, "--inner", "1", "--activation", "relu"),
    (*BOTH, "--sequential", "--gated"),
)


@st.composite
def valid_flags(draw):
    """Flags of `sweep` and `compare` that pass their checks, up to the ends of the ranges."""
    line = []
    for choice in CHOICES:
        name = draw(st.sampled_from(sorted(choice.kinds)))
        line += [f"--{choice.what}", name]
        for option in Setting.declared(choice, name):
            if option in EXTREMES:
                value = draw(st.sampled_from(EXTREMES[option]))
                line += [f"--{option.replace('_', '-')}", value]
    return [
        *line,
        "--dtype",
        draw(st.sampled_from(("float64", "float32"))),
        "--rebalance",
        draw(st.sampled_from(("0", "1", "2"))),
        "--problem-seed",
        draw(st.sampled_from(("0", str(2**64 + 1)))),
        draw(st.sampled_from(("--causal", "--no-causal"))),
        *draw(st.sampled_from(BLOCKS)),
        *draw(st.sampled_from(((), ("--norm", "rms"), ("--norm", "rms", "--norm-eps", "1e-300")))),
        *draw(st.sampled_from(((), ("--batch", "1"), ("--batch", "1", "--batch-seed", "3")))),
        *draw(st.sampled_from(((), ("--schedule", "warmup-cosine"), ("--clip", "1e-300")))),
        draw(st.sampled_from(("--tied", "--no-tied"))),
    ]


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(valid_flags(), st.sampled_from(("sweep", "compare")))
def test_valid_extremes_run_or_end_in_one_line(tmp_path, flags, command):
    """Runs to the end, diverged or not, or says why the study cannot be measured."""
    sizes = ["--depths", "1", "2", "3", "--heads", "1", "2"]
    sizes = sizes if command == "sweep" else ["--depth", "2", "--heads", "2"]
    status, said, printed = run(
        command, *TINY, *flags, *sizes, "--device", "cpu", "--out", str(tmp_path)
    )
    lines = [line for line in said.splitlines() if line.startswith("ipslimit:")]
    assert status == len(lines) * 2, said
    assert "Traceback" not in said
    assert (status == 0) == ("written to" in printed)
