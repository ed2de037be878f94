"""The chunks of L1: who holds them, where they lie and which of them goes first. No memory, no I/O."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...cache.messages import Slot
from .allocator import Allocator
from .locks import TimedLock
from .options import CacheOptions
from .refusal import RefusedError


class Shard(NamedTuple):
    """What one chunk of one worker is known by."""

    prefix: bytes
    model_name: str
    world_size: int
    worker: int
    cache_salt: str


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Shape and element type of a client's chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def length(self) -> int:
        """Bytes of a chunk."""
        return math.prod(self.shape) * self.dtype.itemsize

    def slot(self, offset: int) -> Slot:
        return Slot(offset, self.length, self.shape, str(self.dtype).removeprefix("torch."))


@dataclass(slots=True)
class _Stored:
    slot: Slot
    lock: TimedLock


class StoreCounts(NamedTuple):
    """The numbers of ``/status``."""

    resident: int
    staged: int
    staged_bytes: int
    read_locked: int
    write_locked: int


class ChunkStore:
    """Chunks in two states: staged, which only their writer knows of, and resident.

    Read locks are counts without owners, as on the real server: whoever releases one too many
    strips somebody else's.
    """

    def __init__(
        self,
        options: CacheOptions,
        clock: Callable[[], float],
        back: Callable[[int, int], bool] = lambda offset, length: True,
    ) -> None:
        """Make an empty one; ``back`` says whether there is memory behind a range of the pool."""
        self._options = options
        self._clock = clock
        self._back = back
        self._ranges = Allocator(options.size_bytes)
        # Ranges that a thread reads or writes just now: one that is dropped meanwhile is not given to others.
        self._held: Counter[int] = Counter()
        self._dropped_while_held: set[int] = set()
        self._resident: dict[Shard, _Stored] = {}
        self._staged: dict[Shard, _Stored] = {}
        # The first goes first.
        self._order: OrderedDict[Shard, None] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        return self._ranges.used

    # Reading.

    def lock_prefix(self, columns: Iterable[Sequence[Shard]], times: int) -> int:
        """Lock the leading columns of which every shard is resident and return their number."""
        now = self._clock()
        found: list[Shard] = []
        hits = 0
        for column in columns:
            if not all(shard in self._resident for shard in column):
                break
            for shard in column:
                self._resident[shard].lock.acquire(now, times)
            found += column
            hits += 1
        self.touch(found)
        return hits

    def read(self, shards: Sequence[Shard]) -> list[Slot] | None:
        """Return where ``shards`` lie; None, and one lock less on the others, where one is not locked."""
        now = self._clock()
        held = [shard for shard in shards if self._is_readable(shard, now)]
        if len(held) < len(shards):
            self.unlock(held)
            return None
        return [self._resident[shard].slot for shard in shards]

    def unlock(self, shards: Iterable[Shard], times: int = 1) -> None:
        """Take ``times`` read locks off each shard that has any."""
        now = self._clock()
        for shard in shards:
            if self._is_readable(shard, now):
                self._resident[shard].lock.release(times)

    def _is_readable(self, shard: Shard, now: float) -> bool:
        stored = self._resident.get(shard)
        return stored is not None and stored.lock.is_held(now)

    # Writing.

    def reserve(self, shards: Sequence[Shard], layout: ChunkLayout) -> dict[Shard, Slot]:
        """Stage those of ``shards`` that are neither there nor being written.

        Where the room is not enough for all new ones, none of these is staged. One whose writer let
        its lock run out is handed over as it is.

        Raises:
            RefusedError: chunks without a size.
        """
        now = self._clock()
        given: dict[Shard, Slot] = {}
        new: list[Shard] = []
        for shard in shards:
            if shard in self._resident:
                continue
            staged = self._staged.get(shard)
            if staged is None:
                new.append(shard)
            elif not staged.lock.is_held(now):
                staged.lock.acquire(now)
                given[shard] = staged.slot
        if not new:
            return given
        if min(layout.shape) < 1:
            raise RefusedError(f"chunks of shape {layout.shape} have no size")
        offsets = self._allocate(layout.length, len(new))
        for shard, offset in zip(new, offsets or (), strict=False):
            staged = _Stored(layout.slot(offset), TimedLock(self._options.write_ttl))
            staged.lock.acquire(now)
            self._staged[shard] = staged
            given[shard] = staged.slot
        self._created(list(given))
        return given

    def _allocate(self, length: int, count: int) -> list[int] | None:
        offsets = self._ranges.allocate_all(length, count)
        if offsets is None or all(self._back(offset, length) for offset in offsets):
            return offsets
        for offset in offsets:
            self._ranges.free(offset)
        return None

    def hold(self, slots: Iterable[Slot]) -> None:
        """A thread begins to work on the bytes of ``slots``, which nobody else may get until ``let_go``."""
        self._held.update(slot.offset for slot in slots)

    def let_go(self, slots: Iterable[Slot]) -> None:
        """Undo one ``hold``."""
        for slot in slots:
            self._held[slot.offset] -= 1
            if self._held[slot.offset] <= 0:
                del self._held[slot.offset]
                if slot.offset in self._dropped_while_held:
                    self._dropped_while_held.remove(slot.offset)
                    self._ranges.free(slot.offset)

    def publish(self, shards: Sequence[Shard]) -> None:
        """Make what is staged resident; nothing that is there is overwritten."""
        now = self._clock()
        published = []
        for shard in shards:
            staged = self._staged.get(shard)
            if staged is None or not staged.lock.is_held(now):
                continue
            del self._staged[shard]
            self._resident[shard] = _Stored(staged.slot, TimedLock(self._options.read_ttl))
            published.append(shard)
        self._created(published)

    def discard(self, reserved: Mapping[Shard, Slot]) -> None:
        """Give back those of the reserved slots that are still staged: they will not be written."""
        for shard, slot in reserved.items():
            staged = self._staged.get(shard)
            # After a forced clear it may be another writer's.
            if staged is not None and staged.slot is slot:
                self._drop(self._staged, shard)

    # Making room.

    def touch(self, shards: Sequence[Shard]) -> None:
        """Note that ``shards`` were of use; of one prompt the end goes before the beginning."""
        for shard in reversed(shards):
            if shard in self._order:
                self._order.move_to_end(shard)

    def evict(self) -> int:
        """Drop the chunks that were not of use for longest, where the pool is rather full.

        Returns their number. Locked chunks stay.
        """
        options = self._options
        if self.used_bytes < options.trigger_watermark * options.size_bytes:
            return 0
        now = self._clock()
        wanted = max(1, int(len(self._order) * options.eviction_ratio))
        dropped = 0
        for shard in list(self._order):
            if dropped >= wanted:
                break
            dropped += self._drop_unlocked(shard, now)
        return dropped

    def clear(self, *, force: bool) -> None:
        """Drop what is not locked, or everything."""
        now = self._clock()
        for shard in list(self._order):
            if force:
                for chunks in (self._resident, self._staged):
                    if shard in chunks:
                        self._drop(chunks, shard)
            else:
                self._drop_unlocked(shard, now)

    def counts(self) -> StoreCounts:
        """Count as ``/status`` does."""
        now = self._clock()
        return StoreCounts(
            resident=len(self._resident),
            staged=len(self._staged),
            staged_bytes=sum(staged.slot.length for staged in self._staged.values()),
            read_locked=sum(stored.lock.is_held(now) for stored in self._resident.values()),
            write_locked=sum(staged.lock.is_held(now) for staged in self._staged.values()),
        )

    def _created(self, shards: Sequence[Shard]) -> None:
        for shard in reversed(shards):
            self._order[shard] = None
            self._order.move_to_end(shard)

    def _drop_unlocked(self, shard: Shard, now: float) -> bool:
        chunks = self._resident if shard in self._resident else self._staged
        if chunks[shard].lock.is_held(now):
            return False
        self._drop(chunks, shard)
        return True

    def _drop(self, chunks: dict[Shard, _Stored], shard: Shard) -> None:
        offset = chunks.pop(shard).slot.offset
        self._order.pop(shard, None)
        if offset in self._held:
            self._dropped_while_held.add(offset)
        else:
            self._ranges.free(offset)
