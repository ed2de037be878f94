from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_stream.embedded.cache.options import CacheOptions
from lmcache_stream.embedded.cache.refusal import RefusedError
from lmcache_stream.embedded.cache.storage import ChunkLayout, ChunkStore, Shard

from .clock import Clock

PAGE = 4096
# A chunk a page.
LAYOUT = ChunkLayout((2, 1, 4, 256), torch.bfloat16)
OPTIONS = CacheOptions(chunk_size=4, size_bytes=10 * PAGE, read_ttl=300, write_ttl=600)


def shard(name: str, worker: int = 0) -> Shard:
    return Shard(name.encode(), "model", 1, worker, "")


def shards(names: str) -> list[Shard]:
    return [shard(name) for name in names]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> ChunkStore:
    return ChunkStore(OPTIONS, clock)


def put(store: ChunkStore, names: str) -> None:
    assert len(store.reserve(shards(names), LAYOUT)) == len(names)
    store.publish(shards(names))


def found(store: ChunkStore, names: str) -> int:
    hits = store.lock_prefix(([one] for one in shards(names)), 1)
    store.unlock(shards(names)[:hits])
    return hits


def held(store: ChunkStore) -> tuple[int, int]:
    counts = store.counts()
    return counts.read_locked, counts.write_locked


def test_what_is_reserved_is_there_once_it_is_published(store: ChunkStore) -> None:
    given = store.reserve(shards("ab"), LAYOUT)
    assert found(store, "ab") == 0
    assert (store.counts().staged, store.counts().staged_bytes) == (2, 2 * PAGE)
    store.publish(shards("ab"))
    store.lock_prefix(([one] for one in shards("ab")), 1)
    assert store.read(shards("ab")) == [given[one] for one in shards("ab")]
    assert store.counts()[:3] == (2, 0, 0)


def test_a_row_hits_when_every_worker_is_there(store: ChunkStore) -> None:
    both = [[shard(name, worker) for worker in (0, 1)] for name in "ab"]
    store.reserve([*both[0], both[1][0]], LAYOUT)
    store.publish([*both[0], both[1][0]])
    assert store.lock_prefix(both, 1) == 1
    assert held(store) == (2, 0)


def test_a_read_takes_locks_away_when_it_fails_and_none_when_not(store: ChunkStore) -> None:
    put(store, "ab")
    store.lock_prefix([[shard("a")]], 2)
    assert store.read(shards("a")) is not None
    assert store.read(shards("ab")) is None
    assert held(store) == (1, 0)
    assert store.read(shards("ab")) is None
    assert held(store) == (0, 0)


def test_a_read_lock_ends_by_itself(store: ChunkStore, clock: Clock) -> None:
    put(store, "a")
    store.lock_prefix([[shard("a")]], 1)
    clock.advance(299)
    assert held(store) == (1, 0)
    clock.advance(1)
    assert held(store) == (0, 0)
    assert store.read(shards("a")) is None


def test_a_slot_whose_writer_is_late_goes_to_the_next(store: ChunkStore, clock: Clock) -> None:
    first = store.reserve(shards("a"), LAYOUT)
    clock.advance(599)
    assert store.reserve(shards("a"), LAYOUT) == {}
    clock.advance(1)
    assert held(store) == (0, 0)
    # Too late: it may be written by somebody else.
    store.publish(shards("a"))
    assert found(store, "a") == 0
    assert store.reserve(shards("a"), LAYOUT) == first
    assert held(store) == (0, 1)


def test_where_there_is_no_room_nothing_is_staged(store: ChunkStore) -> None:
    put(store, "abcdefgh")
    assert store.reserve(shards("xyz"), LAYOUT) == {}
    assert store.used_bytes == 8 * PAGE
    # Those that are there need none.
    assert set(store.reserve(shards("abxy"), LAYOUT)) == set(shards("xy"))


@pytest.mark.parametrize("shape", [(2, 0, 4, 256), (2, -1, 4, -256)])
def test_chunks_without_a_size_are_refused(store: ChunkStore, shape: tuple[int, ...]) -> None:
    with pytest.raises(RefusedError):
        store.reserve(shards("a"), replace(LAYOUT, shape=shape))
    assert store.counts().staged == 0


def test_a_chunk_larger_than_the_pool_gets_no_slot(store: ChunkStore) -> None:
    assert store.reserve(shards("a"), ChunkLayout((2, 2**40, 2**40, 2**40), torch.float32)) == {}


def test_what_is_discarded_gives_its_room_back(store: ChunkStore) -> None:
    given = store.reserve(shards("ab"), LAYOUT)
    store.publish(shards("a"))
    store.discard(given)
    assert (store.counts().resident, store.counts().staged, store.used_bytes) == (1, 0, PAGE)


def test_a_range_that_a_thread_works_on_is_nobody_else_s_after_a_forced_clear(store: ChunkStore) -> None:
    given = store.reserve(shards("abcdefghij"), LAYOUT)
    taken = [given[shard("a")], given[shard("b")]]
    store.hold(taken)
    store.hold(taken[:1])
    store.clear(force=True)
    assert store.used_bytes == 2 * PAGE
    again = store.reserve(shards("klmnopqr"), LAYOUT)
    assert {slot.offset for slot in again.values()}.isdisjoint(slot.offset for slot in taken)
    store.let_go(taken)
    assert store.used_bytes == 9 * PAGE
    store.let_go(taken[:1])
    assert store.used_bytes == 8 * PAGE


