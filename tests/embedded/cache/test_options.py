from __future__ import annotations

import math
from typing import Any

import pytest

from lmcache_stream.embedded.cache import CacheOptions
from lmcache_stream.embedded.cache.options import bytes_of
from lmcache_stream.errors import InvalidRequestError


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "4", None])
@pytest.mark.parametrize("name", ["chunk_size", "size_bytes"])
def test_counts_are_positive_ints(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        CacheOptions(**{name: value})


@pytest.mark.parametrize("value", [0, -1, True, math.nan, math.inf, "4", None])
@pytest.mark.parametrize(
    "name", ["read_ttl", "write_ttl", "reap_timeout", "registration_grace", "session_ttl"]
)
def test_times_are_positive_seconds(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        CacheOptions(**{name: value})


@pytest.mark.parametrize("value", [0, -0.1, 1.1, True, math.nan, "4", None])
@pytest.mark.parametrize("name", ["trigger_watermark", "eviction_ratio"])
def test_parts_are_between_nothing_and_all(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        CacheOptions(**{name: value})


@pytest.mark.parametrize(("size_gb", "size"), [(1, 1 << 30), (0.01, 10737418), (1e-12, 1)])
def test_a_size_in_bytes(size_gb: float, size: int) -> None:
    assert bytes_of(size_gb) == size


@pytest.mark.parametrize("size_gb", [0, -1, math.nan, math.inf, True, "1"])
def test_no_size(size_gb: Any) -> None:
    with pytest.raises(InvalidRequestError, match="size_gb"):
        bytes_of(size_gb)
