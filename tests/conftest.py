"""Settings shared by all tests."""

import pytest
import torch
from builders import small_problem
from hypothesis import settings

# The tensors of these tests are small: a second thread costs more than it gives.
torch.set_num_threads(1)

# Property tests: the same examples on every run, and no time limit on a busy machine.
settings.register_profile("ipslimit", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("ipslimit")


@pytest.fixture
def problem():
    """The default small problem: 5 weighted atoms, B = 3, N = 4, d = 3, m = 2, float64."""
    return small_problem()
