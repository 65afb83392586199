"""Pairs, halves and blocks that are named by hand."""

import pytest
import torch
from torch import nn

from ipslimit.optim import Pair, Part, Side, balance


def parameter(*shape):
    return nn.Parameter(torch.ones(*shape))


A, B, BIAS = parameter(3, 4), parameter(4, 3), parameter(3)


HAND = {
    "one pair without a list": (((A, None), (B, None)), TypeError, r"pairs\[0\]\[0\] must be"),
    "no iterable": (3, TypeError, "pairs must be a list of"),
    "a model": (nn.Linear(2, 2), TypeError, "Use find_pairs"),
    "empty": ([], ValueError, "must hold at least one pair"),
    "three halves": ([((A, None), (B, None), (A, None))], TypeError, r"pairs\[0\] must be"),
    "bare matrices": ([(A, B)], TypeError, r"pairs\[0\]\[0\] must be \(matrix, bias or None\)"),
    "no parameter": ([(("a", None), (B, None))], TypeError, "must be an nn.Parameter; got 'a'"),
    "a slice": ([((A[:2], None), (B, None))], ValueError, r"Part\(parameter, \(slice"),
    "integers": (
        [((torch.ones(2, 2, dtype=torch.long), None), (B, None))],
        TypeError,
        "floating dtype",
    ),
    "tied halves": ([((A, None), (A, None))], ValueError, "pairs.0. must have two halves without"),
    "a bias twice": ([((A, A), (B, None))], ValueError, "name every entry of a half once"),
    "one first half of two": (
        [((A, None), (B, None)), ((A, BIAS), (parameter(2, 3), None))],
        ValueError,
        r"pairs\[0\] and pairs\[1\] have the same first one",
    ),
    "one key for two queries": (
        [((A, None), (B, None)), ((parameter(3, 4), None), (B, None))],
        ValueError,
        "have the same second one .*one key for several queries",
    ),
}


@pytest.mark.parametrize("case", HAND)
def test_bad_pairs_by_hand_are_named(case):
    pairs, error, message = HAND[case]
    with pytest.raises(error, match=message):
        balance(pairs)


@pytest.mark.parametrize(
    "index, message",
    [
        ((0,), "at most 2 slices of step 1"),
        ((slice(None, None, 2),), "at most 2 slices of step 1"),
        ((slice(0, 1),) * 3, "at most 2 slices of step 1"),
        ((slice(3, 3),), "must not be empty"),
        ((slice("a"),), "slices of step 1 between integers"),
        ((slice(0, 1.5),), "slices of step 1 between integers"),
    ],
)
def test_bad_blocks_are_named(index, message):
    with pytest.raises(ValueError, match=message):
        Part(A, index)


def test_disjoint_blocks_of_one_parameter_may_be_in_one_pair():
    packed = parameter(6, 4)
    Pair(Side(Part(packed, (slice(0, 3),))), Side(Part(packed, (slice(3, 6),))))
    with pytest.raises(ValueError, match="share some"):
        Pair(Side(Part(packed, (slice(0, 4),))), Side(Part(packed, (slice(3, 6),))))


def test_halves_may_be_parameters():
    expected = Pair(Side(Part(A), (Part(BIAS),)), Side(Part(B)), feeds=True)
    for first, second in (
        (Side(A, (BIAS,)), Side(B)),
        (Side(A, BIAS), Side(B, None)),
        ((A, BIAS), (Part(B), None)),
    ):
        pair = Pair(first, second, feeds=True)
        assert pair.key() == expected.key() and pair.feeds
        assert all(isinstance(part, Part) for part in pair.parts)


@pytest.mark.parametrize(
    "halves, error, message",
    [
        ((A, B), TypeError, r"pair\[0\] must be \(matrix, bias or None\); got .*\(matrix, None\)"),
        ((Side(A), Side("b")), TypeError, "must be an nn.Parameter; got 'b'"),
        ((Side(A, ("b",)), Side(B)), TypeError, "must be an nn.Parameter; got 'b'"),
        ((Side(A), 3), TypeError, r"pair\[1\] must be \(matrix, bias or None\); got 3"),
        (
            (Side(parameter(4, 4)), Side(parameter(3, 7))),
            ValueError,
            r"dimension in common.*got \(4, 4\) and \(3, 7\).*two matrices of one product",
        ),
    ],
)
def test_bad_halves_are_named(halves, error, message):
    with pytest.raises(error, match=message):
        Pair(*halves, feeds=True)
