"""What blocks, batches, schedules and ties do not go with is refused by name, in one line."""

from pathlib import Path

import pytest

from ipslimit.experiments.cli import main
from ipslimit.experiments.compare.command import CompareCommand

REFUSED = {
    "--inner 8": "inner must be left out with block=attention, which has no perceptrons; got 8.",
    "--activation relu": "activation must be left out with block=attention, which has no",
    "--gated": "gated must be left out with block=attention, which has no perceptrons; got True.",
    "--block perceptron --m 3": "m must be left out with block=perceptron, which has no heads; got",
    "--block mlp": "block must be one of attention, perceptron, attention+perceptron; got 'mlp'",
    "--block perceptron --activation elu": "activation must be one of gelu, gelu_tanh, relu, silu",
    "--block perceptron --inner 0": "inner must be at least 1; got 0.",
    "--norm batch": "norm must be one of none, rms, layer; got 'batch'.",
    "--norm layer --d 2": 'norm "layer" must have d >= 3; got d=2',
    "--norm-eps 0.1": "norm_eps must be left out with norm=none; got 0.1. Leave it out, or use "
    "norm=rms.",
    "--norm rms --norm-eps 0": "norm_eps must be a finite number in (0, inf); got 0.0.",
    "--sequential": "sequential must be left out with block=attention, of one family of units",
    "--batch 5": "batch must be at most the number of contexts, 4; got 5.",
    "--batch 0": "batch must be at least 1; got 0.",
    "--batch-seed 1": "batch_seed must be left out where every step sees all contexts; got 1.",
    "--warmup 1": "warmup must be left out with schedule=constant; got 1. Leave it out, or use "
    "schedule=warmup-cosine.",
    "--floor 0.1": "floor must be left out with schedule=constant; got 0.1.",
    "--schedule linear": "schedule must be one of constant, warmup-cosine; got 'linear'.",
    "--schedule warmup-cosine --warmup 6": "warmup must be at most steps, 5; got 6.",
    "--schedule warmup-cosine --floor 1": "floor must be at most lr, 0.02; got 1.",
    "--clip 0": "clip must be a finite number in (0, inf); got 0.0.",
    "--block attention+perceptron --rule sbo --biases False": "biases must not be False with "
    "rule=sbo",
    "--law {own}:TanhLaw --n 2 --block attention+perceptron": "block must be of one family, that",
    "--law {own}:Mixture --block perceptron": "block must be of one family, that of your own law",
    "--law {own}:Mixture --inner 3": "inner must be left out with law=",
    "--law {own}:Deeper --tied": "tied must be False with Deeper, which depends on depth; got True",
}
DEEPER = """
import dataclasses
import numpy as np
import ipslimit

@dataclasses.dataclass
class Deeper(ipslimit.SampledLaw):
    d: int
    m: int

    def quantile(self, u):
        return 2 * u - 1

    def along(self, units, s):
        return units.with_packed((1 + s[:, None, None]) * units.packed)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text((Path(__file__).parent / "own_units.py").read_text() + DEEPER)
    return path


@pytest.mark.parametrize("flags", REFUSED)
def test_bad_combinations_are_refused_in_one_line(flags, own, tmp_path, capsys):
    words = flags.format(own=own).split()
    with pytest.raises(SystemExit) as stopped:
        main(["sweep", *words, "--out", str(tmp_path)])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1, said
    assert said.startswith(f"ipslimit: {REFUSED[flags]}"), said


@pytest.mark.parametrize("command", ["compare", "check", "study rates"])
def test_every_command_with_a_law_refuses_them_alike(command, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), "--inner", "8", "--out", str(tmp_path)])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.startswith(f"ipslimit: {REFUSED['--inner 8']}"), said


OF_STUDIES = {
    "tokens --block perceptron": "block must be left out of problems that differ in nothing but",
    "dimension --norm rms": "norm must be left out of problems that differ in nothing but d or N",
    "sharpness --batch 1": "batch must be left out of problems that are searched for",
    "sharpness --tied": "tied must be left out of problems that are searched for",
    "constant --tied": "tied must be left out of the study constant, whose theory is of layers",
    "influence --tied": "tied must be left out of the study influence",
    "scaling --tied": "tied must be left out of the study scaling",
    "steps --tied": "tied must be left out of the study steps",
    "uniform --tied": "tied must be left out of the study uniform",
    "influence --block attention+perceptron": "block must be of one family of units, one of which",
}


@pytest.mark.parametrize("line", OF_STUDIES)
def test_studies_refuse_what_their_theory_is_not_of(line, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["study", *line.split(), "--out", str(tmp_path)])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1
    assert said.startswith(f"ipslimit: {OF_STUDIES[line]}"), said


@pytest.mark.parametrize("flag", ["--block perceptron", "--norm rms"])
def test_gauges_are_of_heads_alone(flag, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["gauge", *flag.split(), "--out", str(tmp_path)])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and "of the study gauge, whose symmetries" in said


def test_what_a_study_has_set_makes_way_for_what_is_given(tmp_path, monkeypatch):
    """--block perceptron is enough where the default of a command has heads of its own size."""
    seen = []
    monkeypatch.setattr(CompareCommand, "run", lambda self: seen.append(self.pair.setting))
    main(["compare", "--block", "perceptron", "--out", str(tmp_path)])
    assert seen[0].families == ("perceptron",)
