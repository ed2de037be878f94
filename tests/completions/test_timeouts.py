"""Deadlines that cannot be right."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_stream.completions import CompletionTimeouts
from lmcache_stream.errors import InvalidRequestError


@pytest.mark.parametrize("name", ["connect", "first_token", "idle", "drain"])
@pytest.mark.parametrize("value", [-1, "5", True, float("nan")])
def test_what_is_no_time_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        CompletionTimeouts(**{name: value})


def test_none_and_zero() -> None:
    assert CompletionTimeouts(connect=None, first_token=None, idle=None, drain=0).drain == 0
    for name in ("connect", "first_token", "idle"):
        with pytest.raises(InvalidRequestError):
            CompletionTimeouts(**{name: 0})
    with pytest.raises(InvalidRequestError):
        CompletionTimeouts(drain=None)  # type: ignore[arg-type]
