from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_stream.embedded.cache.hashing import PrefixHashes
from lmcache_stream.embedded.cache.refusal import RefusedError

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_two_prefixes_have_one_hash_when_they_are_the_same(
    one: list[int], other: list[int], size: int
) -> None:
    hashes = [PrefixHashes(size, tokens).all() for tokens in (one, other)]
    assert [len(found) for found in hashes] == [len(one) // size, len(other) // size]
    for index, pair in enumerate(zip(*hashes, strict=False)):
        end = (index + 1) * size
        assert (pair[0] == pair[1]) == (one[:end] == other[:end])


@given(TOKENS, st.integers(1, 5), st.data())
def test_a_range_is_a_part_of_the_whole(tokens: list[int], size: int, data: st.DataObject) -> None:
    chunks = len(tokens) // size
    start = data.draw(st.integers(0, chunks))
    end = data.draw(st.integers(0, chunks))
    hashes = PrefixHashes(size, tokens)
    assert hashes.between(start * size, end * size) == PrefixHashes(size, tokens).all()[start:end]


def test_what_is_computed_stays_though_the_tokens_be_replaced() -> None:
    hashes = PrefixHashes(2, [1, 2, 3, 4])
    first = hashes.between(0, 2)
    hashes.tokens = [9, 9, 3, 4]
    assert hashes.all() == PrefixHashes(2, [1, 2, 3, 4]).all()
    assert hashes.all()[:1] == first


@pytest.mark.parametrize(
    ("tokens", "start", "end"),
    [
        ([1, 2, 3, 4], 1, 4),
        ([1, 2, 3, 4], 0, 3),
        ([1, 2, 3, 4], 0, 6),
        ([1, 2, 3], 0, 4),
        ([-1, 2], 0, 2),
        ([2**32, 2], 0, 2),
    ],
)
def test_what_is_no_range_of_chunks_is_refused(tokens: list[int], start: int, end: int) -> None:
    with pytest.raises(RefusedError):
        PrefixHashes(2, tokens).between(start, end)