def test_ranges_without_memory_behind_them_are_no_room(clock: Clock) -> None:
    backed: list[int] = []

    def back(offset: int, length: int) -> bool:
        assert length == PAGE
        backed.append(offset)
        return len(backed) != 3

    store = ChunkStore(OPTIONS, clock, back)
    assert store.reserve(shards("abcd"), LAYOUT) == {}
    assert store.used_bytes == 0
    assert len(store.reserve(shards("abcd"), LAYOUT)) == 4


def test_another_writers_slot_is_not_discarded(store: ChunkStore) -> None:
    given = store.reserve(shards("a"), LAYOUT)
    store.clear(force=True)
    store.reserve(shards("a"), LAYOUT)
    store.discard(given)
    assert store.counts().staged == 1


# Eviction.


def test_below_the_watermark_nothing_goes(store: ChunkStore) -> None:
    put(store, "abcdefg")
    assert store.evict() == 0
    put(store, "h")
    assert store.evict() == 1


@pytest.mark.parametrize(
    ("puts", "touched", "locked", "left"),
    [
        # Of one store the end goes first.
        (["abcd", "efgh"], "", "", "abcefgh"),
        (["a", "b", "cdefgh"], "", "", "bcdefgh"),
        (["a", "b", "cdefgh"], "a", "", "acdefgh"),
        (["a", "b", "cdefgh"], "", "a", "acdefgh"),
        (["abcd", "efgh"], "", "abcd", "abcdefg"),
        (["abcdefgh"], "", "abcdefgh", "abcdefgh"),
    ],
)
def test_what_was_of_no_use_for_longest_goes_unless_it_is_locked(
    store: ChunkStore, puts: list[str], touched: str, locked: str, left: str
) -> None:
    for names in puts:
        put(store, names)
    store.touch(shards(touched))
    order = list(locked)
    for name in order:
        store._resident[shard(name)].lock.acquire(1000.0)
    store.evict()
    assert "".join(name for name in "abcdefgh" if found(store, name)) == left


def test_a_part_of_all_chunks_goes_at_once(clock: Clock) -> None:
    store = ChunkStore(replace(OPTIONS, eviction_ratio=0.5), clock)
    put(store, "abcdefgh")
    assert store.evict() == 4
    assert found(store, "abcdefgh") == 4


def test_a_slot_whose_writer_is_late_is_evicted(store: ChunkStore, clock: Clock) -> None:
    store.reserve(shards("abcdefgh"), LAYOUT)
    assert store.evict() == 0
    clock.advance(600)
    assert store.evict() == 1
    assert store.counts().staged == 7


def test_a_clear_spares_what_is_locked_unless_forced(store: ChunkStore, clock: Clock) -> None:
    store.reserve(shards("a"), LAYOUT)
    clock.advance(600)
    put(store, "bc")
    store.reserve(shards("d"), LAYOUT)
    store.lock_prefix([[shard("b")]], 1)
    store.clear(force=False)
    assert (store.counts().resident, store.counts().staged) == (1, 1)
    assert held(store) == (1, 1)
    store.clear(force=True)
    assert store.counts() == (0, 0, 0, 0, 0)
    assert store.used_bytes == 0


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["reserve", "publish", "discard", "lock", "unlock", "read", "wait", "evict", "clear", "force"]
        ),
        st.lists(st.sampled_from("abcdefghijkl"), unique=True, max_size=5).map("".join),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(ACTIONS)
def test_locks_and_room_add_up(actions: list[tuple[str, str]]) -> None:
    """Against counts of our own, of which nothing ever ends by itself."""
    clock = Clock()
    store = ChunkStore(OPTIONS, clock)
    locks: Counter[str] = Counter()
    staged: set[str] = set()
    resident: set[str] = set()
    for action, names in actions:
        if action == "reserve":
            new = [name for name in names if name not in staged | resident]
            fits = len(new) + len(staged | resident) <= 10
            given = store.reserve(shards(names), LAYOUT)
            assert set(given) == set(shards("".join(new)) if fits else ())
            staged |= set(new) if fits else set()
        elif action == "publish":
            store.publish(shards(names))
            resident |= staged & set(names)
            staged -= set(names)
        elif action == "discard":
            mine = {one: store._staged[one].slot for one in shards(names) if one in store._staged}
            store.discard(mine)
            staged -= set(names)
        elif action == "lock":
            hits = next((i for i, name in enumerate(names) if name not in resident), len(names))
            assert store.lock_prefix(([one] for one in shards(names)), 2) == hits
            locks.update(dict.fromkeys(names[:hits], 2))
        elif action == "unlock":
            store.unlock(shards(names))
            locks.subtract({name: 1 for name in names if locks[name] > 0})
        elif action == "read":
            readable = [name for name in names if locks[name] > 0]
            slots = store.read(shards(names))
            assert (slots is None) == (len(readable) < len(names))
            if slots is None:
                locks.subtract(dict.fromkeys(readable, 1))
        elif action == "wait":
            clock.advance(1)
        elif action in ("evict", "clear", "force"):
            before = set(resident)
            if action == "evict":
                full = len(staged | resident) >= 8
                free = [name for name in resident if locks[name] <= 0]
                dropped = store.evict()
                assert dropped == (min(len(free), max(1, len(staged | resident) // 5)) if full else 0)
            else:
                store.clear(force=action == "force")
            resident = {name for name in resident if shard(name) in store._resident}
            if action == "force":
                staged.clear()
                assert not resident
                locks.clear()
            else:
                assert {name for name in before - resident if locks[name] > 0} == set()
        counts = store.counts()
        assert (counts.resident, counts.staged) == (len(resident), len(staged))
        assert counts.read_locked == sum(count > 0 for count in locks.values())
        assert counts.write_locked == len(staged)
        assert store.used_bytes == PAGE * len(staged | resident)
        assert set(store._order) == {*store._resident, *store._staged}
