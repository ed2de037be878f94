"""Figures of any number of values, in memory that ends; pure."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter

from ..metrics import Distribution

__all__ = ["Cover", "Spread"]

# Bounds of neighbouring buckets, so that no percentile is off by more than half a percent.
_GROWTH = 1.01
_STEP = math.log(_GROWTH)
_ZERO = -(10**9)


class Spread:
    """Takes values of zero or more and says how they spread.

    Up to ``limit`` values are kept. From there on they are counted in buckets whose bounds grow by 1 %, as in
    DDSketch (Masson et al., arXiv 1908.10693): count and mean stay exact, percentiles are right to 0.5 %.

    Args:
        limit: None keeps every value.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._values = array("d")
        self._buckets: Counter[int] = Counter()
        self._count = 0
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Take a value."""
        self._count += 1
        self._sum += value
        if self._buckets:
            self._buckets[_bucket(value)] += 1
            return
        self._values.append(value)
        if self._limit is not None and self._count > self._limit:
            self._buckets = Counter(map(_bucket, self._values))
            self._values = array("d")

    def distribution(self) -> Distribution | None:
        """Return how the values spread; None where there is none."""
        if not self._buckets:
            return Distribution.of(self._values)
        ranked = sorted(self._buckets.items())
        p50, p90, p99 = (self._at(ranked, share) for share in (0.50, 0.90, 0.99))
        return Distribution(count=self._count, mean=self._sum / self._count, p50=p50, p90=p90, p99=p99)

    def _at(self, ranked: list[tuple[int, int]], share: float) -> float:
        rank, seen = (self._count - 1) * share, 0
        for bucket, count in ranked:
            seen += count
            if seen > rank and bucket > _ZERO:
                return 2 * math.exp(bucket * _STEP) / (1 + _GROWTH)
            if seen > rank:
                break
        return 0.0


def _bucket(value: float) -> int:
    return math.ceil(math.log(value) / _STEP) if value > 0 else _ZERO


class Cover:
    """Takes intervals, in any order, and says how long at least one of them lasted.

    Args:
        limit: how many intervals that do not touch are kept; beyond that the earliest are added up, and what
            comes later must not begin before their end. None keeps all.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        # Of the intervals, which neither touch nor overlap, in order.
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._added_up = 0.0
        self._floor = -math.inf

    def add(self, begin: float, end: float) -> None:
        """Take an interval."""
        begin = max(begin, self._floor)
        if end <= begin:
            return
        first, last = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begin], [end]
        if self._limit is not None and len(self._begins) > 2 * self._limit:
            self._added_up += self._seconds(self._limit)
            self._floor = self._ends[self._limit - 1]
            del self._begins[: self._limit], self._ends[: self._limit]

    def _seconds(self, count: int) -> float:
        pairs = zip(self._begins[:count], self._ends[:count], strict=True)
        return math.fsum(end - begin for begin, end in pairs)

    @property
    def seconds(self) -> float:
        """How long at least one interval lasted."""
        return self._added_up + self._seconds(len(self._begins))
