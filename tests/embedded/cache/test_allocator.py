from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lmcache_stream.embedded.cache.allocator import Allocator

ALIGNMENT = 16
SIZE = 64 * ALIGNMENT


def aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


class Ranges(RuleBasedStateMachine):
    """Against a bitmap of the units that are taken."""

    taken: Any = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(SIZE, alignment=ALIGNMENT)
        self.owners: dict[int, int] = {}
        self.units = [False] * (SIZE // ALIGNMENT)

    def longest_gap(self) -> int:
        longest = current = 0
        for unit in self.units:
            current = 0 if unit else current + 1
            longest = max(longest, current)
        return longest * ALIGNMENT

    def mark(self, offset: int, length: int, value: bool) -> None:
        for unit in range(offset // ALIGNMENT, (offset + aligned(length)) // ALIGNMENT):
            assert self.units[unit] is not value, "a range within another"
            self.units[unit] = value

    @rule(target=taken, length=st.integers(1, SIZE + 1))
    def allocate(self, length: int) -> tuple[int, int] | None:
        gap = self.longest_gap()
        offset = self.allocator.allocate(length)
        if offset is None:
            # Free neighbours are one range, so nothing that fits is refused.
            assert gap < aligned(length)
            return None
        assert offset % ALIGNMENT == 0
        assert offset + length <= SIZE
        self.mark(offset, length, True)
        self.owners[offset] = length
        return offset, length

    @rule(one=consumes(taken))
    def free(self, one: tuple[int, int] | None) -> None:
        if one is None:
            return
        self.allocator.free(one[0])
        del self.owners[one[0]]
        self.mark(*one, False)

    @rule(length=st.integers(1, SIZE), count=st.integers(0, 8))
    def all_or_nothing(self, length: int, count: int) -> None:
        used = self.allocator.used
        offsets = self.allocator.allocate_all(length, count)
        if offsets is None:
            assert self.allocator.used == used
            return
        assert len(offsets) == count
        for offset in offsets:
            self.mark(offset, length, True)
        for offset in offsets:
            self.allocator.free(offset)
            self.mark(offset, length, False)

    @invariant()
    def what_is_used_is_what_was_handed_out(self) -> None:
        assert self.allocator.used == sum(map(aligned, self.owners.values()))


TestRanges = Ranges.TestCase
TestRanges.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_best_fit_is_taken() -> None:
    allocator = Allocator(10 * ALIGNMENT, alignment=ALIGNMENT)
    ranges = [allocator.allocate(length * ALIGNMENT) for length in (3, 1, 2, 1, 3)]
    assert ranges == [0, 48, 64, 96, 112]
    allocator.free(0)
    allocator.free(64)
    # Into the gap of two, not into the first, of three.
    assert allocator.allocate(2 * ALIGNMENT) == 64
    assert allocator.allocate(2 * ALIGNMENT) == 0


@given(st.permutations(range(6)))
def test_all_given_back_is_one_range_again(order: list[int]) -> None:
    allocator = Allocator(SIZE, alignment=ALIGNMENT)
    offsets = allocator.allocate_all(10 * ALIGNMENT, 6)
    assert offsets is not None
    for index in order:
        allocator.free(offsets[index])
    assert allocator.used == 0
    assert allocator.allocate(SIZE) == 0


@pytest.mark.parametrize("length", [0, -5])
def test_no_range_without_a_length(length: int) -> None:
    with pytest.raises(ValueError, match="range"):
        Allocator(SIZE).allocate(length)


def test_what_was_not_handed_out_is_not_taken_back() -> None:
    allocator = Allocator(SIZE, alignment=ALIGNMENT)
    allocator.allocate(ALIGNMENT)
    for offset in (ALIGNMENT, 5, 0):
        if offset == 0:
            allocator.free(0)
        with pytest.raises(ValueError, match="handed out"):
            allocator.free(offset)


@pytest.mark.parametrize(("size", "whole"), [(0, 0), (15, 0), (16, 16), (47, 32)])
def test_only_whole_units_of_a_pool_are_handed_out(size: int, whole: int) -> None:
    allocator = Allocator(size, alignment=ALIGNMENT)
    assert allocator.allocate(whole + 1) is None
    if whole:
        assert allocator.allocate(whole) == 0
    assert allocator.used == whole
