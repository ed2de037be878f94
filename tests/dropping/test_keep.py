"""Keeping chosen tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from lmcache_stream.dropping import Keep, keep
from lmcache_stream.errors import InvalidRequestError


@pytest.mark.parametrize(
    "indices",
    [
        [0, 3, 9],
        (0, 3, 9),
        range(0, 10, 3),
        torch.tensor([0, 3, 9]),
        torch.tensor([0, 3, 9], dtype=torch.int32),
        torch.tensor([0, 3, 9]).numpy(),
        list(torch.tensor([0, 3, 9]).numpy()),
    ],
)
def test_any_sequence_of_ints_will_do(indices: Any) -> None:
    kept = keep(indices).kept_indices(10)
    assert kept.dtype == torch.int64
    assert kept.tolist() == ([0, 3, 6, 9] if isinstance(indices, range) else [0, 3, 9])


def test_the_prefix_must_hold_the_last_index() -> None:
    assert keep([9]).kept_indices(10).tolist() == [9]
    with pytest.raises(InvalidRequestError, match="index 9 is not in a prefix of 9 tokens"):
        keep([3, 9]).kept_indices(9)


@pytest.mark.parametrize(
    ("indices", "reason"),
    [
        ([], "nothing would be left"),
        ([-1, 2], r"indices\[0\] is -1: indices must not be negative"),
        ([0, -2], r"indices\[1\] is -2 after 0"),
        ([1, 1], r"indices\[1\] is 1 after 1: .* increase strictly"),
        ([5, 4], r"indices\[1\] is 4 after 5"),
        ([True, False, True], "mask"),
        (torch.tensor([True, False, True]), "mask"),
        ([0.5], "flat ints"),
        ([1.0, 2.0], "flat ints"),
        ([[1, 2]], "flat ints"),
        (torch.tensor(3), "flat ints"),
        (torch.tensor([[1, 2]]), "flat ints"),
        (3, "flat ints"),
        (None, "flat ints"),
        ("12", "not text"),
    ],
)
def test_refused(indices: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        keep(indices)


def test_what_was_kept_can_be_compared_but_not_changed() -> None:
    assert keep([0, 3]) == Keep((0, 3)) == keep(torch.tensor([0, 3]))
    assert len({keep([0, 3]), keep(range(0, 6, 3))}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        keep([0]).indices = (1,)  # type: ignore[misc]
