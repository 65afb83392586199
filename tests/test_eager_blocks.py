"""The eager path in blocks: results do not feel the cut, and temporaries keep to their bound."""

import math

import pytest
import torch
from builders import F64, assert_to_rounding
from test_attention import ROUNDING, all_results, check, example
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ipslimit import Heads, attention_field, attention_vjp
from ipslimit.model import eager
from ipslimit.model.workspace import Workspace


@pytest.fixture(autouse=True)
def eager_path(monkeypatch):
    """With a workspace that holds nothing of other tests, which counts as a temporary."""
    monkeypatch.setenv("IPSLIMIT_KERNEL", "eager")
    monkeypatch.setattr(eager.Block, "_memory", Workspace())


def set_budgets(monkeypatch, entries):
    monkeypatch.setattr(eager, "TOKEN_BUDGET", entries)
    monkeypatch.setattr(eager, "PAIR_BUDGET", 8 * entries)  # bytes, of doubles


@pytest.mark.parametrize("budget", [1, 50, 200, 1000])
@pytest.mark.parametrize("x_lead,heads_lead", [((5,), (5,)), ((5,), ()), ((), (5,))])
def test_chunks_change_results_by_rounding_only(monkeypatch, budget, x_lead, heads_lead):
    x, parts, c = example(x_lead, heads_lead, H=7, B=3)
    heads = Heads(**parts)
    whole = all_results(x, heads, c)
    set_budgets(monkeypatch, budget)
    for name, chunked in all_results(x, heads, c).items():
        # the same terms in another order of summation
        assert_to_rounding(chunked, whole[name], ROUNDING, name)


