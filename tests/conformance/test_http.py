"""What the HTTP port tells and does."""

from __future__ import annotations

import asyncio
import secrets
import urllib.error
import urllib.request
from typing import Any

import pytest

from lmcache_stream.cache import messages

from ..real.stack import get_json
from .driver import CHUNK_SIZE, CLEAR, SIZE_BYTES, Driver, Place, fresh_tokens, servers

PAGE = 4096


@servers()
async def test_health_and_configuration(place: Place) -> None:
    def get(path: str) -> Any:
        return get_json(f"{place.http_url}{path}")

    assert await asyncio.to_thread(get, "/healthcheck") == {"status": "healthy"}
    assert (await asyncio.to_thread(get, "/"))["status"] == "ok"
    section = (await asyncio.to_thread(get, "/config"))["mp"]
    assert section["chunk_size"] == CHUNK_SIZE
    assert section["supported_transfer_mode"] == "auto"
    assert bool(section["shm_name"]) == place.shared_memory


@servers()
async def test_the_status_of_clients(driver: Driver, place: Place) -> None:
    await driver.register(other := secrets.randbits(62), use_mla=True, world_size=2, block_size=2)
    status = await place.status()
    assert status["is_healthy"] is True
    assert status["chunk_size"] == CHUNK_SIZE
    assert status["cache_context_meta"] == {}
    assert {driver.instance, other} <= set(status["registered_non_cuda_instance_ids"])
    assert status["non_cuda_context_meta"][str(other)] == {
        "model_name": driver.model,
        "world_size": 2,
        "block_size": 2,
        "use_mla": True,
    }
    assert status["worker_liveness"] == {
        "enabled": True,
        "reap_timeout_seconds": 120.0,
        "registration_grace_seconds": 3600.0,
        "tracked_instances": len(status["registered_non_cuda_instance_ids"]),
    }
    await driver.call(messages.UNREGISTER, other)
    after = await place.status()
    assert other not in after["registered_non_cuda_instance_ids"]
    assert str(other) not in after["non_cuda_context_meta"]


@servers("shared-memory")
async def test_the_counts_of_l1(driver: Driver, place: Place) -> None:
    stored, reserved = fresh_tokens(3), fresh_tokens(2)
    await driver.store(stored, 1, 2, 3)
    await driver.lookup(stored[:8])
    await driver.prepare_store(driver.key(reserved))
    l1 = await place.l1()
    expected = {
        "is_healthy": True,
        "total_object_count": 5,
        "write_locked_count": 2,
        "read_locked_count": 2,
        "temporary_count": 0,
        "staging_object_count": 2,
        "staging_bytes": 2 * driver.chunks.length,
        "memory_used_bytes": 5 * PAGE,
        "memory_total_bytes": SIZE_BYTES,
        "memory_configured_bytes": SIZE_BYTES,
        "capacity_bytes_by_backend": {"dram": SIZE_BYTES},
        "memory_usage_ratio": 5 * PAGE / SIZE_BYTES,
        "write_ttl_seconds": 600,
        "read_ttl_seconds": 300,
    }
    assert l1 == expected
    manager = (await place.status())["storage_manager"]
    assert manager["l1_managers"] == {"_default": expected}
    assert manager["l1_usage"] == [5 * PAGE, SIZE_BYTES]
    assert manager["l1_eviction_controller"]["trigger_watermark"] == 0.8
    assert manager["l1_eviction_controller"]["eviction_ratio"] == 0.2


@servers()
async def test_the_counts_of_requests(driver: Driver, place: Place) -> None:
    before = await place.status()
    tokens = fresh_tokens(1)
    key = driver.key(tokens, worker_id=None)
    await driver.call(messages.LOOKUP, key, 1)
    during = await place.status()
    assert during["active_sessions"] == before["active_sessions"] + 1
    assert during["active_prefetch_jobs"] == before["active_prefetch_jobs"] + 1
    await driver.call(messages.QUERY_PREFETCH_STATUS, key.request_id)
    await driver.call(messages.END_SESSION, key.request_id)
    after = await place.status()
    assert after["active_sessions"] == before["active_sessions"]
    assert after["active_prefetch_jobs"] == before["active_prefetch_jobs"]


@servers("shared-memory")
@pytest.mark.parametrize("force", [False, True])
async def test_a_clear_spares_what_is_locked_unless_forced(driver: Driver, place: Place, force: bool) -> None:
    free, read, written = fresh_tokens(2), fresh_tokens(1), fresh_tokens(1)
    await driver.store(free, 1, 2)
    await driver.store(read, 3)
    found, _ = await driver.lookup(read)
    key = driver.key(written)
    await driver.prepare_store(key)
    assert await place.clear(force=force) == {"status": "ok", "cleared": {"tier": "l1"}}
    l1 = await place.l1()
    if force:
        assert (l1["total_object_count"], l1["memory_used_bytes"]) == (0, 0)
        # What was reserved is gone, though the commit does not say so; nor does freeing the locks.
        assert await driver.commit_store(key) is True
        await driver.free(found)
        assert [await driver.found(tokens) for tokens in (free, read, written)] == [0, 0, 0]
    else:
        assert (l1["total_object_count"], l1["memory_used_bytes"]) == (2, 2 * PAGE)
        assert await driver.commit_store(key) is True
        await driver.free(found)
        assert [await driver.found(tokens) for tokens in (free, read, written)] == [0, 1, 1]
    assert await place.locked() == (0, 0)


@servers("shared-memory")
async def test_the_cache_can_be_cleared_by_operation(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(2)
    await driver.store(tokens, 1, 2)
    await driver.lookup(tokens[:4])
    await driver.call(CLEAR, False)
    assert (await place.l1())["total_object_count"] == 1
    await driver.call(CLEAR, True)
    assert (await place.l1())["total_object_count"] == 0


@servers("shared-memory")
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 200),
        (b"null", 200),
        (b"{}", 200),
        (b'{"tier": "l2"}', 400),
        (b'{"tier": "all"}', 400),
        (b'{"tier": "l9"}', 422),
        (b'{"tier": "l1", "force": "maybe"}', 422),
        (b"[1]", 422),
        (b"{", 422),
    ],
)
async def test_a_clear_by_body(place: Place, body: bytes, status: int) -> None:
    def post() -> int:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{place.http_url}/cache/clear", data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    assert await asyncio.to_thread(post) == status
