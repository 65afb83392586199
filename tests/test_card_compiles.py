"""The card's kernels compile for one, without one, in all that they can be asked for.

The interpreter does not know what the compiler refuses. Triton is not to interpret here, as in
tests/card.
"""

import pytest
import torch

from ipslimit import Heads
from ipslimit.card import sizes
from ipslimit.model.branch import Branch
from ipslimit.model.heads import BIASES
from ipslimit.model.sight import Sight
from ipslimit.solvers.adams import Adams
from ipslimit.solvers.grid import DepthGrid
from ipslimit.solvers.scheme import System, UnitSums

pytest.importorskip("triton", sizes.OLDEST)
pytestmark = pytest.mark.slow

B, N = 2, 8


@pytest.fixture
def compiled_in(monkeypatch, tmp_path):
    from triton.runtime import driver

    from benchmarks.card_registers import compiled_in, registers_of

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    before = driver._active
    yield lambda work: [(name, registers_of(kernel)[1]) for name, kernel, _ in compiled_in(work)]
    driver._active = before


def empty(*shape, dtype):
    return torch.empty(*shape, dtype=dtype, device="meta")


def sight(kind, dtype):
    u = empty(B, N, dtype=dtype) if "weights" in kind else None
    ends = empty(B, N, dtype=torch.int64) if "positions" in kind else None
    return Sight("mask" in kind, u, ends, None if u is None else torch.zeros(B, dtype=torch.bool))


CASES = [(torch.float32, "mask"), (torch.float64, "mask weights positions")]


@pytest.mark.parametrize("dtype, kind", CASES)
def test_small_heads_with_all_biases(dtype, kind, compiled_in):
    from ipslimit.card import on_tensors
    from ipslimit.solvers.march_swept import SweptMarch

    layout, seen = Heads.make_layout(BIASES, d=3, m=3), sight(kind, dtype)
    packed, weights = empty(5, layout.size, 5, dtype=dtype), empty(5, 5, dtype=dtype)
    x = empty(5, B, N, 3, dtype=dtype)
    nodes = Branch.alone(Heads.from_packed(packed, weights, layout))

    def work():
        on_tensors.vjp(x, packed, weights, x, layout, seen, True, True)
        grid = DepthGrid((0.0, 0.5, 1.0))
        system = System(grid, nodes, seen, {"field": 0, "vjp": 0}, with_means=True)
        SweptMarch(system, Adams).forward(x, x)
        SweptMarch(system, Adams).backward(x, x, x, UnitSums.room(system))

    found = compiled_in(work)
    assert [name for name, _ in found] == ["_vjp", "_add_up", "march", "march"]
    assert dtype == torch.float64 or not any(spilled for _, spilled in found)


@pytest.mark.parametrize("dtype, kind", CASES)
def test_larger_heads_with_all_biases(dtype, kind, compiled_in):
    from ipslimit.card import on_tiles

    layout, seen = Heads.make_layout(BIASES, d=33, m=33), sight(kind, dtype)
    heads = empty(1, layout.size, 3, dtype=dtype), empty(1, 3, dtype=dtype)
    x, kept = empty(1, B, N, 33, dtype=dtype), []

    def work():
        on_tiles.field(x, *heads, layout, seen, kept)
        on_tiles.vjp(x, *heads, x, layout, seen, True, True, kept)
        on_tiles.vjp(x, *heads, x, layout, seen, True, True)

    found = compiled_in(work)
    assert [name for name, _ in found] == ["by_queries", "by_queries", "by_keys", "by_queries"]
    assert dtype == torch.float64 or not any(spilled for _, spilled in found)