def test_chunks_of_leading_indices_change_no_bit(monkeypatch):
    x, parts, c = example((6,), (6,), H=8, B=4, N=8, d=4, m=4)
    heads = Heads(**parts)
    unit = (8 + 4) * (3 * 4 + 4)
    whole = all_results(x, heads, c)
    for rows in (1, 2, 4):
        budget = unit * 4 * 8 * rows
        set_budgets(monkeypatch, budget)
        row_blocks, context_blocks, head_blocks = eager.blocks(6, 4, 8, 8, 4, 4)
        assert (len(row_blocks), len(context_blocks), len(head_blocks)) == (-(-6 // rows), 1, 1)
        for name, chunked in all_results(x, heads, c).items():
            assert torch.equal(chunked, whole[name]), (name, rows)


def test_the_cut_over_heads_and_contexts_ignores_leading_dimensions(monkeypatch):
    set_budgets(monkeypatch, 1000)
    alone = eager.blocks(1, 5, 40, 4, 3, 2)
    for rows in (2, 3, 100):
        assert eager.blocks(rows, 5, 40, 4, 3, 2)[1:] == alone[1:]


def test_blocks_cover_everything_once_within_the_budget(monkeypatch):
    unit = (6 + 2) * (3 * 3 + 2)
    for budget in (1, 150, 400, 1000, 3000, 2**18):
        set_budgets(monkeypatch, budget)
        cuts = eager.blocks(4, 5, 37, 6, 2, 3)
        largest = math.prod(max(b.stop - b.start for b in blocks) for blocks in cuts)
        assert unit * largest <= max(budget, unit)
        for total, blocks in zip((4, 5, 37), cuts):
            assert [i for block in blocks for i in range(total)[block]] == list(range(total))


class Temporaries(TorchDispatchMode):
    """Sizes, in entries, of the tensors that operations make and that are alive at one time."""

    def __init__(self, *inputs):
        super().__init__()
        self.inputs = {t.untyped_storage().data_ptr() for t in inputs}
        self.alive = {}  # address -> (size, weak reference)
        self.moments = set()  # {address: size} of what was alive after each operation

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.alive = {at: made for at, made in self.alive.items() if not made[1].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.inputs | self.alive.keys():
                    size = storage.nbytes() // tensor.element_size()
                    self.alive[storage.data_ptr()] = (size, StorageWeakRef(storage))
        self.moments.add(frozenset((at, size) for at, (size, _) in self.alive.items()))
        return result

    def without(self, *outputs):
        """(largest temporary, largest sum of live ones), not counting the outputs."""
        skip = {t.untyped_storage().data_ptr() for t in outputs}
        live = [[size for at, size in moment if at not in skip] for moment in self.moments]
        return max(map(max, filter(None, live))), max(map(sum, live))


def measured_temporaries(x, parts, c, causal=False):
    heads = Heads(**parts)
    with Temporaries(x, heads.packed, heads.weights, c) as field_mode:
        field = attention_field(x, heads, causal)
    with Temporaries(x, heads.packed, heads.weights, c) as vjp_mode:
        dx, dheads = attention_vjp(x, heads, c, causal)
    return field_mode.without(field), vjp_mode.without(dx, dheads.packed, dheads.weights)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("budget,H", [(1, 2), (1000, 24), (4000, 24)])
def test_temporaries_keep_to_the_stated_bound(monkeypatch, budget, H, causal):
    """No temporary over max(TOKEN_BUDGET, (N + d) (3 m + d), N^2); 6 and 10 of them at most."""
    set_budgets(monkeypatch, budget)
    x, parts, c = example((5,), (5,), H=H, N=6, B=3)
    bound = max(budget, (6 + 3) * (3 * 2 + 3))
    field, vjp = measured_temporaries(x, parts, c, causal)
    assert field[0] <= bound
    assert vjp[0] <= bound
    assert field[1] <= 6 * bound
    assert vjp[1] <= 10 * bound


def test_temporaries_keep_to_the_stated_bound_where_d_is_large(monkeypatch):
    set_budgets(monkeypatch, 4000)
    x, parts, c = example((2,), (2,), H=64, N=2, B=2, m=2, d=96)
    field, vjp = measured_temporaries(x, parts, c)
    assert max(field[0], vjp[0]) <= 4000


def test_broadcasting_copies_heads_and_tokens_at_most_once_each(monkeypatch):
    set_budgets(monkeypatch, 2000)
    x, parts, c = example((20, 1), (3,), H=40, N=2, B=1)
    expanded = 20 * 3 * Heads(**parts).packed[0].numel()
    field, vjp = measured_temporaries(x, parts, c)
    assert max(field[0], vjp[0]) <= expanded
    # packed, and its derivative before it is summed; weights and tokens are far smaller
    assert field[1] <= 1.2 * expanded
    assert vjp[1] <= 2.2 * expanded


def test_an_attention_map_over_the_budget_still_works(monkeypatch):
    set_budgets(monkeypatch, 10)
    x, parts, c = example((), (), N=12)
    check(x, parts, c, causal=True)


@pytest.mark.parametrize("height", [1, 5, 11])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("m", [1, 2])
def test_an_attention_map_of_few_rows_at_a_time_is_the_whole_one(monkeypatch, m, causal, height):
    set_budgets(monkeypatch, 10)
    x, parts, c = example((2,), (2,), N=12, m=m)
    heads, weights = Heads(**parts), torch.rand(x.shape[-3], 12, dtype=F64) + 0.1
    options = {"causal": causal, "token_weights": weights / weights.sum(-1, keepdim=True)}

    def results():
        dx, dheads = attention_vjp(x, heads, c, **options)
        return attention_field(x, heads, **options), dx, dheads.packed, dheads.weights

    whole = results()
    monkeypatch.setattr(eager, "MATRIX_BUDGET", 12 * height)
    for part, at_once in zip(results(), whole, strict=True):
        assert_to_rounding(part, at_once, ROUNDING, "rows")


def test_no_temporary_is_as_large_as_an_attention_map_over_the_budget(monkeypatch):
    set_budgets(monkeypatch, 10)
    monkeypatch.setattr(eager, "MATRIX_BUDGET", 128 * 32)
    field, vjp = measured_temporaries(*example((), (), N=128, B=1, H=2))
    assert max(field[0], vjp[0]) == 128 * 32
