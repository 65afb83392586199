"""Options belong to the chosen rule and law: flags, refusals, files and figures know no others."""

import contextlib
import io
import json
import pickle
import sys

import pytest

from ipslimit.experiments import cli
from ipslimit.experiments.cells import cell_cost
from ipslimit.experiments.frame.options import Options, help_of, options_of
from ipslimit.experiments.frame.own import PREFIX
from ipslimit.experiments.plots import caption
from ipslimit.experiments.settings import Setting, SweepSetting
from ipslimit.experiments.studies.degenerate import FlatSetting
from ipslimit.experiments.sweep_command import SweepCommand

RULE = '''
"""A rule of one's own, with an option that no other has."""

from __future__ import annotations

import dataclasses

import torch

import ipslimit


@dataclasses.dataclass
class Signum(ipslimit.Rule):
    """theta <- theta - lr sign(m)"""

    lr: float = 0.05
    """Size of every entry's step."""
    keep: float = 0.75
    """Decay of m."""

    def init(self, heads):
        return {"m": torch.zeros_like(heads.packed)}

    def update(self, heads, state, gradient, step):
        m = torch.lerp(gradient.packed, state["m"], self.keep)
        return heads.with_packed(heads.packed - self.lr * m.sign()), {"m": m}
'''
LAW = '''
"""Two clusters of heads, `spread` apart."""

import torch

import ipslimit


class Clusters(ipslimit.Atoms):
    """Atoms of equal weight about two heads.

    Parameters
    ----------
    d, m : int
    spread : float
        Distance of the clusters.
    """

    def __init__(self, d, m, spread: float = 1.0):
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(4, m, d, generator=generator, dtype=torch.float64)
        q[2:] += spread
        super().__init__(ipslimit.Heads(q, q.flip(0), q.roll(1, 0), q.mT))
'''
TINY = (
    "--d 2 --m 2 --tokens 2 --contexts 1 --probes 0 --steps 1 --depths 1 2 3 --heads 1 2 --seeds 2 "
    "--tol 1e-2 --device cpu"
).split()


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder of the user's, with a rule and a law, in which commands are given."""
    (tmp_path / "mine.py").write_text(RULE)
    (tmp_path / "law.py").write_text(LAW)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(command):
    """Exit status and what is printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            cli.main(command.split())
        except SystemExit as stopped:
            return stopped.code or 0, printed.getvalue()
    return 0, printed.getvalue()


def swept(*flags, workers=1):
    cli.main(["sweep", *TINY, *" ".join(flags).split(), "--workers", str(workers), "--out", "out"])
    return json.loads(open("out/config.json").read())["study"]


def test_a_rule_and_a_law_of_ones_own_are_swept_and_come_back(mine, capsys):
    law = "--law law.py:Clusters --spread 2"
    content = swept("--rule mine.py:Signum --keep 0.5", law)
    setting = content["setting"]
    assert setting["rule"] == "mine.py:Signum" and setting["law"] == "law.py:Clusters"
    assert setting["rule_options"] == {"lr": 0.05, "keep": 0.5}
    assert setting["law_options"] == {"spread": 2.0}
    study = SweepSetting.from_dict(content)
    assert study.as_dict() == {**content, "sizes": study.sizes.as_dict()}
    rule = study.setting.make_rule()
    assert (type(rule).__name__, rule.keep) == ("Signum", 0.5)
    assert study.setting.exact and study.setting.stored == 4
    assert caption(study.setting).startswith("mine.py:Signum, lr 0.05; law.py:Clusters, d=2")
    # another value of the option is another cell, and the same value the same
    cells = {path.name for path in (mine / "out/cells").glob("L*")}
    swept("--rule mine.py:Signum --keep 0.5", law)
    assert {path.name for path in (mine / "out/cells").glob("L*")} == cells
    swept("--rule mine.py:Signum --keep 0.25", law)
    assert len(list((mine / "out/cells").glob("L*"))) == 2 * len(cells)


def test_a_file_that_was_edited_is_not_taken_for_the_old_one(mine):
    content = swept("--rule mine.py:Signum")
    cells = len(list((mine / "out/cells").glob("L*")))
    setting = Setting(rule="mine.py:Signum")
    (mine / "mine.py").write_text(RULE.replace("self.lr * m", "2 * self.lr * m"))
    edited = Setting(rule="mine.py:Signum")
    assert edited != setting and edited.rule_options == setting.rule_options
    swept("--rule mine.py:Signum")
    assert len(list((mine / "out/cells").glob("L*"))) == 2 * cells
    assert (
        SweepSetting.from_dict(content).setting.rule_digest == setting.rule_digest
    )  # still known here


def test_what_was_computed_with_another_text_is_refused(mine, monkeypatch):
    content, sent = swept("--rule mine.py:Signum"), pickle.dumps(Setting(rule="mine.py:Signum"))
    (mine / "mine.py").write_text(RULE + "# edited\n")
    for name in [name for name in sys.modules if name.startswith(PREFIX)]:
        monkeypatch.delitem(sys.modules, name)  # as in a process that begins
    for refused in (lambda: SweepSetting.from_dict(content), pickle.loads(sent).make_rule):
        with pytest.raises(ValueError, match=r"rule must be out of the text of mine\.py") as error:
            refused()
        assert "\n" not in str(error.value)
    (mine / "mine.py").write_text(RULE)
    assert pickle.loads(sent).make_rule().lr == 0.05


@pytest.mark.slow
def test_workers_know_the_rule_and_the_law(mine):
    flags = "--rule mine.py:Signum", "--law law.py:Clusters"
    swept(*flags, workers=2)
    there = (mine / "out/results.csv").read_bytes()
    for path in (mine / "out/cells").iterdir():
        path.unlink()
    swept(*flags, workers=1)
    assert (mine / "out/results.csv").read_bytes() == there


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "sweep --rule sgd --eps 0.1",
            "--eps is an option of adamw, block-adamw, sbo, muon and gauge-adamw; sgd has lr, "
            "momentum, weight_decay. Leave it out.",
        ),
        ("sweep --rule=sgd --weight_decay 0 --centre-decay 0.1", "--centre-decay is an option of"),
        ("sweep --rule sgd --no-transport", "--transport is an option of sbo; sgd has lr,"),
        ("compare --law=xavier --atoms 3", "--atoms is an option of atoms; xavier has gain."),
        ("study laws --std 1", "--std is an option of truncated-normal; xavier has gain."),
        ("gauge --spread 1", "Unrecognized options: --spread"),
        (
            "sweep --rule mine.py:Signum --eps 1",
            "gauge-adamw; mine.py:Signum has lr, keep. Leave it out.",
        ),
        ("sweep --law xavier --nodes 3", "nodes must be even in number, as those of"),
        (
            "sweep --rule mine.py:Lion",
            "rule must name a class of ipslimit.Rule in mine.py; got 'Li",
        ),
        ("sweep --law mine.py:Signum", "law must name a class of ipslimit"),
        ("sweep --rule nowhere.py:Lion", "rule must name a file that can be read; got nowhere.py"),
        ("sweep --rule needs.py:Needs", "--lr"),  # in tyro's words, which its versions change
        ("sweep --rule needs.py:Steps --lr 1", "must not be called as settings are; got steps."),
        (
            "sweep --rule needs.py:Seeds --lr 1",
            "must not be called as other flags of the command are; got seeds.",
        ),
        ("sweep --rule needs.py:Bare", "rate of Bare must have a type of numbers"),
        ("sweep --law law.py:Clusters --biases True", "biases must be False with law=law.py:Clust"),
        ("sweep --law law.py:Clusters --rule sbo", "biases must be False with law=law.py:Clusters"),
    ],
)
def test_what_is_not_the_chosen_ones_is_refused_in_one_line(mine, flags, message):
    needs = [
        RULE.replace("0.05", "dataclasses.field()").replace("class Signum", "class Needs"),
        "@dataclasses.dataclass\nclass Steps(Needs):\n    steps: int = 3",
        "@dataclasses.dataclass\nclass Seeds(Needs):\n    seeds: int = 3",
        "class Bare(Needs):\n    def __init__(self, rate):\n        self.rate = rate",
    ]
    text = "\n\n".join(needs).replace("float = dataclasses.field()", "float")
    (mine / "needs.py").write_text(text)
    out = "" if flags.startswith("study") else f" --out {mine / 'out'}"
    status, printed = said(flags + out)
    assert status == 2 and message in printed and printed.count("\n") == 1
    assert printed.startswith("ipslimit: ") and not list(mine.rglob("*.json"))


@pytest.mark.parametrize(
    ("flags", "there", "absent"),
    [
        ("sweep --help", ("--rule STR", "--betas FLOAT FLOAT", "--eps"), ("--momentum", "--std")),
        ("sweep --rule sgd --help", ("--momentum", "(default: sgd)"), ("--eps", "--betas")),
        ("sweep --rule mine.py:Signum -h", ("--keep", "Decay of m. (default: 0.75)"), ("--eps",)),
        ("compare --law law.py:Clusters --help", ("--spread", "Distance of the"), ("--gain",)),
        ("study laws --help", ("--gain", "xavier, truncated-normal"), ("--atoms",)),
    ],
)
def test_help_shows_the_options_of_the_chosen(mine, flags, there, absent):
    status, text = said(flags)
    words = " ".join(text.replace("│", " ").split())
    assert status == 0 and "adamw, block-adamw, sgd, sbo" in words
    assert all(word in words for word in there) and not any(word in words for word in absent)


def test_another_rule_keeps_the_values_of_what_it_has_too(mine):
    setting = Setting(lr=0.3, eps=0.2, betas=(0.5, 0.6), gain=2.0)
    sgd = setting.varied(rule="sgd", law="xavier")
    assert sgd.rule_options == {"lr": 0.3, "momentum": 0.0, "weight_decay": 0.01}
    assert sgd.law_options == {"gain": 2.0} and not sgd.has("eps") and sgd.option("gain") == 2.0
    assert sgd.varied(rule="sbo").option("eps") == 0.01  # dropped, hence the default again
    assert setting.varied(rule="mine.py:Signum").rule_options == {"lr": 0.3, "keep": 0.75}
    assert setting.varied(rule="sbo", centre="ema").option("centre") == "ema"


def test_a_rule_chosen_by_flag_has_its_own_defaults(mine, monkeypatch):
    chosen = []
    monkeypatch.setattr(SweepCommand, "run", lambda self: chosen.append(self.study.setting))
    cli.main("sweep --rule mine.py:Signum --out out".split())
    cli.main("sweep --rule sgd --lr 0.5 --out out".split())
    assert chosen[0].rule_options == {"lr": 0.05, "keep": 0.75}
    assert chosen[1].rule_options == {"lr": 0.5, "momentum": 0.0, "weight_decay": 0.01}


def test_settings_of_studies_have_their_own_defaults():
    assert FlatSetting().option("lr") == 0.1 and FlatSetting().option("weight_decay") == 0.0
    assert FlatSetting(lr=0.2).option("lr") == 0.2 and FlatSetting().option("atoms") == 4
    assert FlatSetting().varied(rule="sgd").option("weight_decay") == 0.0


def test_captions_show_what_the_rule_has():
    assert caption(Setting()).startswith("adamw, lr 0.02, eps 0.01; 32 atoms, d=4, m=4, N=8, B=4")
    assert caption(Setting(rule="sgd")).startswith("sgd, lr 0.02; 32 atoms")
    sbo = Setting(rule="sbo", centre="ema", law="xavier", causal=True, rebalance=2)
    words = "sbo (ema), balanced every 2 (hard), lr 0.02, eps 0.01; xavier, "
    assert caption(sbo).startswith(words)


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        (
            {"rule": "sgd", "eps": 0.1},
            TypeError,
            "eps is an option of adamw, block-adamw, sbo, muon and gauge-adamw;",
        ),
        ({"learning": 0.1}, TypeError, "learning must be a setting or an option of adamw"),
        ({"rule": "adam"}, ValueError, "rule must be one of adamw"),
        ({"rule": 3}, ValueError, "rule must be one of adamw"),
        ({"lr": print}, TypeError, "lr must be a number, a text or a tuple of these"),
        ({"rule_digest": "0", "rule": "nowhere.py:Lion"}, ValueError, "must name a file that can"),
    ],
)
def test_unknown_names_are_refused_when_a_setting_is_made(values, kind, message):
    with pytest.raises(kind, match=message) as error:
        Setting(**values)
    assert "\n" not in str(error.value)


def test_options_are_plain_and_not_to_be_changed():
    options = Setting().rule_options
    assert pickle.loads(pickle.dumps(options)) == options and isinstance(options, Options)
    assert hash(Setting()) == hash(Setting()) != hash(Setting(lr=0.1))
    with pytest.raises(TypeError, match="options must not be changed"):
        options["lr"] = 1.0


def test_options_are_what_a_constructor_takes_that_is_plain():
    def made(n, rate: float | list = 0.1, pair: tuple[int, str] = (1, "a"), how=print, *, k=2): ...

    found = options_of(made, frozenset("n"))
    assert list(found) == ["rate", "pair", "k"]  # print is left to its default
    assert (found["rate"].type, found["k"].type) == (float, int)
    assert help_of(Setting)["d"] == "Token dimension."


def test_the_law_is_made_once_for_the_costs_of_all_cells(monkeypatch):
    made = []
    make_law = Setting.make_law
    monkeypatch.setattr(Setting, "make_law", lambda self: made.append(self) or make_law(self))
    study = SweepSetting(Setting(atoms=5))
    costs = [cell_cost(study, depth, 8) for depth in (2, 4, 8)]
    assert len(made) == 1 and study.setting.stored == 5
    assert costs[1] == 2 * costs[0] and costs[2] == 4 * costs[0]
    assert study.setting == Setting(atoms=5) and study.setting.varied(atoms=6).stored == 6
