"""Cases of a parametrised test of which a few run every time, and the rest among the slow tests."""

import pytest


def slow_but(cases, *fast, ids=None):
    """The cases, all marked slow but these; `ids` tells the name of one, which is itself if not."""
    return [
        pytest.param(case, marks=[pytest.mark.slow] * (case not in fast), id=ids and ids(case))
        for case in cases
    ]
