"""The benchmark of a card runs to its end, with the CPU as the card: no timing is asserted."""

import math

import pytest

from benchmarks import card


@pytest.fixture(scope="module")
def result():
    return card.run("cpu", tiny=True, progress=lambda line: None, budget=math.inf)


def test_all_of_it_is_measured(result):
    assert [len(result[name]) for name in ("kernels", "steps", "limits")] == [2, 2, 2]
    assert not result["left out"]
    for row in result["kernels"]:
        assert {"eager", "einsum", "sdpa", "CPU"} <= set(row["times"])
        assert 0 < row["bound"] and row["best"] in ("einsum", "sdpa", "compile")


def test_the_page_has_a_row_of_every_size_and_dtype(result):
    page = card.markdown(result)
    assert page.count("| float32 |") == page.count("| float64 |") == 3
    assert "CUDA none" in page or "CUDA 1" in page


def test_what_there_is_no_time_for_is_named():
    found = card.run("cpu", tiny=True, progress=lambda line: None, budget=-1.0)
    assert len(found["left out"]) == 6 and "Left out for want of time" in card.markdown(found)
