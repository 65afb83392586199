"""What result files say of how they were made, and studies read back from them."""

import json
import platform

import numba
import numpy
import pytest
import scipy
import torch

import ipslimit
from ipslimit.experiments.provenance import provenance
from ipslimit.experiments.settings import Setting, Sizes, SweepSetting
from ipslimit.experiments.sweep import Sweep


def test_versions_and_machine_are_named(monkeypatch):
    monkeypatch.delenv("IPSLIMIT_KERNEL", raising=False)
    found = provenance("cpu")
    assert found["versions"] == {
        "ipslimit": ipslimit.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "numba": numba.__version__,
        "python": platform.python_version(),
    }
    machine = found["machine"]
    assert set(machine) == {"platform", "processor", "device"} and all(machine.values())
    assert machine["device"] == "cpu"
    # nothing of the moment: equal settings give equal files
    assert found == provenance("cpu") == json.loads(json.dumps(found))


def test_a_kernel_that_was_asked_for_is_named_and_decides_no_cell(monkeypatch, tmp_path):
    monkeypatch.delenv("IPSLIMIT_KERNEL", raising=False)
    before = Sweep(SweepSetting(), tmp_path, "cpu").path((4, 1))
    monkeypatch.setenv("IPSLIMIT_KERNEL", "eager")
    assert provenance("cpu")["machine"]["IPSLIMIT_KERNEL"] == "eager"
    assert Sweep(SweepSetting(), tmp_path, "cpu").path((4, 1)) == before


OF_RULE = ("setting", "rule_options")


@pytest.mark.parametrize(
    "study",
    [
        SweepSetting(),
        SweepSetting(Setting(record=(0, 1), biases=True, lr=1), Sizes((2,), (4, 8), 3), tol=1e-3),
        SweepSetting(Setting(law="xavier", rule="sbo"), constant=False),
    ],
)
def test_a_study_comes_back_from_what_was_written_of_it(study):
    assert SweepSetting.from_dict(study.as_dict()) == study
    again = SweepSetting.from_dict(json.loads(json.dumps(study.as_dict())))
    assert again == study
    assert isinstance(again.sizes.depths, tuple) and isinstance(again.setting, Setting)


@pytest.mark.parametrize(
    "at, change, kind, words",
    [
        ((), {"study": {}}, ValueError, r"study must .* got unknown \['study'\]\. Pass"),
        (("setting",), {"learning": 1}, ValueError, r"study\.setting .*unknown \['learning'\]"),
        (OF_RULE, {"lr": None}, ValueError, r"study\.setting\.rule_options must .* no \['lr'\]"),
        (OF_RULE, {"centre": "ema"}, TypeError, r"centre is an option of sbo; adamw has lr"),
        ((), {"sizes": None}, ValueError, r"study must .* got no \['sizes'\]"),
        ((), {"sizes": 4}, TypeError, r"study\.sizes must be a mapping of settings; got 4"),
        (("setting",), {"causal": 0}, TypeError, r"study\.setting\.causal must be of type bool"),
        (("setting",), {"d": True}, TypeError, r"study\.setting\.d must be of type int; got True"),
        (OF_RULE, {"lr": "1"}, TypeError, r"rule_options\.lr must be of type float; got '1'"),
        (OF_RULE, {"betas": [0.9]}, TypeError, r"betas must be of type tuple\[float, float\]"),
        (("sizes",), {"depths": 4}, TypeError, r"study\.sizes\.depths must be of type tuple"),
        (("sizes",), {"depths": ["4"]}, TypeError, r"depths must be of type tuple\[int, "),
        (("sizes",), {"seeds": 0}, ValueError, r"seeds must be at least 1"),
    ],
)
def test_what_is_no_study_is_refused_by_name(at, change, kind, words):
    content = json.loads(json.dumps(SweepSetting().as_dict()))
    part = content
    for name in at:
        part = part[name]
    for name, value in change.items():
        if value is None:
            del part[name]
        else:
            part[name] = value
    with pytest.raises(kind, match=words) as refused:
        SweepSetting.from_dict(content)
    assert "\n" not in str(refused.value)
