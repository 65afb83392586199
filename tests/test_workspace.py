"""Memory that a thread holds on to: nobody is given what somebody else has."""

import threading

import torch
from builders import F64, normal, random_heads

from ipslimit import attention_field
from ipslimit.model import workspace
from ipslimit.model.workspace import Workspace

LIKE = torch.zeros(1, dtype=F64)


def address(t):
    return t.untyped_storage().data_ptr()


def test_what_was_given_back_is_taken_again_and_nothing_else():
    memory = Workspace()
    one, two = memory.take(LIKE, (3, 4)), memory.take(LIKE, (12,))
    assert one.shape == (3, 4) and one.dtype == F64 and address(one) != address(two)
    freed = address(one)
    memory.give(one)
    assert address(memory.take(LIKE, (13,))) != freed
    assert address(memory.take(LIKE.float(), (12,))) != freed
    assert address(memory.take(LIKE, (2, 6))) == freed
    assert address(memory.take(LIKE, (12,))) not in (freed, address(two))


def test_scratch_is_one_piece_a_use():
    memory = Workspace()
    one, other = memory.scratch("one", LIKE, (4, 5)), memory.scratch("other", LIKE, (4, 5))
    assert address(one) != address(other)
    assert address(memory.scratch("one", LIKE, (7,))) == address(one)
    assert memory.scratch("one", LIKE, (8, 5)).shape == (8, 5)
    assert memory.scratch("one", LIKE.float(), (2,)).dtype == torch.float32


def test_large_pieces_and_too_many_are_not_held(monkeypatch):
    monkeypatch.setattr(workspace, "PIECE_BYTES", 800)
    monkeypatch.setattr(workspace, "FREE_BYTES", 1600)
    memory = Workspace()
    large = memory.take(LIKE, (101,))
    memory.give(large)
    assert not memory._free and memory.scratch("one", LIKE, (101,)).shape == (101,)
    assert not memory._scratch
    pieces = [memory.take(LIKE, (100,)) for _ in range(3)]
    for piece in pieces:
        memory.give(piece)
        assert sum(t.nbytes for free in memory._free.values() for t in free) <= 1600
    assert [address(t) for t in memory._free[100, F64]] == [address(pieces[-1])]


def test_threads_and_inference_mode_share_nothing_that_hurts():
    memory, found = Workspace(), []
    with torch.inference_mode():
        mine = memory.scratch("one", LIKE, (4,))
        memory.give(memory.take(LIKE, (4,)))
    mine += 1  # not inside inference mode
    assert not mine.is_inference() and not memory.take(LIKE, (4,)).is_inference()
    thread = threading.Thread(target=lambda: found.append(memory.scratch("one", LIKE, (4,))))
    thread.start()
    thread.join()
    assert address(found[0]) != address(mine)


def test_fields_that_wait_for_their_way_back_do_not_touch_each_other(monkeypatch):
    monkeypatch.setenv("IPSLIMIT_KERNEL", "eager")
    heads = random_heads((), 3, 2, 4, seed=1)
    xs = [normal(2, 5, 4, seed=seed).requires_grad_() for seed in (2, 3, 4)]
    alone = [torch.autograd.grad(attention_field(x, heads).square().sum(), x)[0] for x in xs]
    outs = [attention_field(x, heads) for x in xs]
    values = [out.detach().clone() for out in outs]
    for k in (1, 0, 2, 1):  # in another order, and one again
        (found,) = torch.autograd.grad(outs[k].square().sum(), xs[k], retain_graph=True)
        assert torch.equal(found, alone[k])
    assert all(map(torch.equal, outs, values))
