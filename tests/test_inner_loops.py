"""Loops for compiled code alone: not called from Python, once for all literals, owning nothing."""

import numpy as np
import pytest
from builders import small_problem
from numba.core.runtime import _nrt_python, rtsys

from ipslimit import AdamW, Clip, Rebalance, train_particles
from ipslimit.compilation import compiled_entry, inner_loop
from ipslimit.solvers import solve_limit


@inner_loop
def shifted(x, by):
    return x + by


@compiled_entry()
def twice(x):
    return shifted(shifted(x, 1), 2)


def test_an_inner_loop_is_compiled_once_for_all_literals_and_not_called_from_python():
    assert twice(3) == 6
    assert len(shifted.overloads) == 1
    with pytest.raises(TypeError, match="shifted is called from compiled code alone"):
        shifted(3, 1)


def test_a_function_that_makes_an_array_must_say_so():
    def entry(x):
        return made(x)

    made = inner_loop(lambda x: np.empty(x)[0] * 0)
    with pytest.raises(Exception, match="Only accept returning of array passed"):
        compiled_entry()(entry)(3)
    made = inner_loop(lambda x: len(np.empty(x)), allocates=True)
    assert compiled_entry()(entry)(3) == 3


def test_training_and_the_limit_leave_no_array_behind_and_free_none_twice():
    """Inner loops count no references: what they are handed must be counted by their callers."""
    problem, rule = small_problem(), Rebalance(Clip(AdamW(0.02), 1.0))

    def held() -> int:
        stats = rtsys.get_allocation_stats()
        return stats.mi_alloc - stats.mi_free

    def work() -> None:
        train_particles(problem, rule, depth=3, heads=4, steps=2, seeds=2)
        solve_limit(problem, rule, steps=1, tol=1e-2)

    work()  # compiles
    _nrt_python.memsys_enable_stats()
    before = held()
    work()
    assert held() == before
