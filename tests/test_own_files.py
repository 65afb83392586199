"""Classes out of a user's own file: found, refused by name, and known in other processes."""

import pickle
import sys

import pytest

from ipslimit import Rule
from ipslimit.experiments.frame import own

SIGNUM = """
import dataclasses
import torch
import ipslimit

@dataclasses.dataclass
class Signum(ipslimit.Rule):
    lr: float = 0.1

    def init(self, heads):
        return {}

    def update(self, heads, state, gradient, step):
        return heads.with_packed(heads.packed - self.lr * gradient.packed.sign()), {}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SIGNUM)
    return path


def test_a_class_is_found_once_for_a_text_and_anew_for_another(file):
    first = own.own_class("rule", f"{file}:Signum", Rule)
    assert issubclass(first, Rule) and first(0.5).lr == 0.5
    assert own.own_class("rule", f"{file}:Signum", Rule) is first
    file.write_text(SIGNUM.replace("0.1", "0.2"))
    second = own.own_class("rule", f"{file}:Signum", Rule)
    assert second is not first and second().lr == 0.2 and first().lr == 0.1
    assert own.digest_of(first) != own.digest_of(second) and own.digest_of(Rule) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nowhere.py:Signum", "a file that can be read"),
        ("{file}:Lion", "Use {file}:Signum"),
        ("{broken}:Lion", "raised SyntaxError"),
    ],
)
def test_what_is_not_there_is_refused_by_name(file, tmp_path, text, reason):
    broken = tmp_path / "broken.py"
    broken.write_text("def")
    names = {"file": file, "broken": broken}
    with pytest.raises(ValueError, match="rule must name") as error:
        own.own_class("rule", text.format(**names), Rule)
    assert reason.format(**names) in str(error.value) and "\n" not in str(error.value)


def test_another_process_knows_it_when_told(file):
    rule = own.own_class("rule", f"{file}:Signum", Rule)(0.3)
    sent, modules = pickle.dumps(rule), own.carried()
    del sys.modules[type(rule).__module__]  # as in a worker that was spawned
    file.unlink()
    own.receive(modules)
    assert pickle.loads(sent).lr == 0.3
