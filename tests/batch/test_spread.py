"""Figures in bounded memory, against those of all values."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_stream.batch.spread import Cover, Spread
from lmcache_stream.metrics import Distribution

INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), max_size=40)


def spread_of(values: list[float], limit: int | None) -> Distribution | None:
    spread = Spread(limit)
    for value in values:
        spread.add(value)
    return spread.distribution()


@pytest.mark.parametrize("values", [[], [0.5], [3.0, 1.0, 2.0], [0.0] * 5, [5.0, 1.0, 4.0, 2.0, 3.0]])
def test_few_values_are_kept(values: list[float]) -> None:
    assert spread_of(values, 5) == spread_of(values, None) == Distribution.of(values)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_many_values_are_right_to_half_a_percent(scale: float) -> None:
    draw = random.Random(3)
    values = [scale * draw.lognormvariate(0, 2) for _ in range(20_000)]
    found, exact = spread_of(values, 100), Distribution.of(values)
    assert found is not None
    assert exact is not None
    assert found.count == exact.count
    assert found.mean == pytest.approx(exact.mean)
    for name in ("p50", "p90", "p99"):
        assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=0.006)


def test_a_percentile_of_buckets_is_the_value_at_its_rank() -> None:
    found = spread_of([100.0, 1.0, 10.0], 1)
    assert found is not None
    # At ranks 1, 1.8 and 1.98 of 0 to 2: buckets are not interpolated between.
    assert (found.p50, found.p90, found.p99) == pytest.approx((10, 10, 10), rel=0.006)


def test_zeros_are_values_too() -> None:
    found = spread_of([0.0] * 60 + [1.0] * 40, 10)
    assert found is not None
    assert (found.p50, found.mean) == (0.0, 0.4)
    assert found.p90 == pytest.approx(1.0, rel=0.006)


def test_buckets_are_few_however_many_values_come() -> None:
    spread = Spread(100)
    for number in range(200_000):
        spread.add(1e-6 * 1.0001**number)
    assert len(spread._buckets) < 2500
    assert len(spread._values) == 0


@given(INTERVALS)
def test_what_is_covered_is_counted_once(intervals: list[tuple[int, int]]) -> None:
    cover = Cover()
    covered: set[int] = set()
    for begin, length in intervals:
        cover.add(begin, begin + length)
        covered.update(range(begin, begin + length))
    assert cover.seconds == len(covered)


def test_intervals_that_touch_are_kept_as_one() -> None:
    cover = Cover()
    for begin in (0, 4, 2, 1):
        cover.add(begin, begin + 1)
    assert (cover._begins, cover._ends) == ([0, 4], [3, 5])


def test_what_was_added_up_is_not_counted_again() -> None:
    cover = Cover(1)
    # With the third the first is added up, and nothing else.
    for begin, end in ((0.0, 1.0), (2.0, 3.0), (4.0, 5.0), (0.0, 1.0), (0.5, 1.5)):
        cover.add(begin, end)
    assert cover.seconds == 3.5


def test_a_cover_of_limited_memory_is_right_where_intervals_come_nearly_in_order() -> None:
    draw = random.Random(5)
    begins = [number + draw.uniform(0, 8) for number in range(5000)]
    limited, exact = Cover(20), Cover()
    for begin in begins:
        for cover in (limited, exact):
            cover.add(begin, begin + 0.3)
    assert limited.seconds == pytest.approx(exact.seconds)
    assert len(limited._begins) <= 40 < len(exact._begins)
    assert math.isfinite(limited._floor)
