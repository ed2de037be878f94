"""Ranges of a pool, handed out and taken back: only numbers, no memory."""

from __future__ import annotations

from bisect import bisect_left, insort

# Of LMCache's pool; a page, so that no two chunks share one.
ALIGNMENT = 4096


class Allocator:
    """Aligned ranges within ``[0, size)``: best fit, and free neighbours become one range at once."""

    def __init__(self, size: int, *, alignment: int = ALIGNMENT) -> None:
        self._alignment = alignment
        self._taken: dict[int, int] = {}
        # The free ranges three times: by size for the best fit, by both ends for their neighbours.
        self._by_size: list[tuple[int, int]] = []
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self.used = 0
        whole = size - size % alignment
        if whole:
            self._add_free(0, whole)

    def allocate(self, length: int) -> int | None:
        """Return the offset of ``length`` bytes, or None where no free range is large enough.

        Raises:
            ValueError: ``length`` is not positive.
        """
        if length < 1:
            raise ValueError(f"a range of {length} bytes")
        wanted = self._aligned(length)
        place = bisect_left(self._by_size, (wanted, -1))
        if place == len(self._by_size):
            return None
        found, start = self._by_size[place]
        self._remove_free(start)
        if found > wanted:
            self._add_free(start + wanted, found - wanted)
        self._taken[start] = wanted
        self.used += wanted
        return start

    def allocate_all(self, length: int, count: int) -> list[int] | None:
        """Return the offsets of ``count`` ranges of ``length`` bytes each: all of them or None."""
        offsets: list[int] = []
        for _ in range(count):
            offset = self.allocate(length)
            if offset is None:
                for taken in offsets:
                    self.free(taken)
                return None
            offsets.append(offset)
        return offsets

    def free(self, offset: int) -> None:
        """Take back the range at ``offset``.

        Raises:
            ValueError: no range was handed out there.
        """
        if offset not in self._taken:
            raise ValueError(f"no range was handed out at {offset}")
        length = self._taken.pop(offset)
        self.used -= length
        start, end = offset, offset + length
        if end in self._length_at:
            end += self._remove_free(end)
        if start in self._start_before:
            start = self._start_before[start]
            self._remove_free(start)
        self._add_free(start, end - start)

    def _aligned(self, length: int) -> int:
        return -(-length // self._alignment) * self._alignment

    def _add_free(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start
        insort(self._by_size, (length, start))

    def _remove_free(self, start: int) -> int:
        length = self._length_at.pop(start)
        del self._start_before[start + length]
        del self._by_size[bisect_left(self._by_size, (length, start))]
        return length
