"""The round trip: its prompt, and what a cache that does not keep its word is told by."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lmcache_stream import FinishEvent, TokenEvent
from lmcache_stream.cache.selfcheck import repeated_rows
from lmcache_stream.cache.stores import StoreResult
from lmcache_stream.doctor import Deadlines, Status, Targets
from lmcache_stream.doctor.chart import Chart, ServedModel
from lmcache_stream.doctor.round_trip import (
    decode,
    isolation,
    layout,
    made_up,
    offload,
    retrieve,
    same,
    store,
)

CHUNK, CHUNKS = 4, 3


@pytest.mark.parametrize(
    ("chunk_size", "max_model_len", "vocab_size", "chunks"),
    [
        (32, 4096, 49152, 16),
        (256, 4096, 49152, 3),
        (512, 8192, None, 3),
        (256, 514, 49152, 2),
        (256, 513, 49152, 1),
        (256, 258, 49152, 1),
        (256, 257, 49152, 0),
        (1024, 1000, 49152, 0),
        (16, None, 260, 32),
        (16, 4096, 8, 32),
        (48, 4096, None, 11),
    ],
)
def test_the_prompt_is_whole_chunks_and_one_token_and_fits(
    chunk_size: int, max_model_len: int | None, vocab_size: int | None, chunks: int
) -> None:
    prompt = made_up(chunk_size, max_model_len=max_model_len, vocab_size=vocab_size)
    assert len(prompt) == (chunks * chunk_size + 1 if chunks else 0)
    if max_model_len is not None:
        assert len(prompt) + 1 <= max_model_len
    assert all(0 < token < (vocab_size or 4096) for token in prompt)


def test_the_prompt_repeats_its_tokens_far_apart() -> None:
    prompt = made_up(32, max_model_len=4096, vocab_size=49152)[:-1]
    assert len(Counter(prompt)) == 61
    assert len(repeated_rows(prompt)) == 512
    apart = [len(prompt) - 1 - prompt[::-1].index(token) - prompt.index(token) for token in set(prompt)]
    # A frequency that is wrong by little shows only in tokens that are far apart.
    assert sum(distance > 256 for distance in apart) > 50


@dataclass
class Cache:
    """A cache client whose answers are told beforehand.

    Attributes:
        found: tokens that a lookup finds.
        back: what a retrieve gives.
        kept: what a store gives.
        salts: under which it was asked.
    """

    found: int = CHUNK * CHUNKS
    back: torch.Tensor | None = None
    kept: StoreResult | None = None
    layout_spread: float | None = 0.001
    geometry: Any = field(default_factory=lambda: SimpleNamespace(layout="two-plane"))
    salts: list[str] = field(default_factory=list)

    async def lookup(self, tokens: list[int], cache_salt: str) -> int:
        assert len(tokens) == CHUNK * CHUNKS
        self.salts.append(cache_salt)
        return self.found

    async def retrieve(self, tokens: list[int], cache_salt: str) -> torch.Tensor | None:
        self.salts.append(cache_salt)
        return self.back

    async def store(self, kv: torch.Tensor, tokens: list[int], cache_salt: str) -> StoreResult | None:
        self.salts.append(cache_salt)
        return self.kept

    async def aclose(self) -> None:
        pass


def charted(cache: Cache, kv: torch.Tensor | None = None) -> Chart:
    chart = Chart(Targets(), Deadlines(offload=0.1), AsyncExitStack())
    chart.prompt, chart.chunk_size = list(range(CHUNK * CHUNKS + 1)), CHUNK
    chart.cache = cast(Any, cache)
    chart.cache_name, chart.served_model = "model", ServedModel("tiny", "model", 100)
    chart.kv = kv
    return chart


def some_kv() -> torch.Tensor:
    return torch.arange(2 * 2 * CHUNK * CHUNKS * 8, dtype=torch.float32).view(2, 2, CHUNK * CHUNKS, 8)


async def test_bytes_are_compared_as_bits() -> None:
    kv = some_kv()
    finding = await same(charted(cache := Cache(back=kv.clone()), kv))
    assert (finding.status, cache.salts[0][-2:]) == (Status.OK, "-2")
    back = kv.clone()
    back[0, 0, 0, 0] = -0.0
    assert torch.equal(back, kv)
    finding = await same(charted(Cache(back=back), kv))
    assert (finding.status, finding.seen) == (
        Status.FAILED,
        "only 2 of 3 chunks are as they were stored",
    )


@pytest.mark.parametrize("back", [None, some_kv()[:, :, :CHUNK]])
async def test_what_was_stored_and_is_gone(back: torch.Tensor | None) -> None:
    found = 0 if back is None else CHUNK
    finding = await same(charted(Cache(back=back), some_kv()))
    assert (finding.status, finding.seen) == (Status.FAILED, f"of 12 stored tokens {found} are there")
    finding = await retrieve(charted(Cache(back=back)))
    assert finding.status is Status.FAILED
    assert f"of 12 tokens {found} were left" in finding.seen


async def test_a_cache_that_takes_some_chunks_only() -> None:
    kept = StoreResult(stored=1, existing=0, refused=2)
    finding = await store(charted(Cache(kept=kept), some_kv()))
    assert (finding.status, finding.seen) == (Status.FAILED, "LMCache took 1 of 3 chunks")
    assert "--l1-size-gb" in finding.advice


async def test_a_cache_that_ignores_salts() -> None:
    finding = await isolation(charted(cache := Cache(found=12)))
    assert finding.status is Status.FAILED
    assert "12 tokens are found under a salt that nothing was stored under" in finding.seen
    assert cache.salts[0][-2:] == "-3"
    assert (await isolation(charted(Cache(found=0)))).status is Status.OK


@pytest.mark.parametrize(
    ("found", "seen", "advice"),
    [
        (8, "KV of 8 of 12 tokens is in LMCache 0.1 s after", "--l1-size-gb"),
        (0, "nothing of the prompt is in LMCache 0.1 s after", "LMCacheMPConnector"),
    ],
)
async def test_kv_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch, found: int, seen: str, advice: str
) -> None:
    cache = Cache(found=found)

    async def connect(*_: object, **__: object) -> Cache:
        return cache

    monkeypatch.setattr("lmcache_stream.doctor.round_trip.connect", connect)
    finding = await offload(charted(cache))
    assert finding.status is Status.FAILED
    assert seen in finding.seen
    assert advice in finding.advice
    assert len(cache.salts) > 2


@pytest.mark.parametrize(
    ("cached", "status", "seen"),
    [
        (12, Status.OK, "vLLM took 12 of 12 stored tokens from LMCache and decoded token 7"),
        (8, Status.FAILED, "vLLM took 8 of 12 stored tokens from LMCache and computed the rest anew"),
        (None, Status.WARNING, "does not say from what"),
    ],
)
async def test_the_engine_is_asked_for_what_was_stored(cached: int | None, status: Status, seen: str) -> None:
    salts: list[str] = []

    async def engine(prompt: list[int], params: object, salt: str) -> AsyncIterator[TokenEvent | FinishEvent]:
        salts.append(salt)
        yield TokenEvent(7, "x", 0.0)
        yield FinishEvent(reason="length", cached_tokens=cached)

    chart = charted(Cache())
    chart.engine = cast(Any, engine)
    finding = await decode(chart)
    assert finding.status is status
    assert seen in finding.seen
    # Under the first salt the prompt's own KV would answer for the copy.
    assert [salt[-2:] for salt in salts] == ["-2"]


async def test_a_check_of_the_layout_that_could_not_be_made_is_a_warning() -> None:
    assert (await layout(charted(Cache(layout_spread=None)))).status is Status.WARNING
    assert "differ by 0.0010" in (await layout(charted(Cache()))).seen


def test_salts_are_fresh_and_taken_by_both_sides() -> None:
    from lmcache_stream._checks import checked_salt

    salts = [salt for _ in range(3) for salt in charted(Cache()).salts]
    assert len(set(salts)) == 9
    for salt in salts:
        assert checked_salt(salt) == salt
