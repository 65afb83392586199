"""What is done on a card at all, and in which memory: told without one."""

import dataclasses

import pytest
import torch
from builders import normal, small_problem
from card_stand_in import CARD, MEMORY, NAME, card

from ipslimit import SGD, AdamW, Problem, TokenProblem, XavierUniform, train_particles
from ipslimit.checks import NoRoom, resolve_device
from ipslimit.experiments.cells import memory_of_a_cell, study_device
from ipslimit.experiments.engines import InProcess
from ipslimit.experiments.memory import cell_bytes, seeds_that_fit
from ipslimit.experiments.settings import StudyError, SweepSetting
from ipslimit.model.work import LARGE_CARDS, Work, training_work
from ipslimit.solvers import solve_limit
from ipslimit.solvers.limit_memory import SHARE, free_bytes
from ipslimit.solvers.limit_work import limit_work


@pytest.fixture
def a_card(monkeypatch):
    with card(monkeypatch):
        yield


def sized(B, N, d, m, dtype=torch.float32):
    contexts, targets = torch.zeros(B, N, d, dtype=dtype), torch.zeros(B, d, dtype=dtype)
    return Problem(contexts, targets, XavierUniform(d, m))


SMALL = sized(4, 8, 4, 4)
LARGE = sized(32, 256, 64, 16)


def called(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)


@pytest.mark.parametrize("name", [NAME, "NVIDIA H200"])
def test_small_work_stays_on_the_cpu(a_card, monkeypatch, name):
    called(monkeypatch, name)
    # a layer of 16 seeds of 16 heads: 52 launches are longer than all of it on the CPU
    for seeds, depth in ((1, 4), (16, 128), (16, 1024)):
        assert training_work(SMALL, depth, {"attention": 16}, seeds, 5).device().type == "cpu"
    assert limit_work(SMALL, 32, 5, 8).device().type == "cpu"
    run = train_particles(small_problem(), SGD(0.1), 2, 2, 1)
    assert run.x[1].device.type == "cpu"
    assert solve_limit(small_problem(), SGD(0.1), 0, 1e-2).loss.device.type == "cpu"


def test_large_work_goes_to_a_card_whose_bandwidth_is_known(a_card, monkeypatch):
    work = training_work(LARGE, 16, {"attention": 64}, 64, 5)
    assert work.device().type == "cpu"  # of the stand-in nothing is known
    called(monkeypatch, "NVIDIA H200")
    assert work.device().type == "cuda" and LARGE_CARDS
    assert limit_work(LARGE, 2**14, 5, 8).device().type == "cpu"  # six times the operations
    double = dataclasses.replace(work, dtype=torch.float64)
    assert double.seconds_on_card("NVIDIA H200") > work.seconds_on_card("NVIDIA H200")


def test_the_choice_grows_with_the_work_and_knows_its_parts():
    one, two = (training_work(LARGE, depth, {"attention": 8}, 2, 5) for depth in (8, 16))
    assert two == one + one
    # seeds are done side by side: they add no launches but those of trained ends
    more = training_work(LARGE, 8, {"attention": 8}, 4, 5)
    assert more.launches == one.launches and more.operations == 2 * one.operations
    ids = torch.zeros(4, 9, dtype=torch.int64)
    text = TokenProblem(ids, 5, XavierUniform(4, 2), 4)
    few, many = (training_work(text, 8, {"attention": 8}, n, 0).launches for n in (1, 2))
    assert many > few


def test_of_units_that_nothing_is_known_of_auto_is_the_cpu():
    unknown = Work(10.0, float("inf"), float("inf"), torch.float32)
    assert not unknown.seconds_on_card("NVIDIA H200") < unknown.seconds_on_cpu()


def test_auto_without_sizes_is_the_cpu_and_a_name_is_taken_at_its_word(a_card):
    assert resolve_device("auto").type == "cpu"
    assert resolve_device("auto", lambda: CARD) == resolve_device("cuda:0") == CARD


def test_auto_without_a_card_asks_nobody(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto", lambda: pytest.fail("asked")).type == "cpu"


def test_a_study_is_weighed_as_a_whole(a_card, monkeypatch):
    study = SweepSetting()
    assert study_device("auto", study, study.sizes.cells).type == "cpu"
    assert study_device("cuda:0", study, study.sizes.cells) == CARD


# ------------------------------------------------------------------------------- memory


def test_sizes_beyond_the_card_are_refused_by_its_name(a_card, monkeypatch):
    from ipslimit import devices

    few = type("Told", (), {"total_memory": 2**13})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: few)
    devices.total_of_card.cache_clear()
    message = rf"must fit into the memory of cuda \({NAME}\), .* GiB; got sizes that need"
    with pytest.raises(NoRoom, match=message):
        train_particles(small_problem(), SGD(0.1), 64, 2, 0, device="cuda")
    with pytest.raises(NoRoom, match=message):
        solve_limit(small_problem(), SGD(0.1), 2**12, 1e-2, device="cuda")


def test_cells_are_planned_with_the_memory_of_the_card(a_card, monkeypatch):
    assert free_bytes(CARD) == int(SHARE * MEMORY / 2) == memory_of_a_cell(None, InProcess(), CARD)
    study = SweepSetting()
    assert seeds_that_fit(study, 8, 4, None, "cuda:0") == study.sizes.seeds
    two = cell_bytes(study, 8, 4, 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (two / SHARE + 8, MEMORY))
    assert seeds_that_fit(study, 8, 4, None, "cuda:0") <= 2 < study.sizes.seeds
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2**10, MEMORY))
    with pytest.raises(StudyError, match=rf"GiB, .* of the memory of cuda:0 \({NAME}\)"):
        seeds_that_fit(study, 8, 4, None, "cuda:0")


def test_what_torch_keeps_of_the_card_and_does_not_use_is_free(a_card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 2**29)
    assert free_bytes(CARD) == int(SHARE * (MEMORY / 2 + 2**29))


# ---------------------------------------------------------------- on a card that is one


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"batch": 2}])
def test_no_step_waits_for_a_card(options):
    """torch raises where the host would wait, between the steps 1 and 3."""
    of = Problem(normal(3, 4, 3), normal(3, 3, seed=1), XavierUniform(3, 2), **options)

    def watch(k, run):
        torch.cuda.set_sync_debug_mode("error" if k in (1, 2) else "default")

    train_particles(of, AdamW(0.02), 4, 4, 4, 2, device="cuda", record=[4], callback=watch)
