"""What torch computes has the same bits on any number of threads."""

import pytest
import torch

from ipslimit import Heads, attention_field, attention_vjp
from ipslimit.model import products


def randn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def on_threads():
    """A function: what another returns on 1, 2, 3 and 7 threads."""
    before = torch.get_num_threads()

    def on(function):
        found = []
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found.append(function())
            assert torch.get_num_threads() == count
        return found

    yield on
    torch.set_num_threads(before)


def all_equal(found):
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [(1, 2, 256, 64, 64), (1, 1, 300, 100, 100), (2, 3, 17, 5, 3)])
def test_a_field_and_its_transpose(size, dtype, monkeypatch, on_threads):
    monkeypatch.setenv("IPSLIMIT_KERNEL", "eager")
    contexts, count, tokens, d, m = size
    q, k, v = (randn(i, count, m, d).to(dtype) / 8 for i in range(3))
    heads = Heads(q, k, v, randn(3, count, d, m).to(dtype) / 8)
    x, c = (randn(seed, contexts, tokens, d).to(dtype) for seed in (4, 5))

    def compute():
        dx, dheads = attention_vjp(x, heads, c)
        return attention_field(x, heads), dx, dheads.packed

    all_equal(on_threads(compute))


def test_an_error_leaves_the_number_of_threads(monkeypatch, on_threads):
    monkeypatch.setattr(products, "is_strict", lambda: False)

    @products.on_any_threads
    def refuse():
        assert torch.get_num_threads() == 1
        raise ValueError("no")

    def refused():
        with pytest.raises(ValueError, match="no"):
            refuse()

    on_threads(refused)
