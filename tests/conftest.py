"""Settings shared by all tests."""

import os
import sys

import pytest
import torch
from builders import small_problem
from hypothesis import settings

# The tensors of these tests are small: a second thread costs more than it gives.
torch.set_num_threads(1)

# Property tests: the same examples on every run, and no time limit on a busy machine.
settings.register_profile("ipslimit", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("ipslimit")


def pytest_configure(config):
    """Values that are drawn by anything but hypothesis would not be the same on every run."""
    strict = "error::hypothesis.errors.HypothesisDeprecationWarning"
    config.addinivalue_line("filterwarnings", strict)
    # make test-oldest, make test-newest: what is deprecated is not to be used here; others may
    if action := os.environ.get("DEPRECATED"):
        for kind in ("DeprecationWarning", "PendingDeprecationWarning"):
            for module in ("ipslimit", "test_"):
                config.addinivalue_line("filterwarnings", f"{action}::{kind}:{module}")


def pytest_runtest_setup(item):
    if "gpu" in item.keywords and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def no_client_outlives_its_test():
    """A Dask client left open looks for its scheduler from a thread, at random intervals.

    They are drawn from the global generator, under the hands of whatever test comes next.
    """
    yield
    if "distributed" in sys.modules:
        for client in list(sys.modules["distributed"].Client._instances):
            client.close()


@pytest.fixture
def problem():
    """The default small problem: 5 weighted atoms, B = 3, N = 4, d = 3, m = 2, float64."""
    return small_problem()


@pytest.fixture(scope="session")
def rebalanced(tmp_path_factory):
    """Folder and results of the tiny `ipslimit rebalance`, which is trained once."""
    pytest.importorskip("tokenizers")
    from rebalance_runs import TINY, run  # the library's experiments take a second to import

    folder = tmp_path_factory.mktemp("rebalanced")
    return folder, run(TINY, folder)
