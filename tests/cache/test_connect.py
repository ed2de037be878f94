"""Connecting: what is refused and why, what is registered, and that nothing is left by a cancel anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from aiohttp import web

import lmcache_stream as lms
from lmcache_stream.cache import knowledge

from ..cancelling import cancelled_at
from ..fakes.lmcache import FakeLMCache
from .conftest import GEOMETRY, random_kv

TOKENS = list(range(100, 112))
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 32,
    "torch_dtype": "float32",
    "rope_theta": 10000.0,
}


def connecting(server: FakeLMCache, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "url": server.url,
        "http_url": server.http_url,
        "model_name": "model",
        "geometry": GEOMETRY,
        "timeouts": lms.Timeouts(),
    }
    return lms.connect(**{**arguments, **changes})


async def failure_of(kind: type[lms.LMCacheStreamError], server: FakeLMCache, **changes: Any) -> str:
    """What connecting fails with; then nothing is registered."""
    with pytest.raises(kind) as caught:
        await connecting(server, **changes)
    assert server.registered == {}
    assert type(caught.value) is kind
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


async def test_it_is_awaited_or_entered(server: FakeLMCache) -> None:
    context = await connecting(server)
    assert (context.chunk_size, context.model_name) == (4, "model")
    assert context.geometry == GEOMETRY
    await context.aclose()
    async with connecting(server) as context:
        assert await context.lookup(TOKENS) == 0
    assert server.registered == {}
    with pytest.raises(lms.ClosedError):
        await context.lookup(TOKENS)


async def test_a_body_that_fails_closes_all_the_same(server: FakeLMCache) -> None:
    with pytest.raises(ZeroDivisionError):
        async with connecting(server):
            assert len(server.registered) == 1
            raise ZeroDivisionError
    assert server.registered == {}


async def test_with_an_engine_a_name_of_our_own_is_registered(server: FakeLMCache) -> None:
    """The engine's own name would replace the layout that its lookups use."""
    async with connecting(server), connecting(server):
        names = [entry.model_name for entry in server.registered.values()]
    assert len(set(names)) == 2
    for name in names:
        assert name.startswith("model##lmcs-")


async def test_with_a_geometry_and_no_engine_the_real_name_is_registered(server: FakeLMCache) -> None:
    server.engine_model = None
    async with connecting(server) as context:
        (entry,) = server.registered.values()
        assert entry.model_name == "model"
        assert (entry.shape, entry.dtype, entry.block_size) == ((2, 2, 4, 16), torch.float32, 4)
        assert await context.store(random_kv(12), TOKENS)
        assert {key[0] for key in server.chunks} == {"model"}


async def test_an_own_name_stores_under_the_engines(server: FakeLMCache) -> None:
    async with connecting(server) as context:
        assert await context.store(random_kv(12), TOKENS)
        assert {key[0] for key in server.chunks} == {"model"}
        assert "ping" not in server.calls


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"url": "127.0.0.1:5555"}, "tcp://HOST:PORT"),
        ({"url": "localhost"}, "tcp://HOST:PORT"),
        ({"url": "http://localhost:5555"}, "tcp://HOST:PORT"),
        ({"url": "ipc:///tmp/socket"}, "tcp://HOST:PORT"),
        ({"url": "tcp://localhost"}, "tcp://HOST:PORT"),
        ({"http_url": "127.0.0.1:8080"}, "http://HOST:PORT or https://HOST:PORT"),
        ({"http_url": "tcp://localhost:8080"}, "http://HOST:PORT"),
        ({"http_url": ""}, "http://HOST:PORT"),
        ({"model_name": ""}, "model_name"),
        ({"model_name": None}, "model_name"),
    ],
)
def test_a_bad_argument_is_refused_before_there_is_anything_to_await(
    changes: dict[str, Any], reason: str
) -> None:
    arguments = {"url": "tcp://localhost:1", "http_url": "http://localhost:1", "model_name": "model"}
    with pytest.raises(lms.InvalidRequestError, match=reason):
        lms.connect(**{**arguments, **changes})


async def test_an_unknown_model_is_refused_and_the_known_one_named(server: FakeLMCache) -> None:
    async with connecting(server):
        with pytest.raises(lms.GeometryError, match=r"Registered: 'model'\. ") as caught:
            await connecting(server, model_name="served-name", geometry=None)
    assert "##" not in str(caught.value)


async def test_a_geometry_that_contradicts_the_engine_is_refused(server: FakeLMCache) -> None:
    server.engine_block_size = 8
    reason = await failure_of(lms.GeometryError, server)
    assert "block_size 4" in reason
    assert "block_size 8" in reason


async def test_chunks_that_are_no_multiple_of_a_block_are_refused(server: FakeLMCache) -> None:
    server.chunk_size = 6
    assert "a chunk of 6 tokens" in await failure_of(lms.LayoutError, server)


@pytest.mark.parametrize("mode", ["cuda_ipc", "lmcache_driven"])
async def test_a_server_in_another_transfer_mode_says_how_to_start_it(server: FakeLMCache, mode: str) -> None:
    server.mode = mode
    reason = await failure_of(lms.CacheConnectError, server, timeouts=lms.Timeouts(connect=0.3))
    assert "lmcache server --supported-transfer-mode auto" in reason
    assert repr(mode) in reason
    assert server.url in reason


async def test_urls_of_two_servers_are_told_apart(server: FakeLMCache) -> None:
    async with FakeLMCache() as other:
        reason = await failure_of(lms.CacheConnectError, server, http_url=other.http_url)
        assert other.registered == {}
        assert "different LMCache servers" in reason
        assert server.url in reason
        assert other.http_url in reason


async def test_an_error_says_what_was_connected_to(server: FakeLMCache) -> None:
    reason = await failure_of(lms.GeometryError, server, model_name="served-name", geometry=None)
    assert f"while connecting to {server.url} and {server.http_url}" in reason


@pytest.fixture
async def html() -> AsyncIterator[str]:
    """The URL of a server that answers every path with a web page."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="<!DOCTYPE html><title>Hello</title>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_web_page_in_place_of_the_status_is_told_apart(server: FakeLMCache, html: str) -> None:
    reason = await failure_of(lms.CacheError, server, http_url=html)
    assert f"{html}/status" in reason
    assert "<!DOCTYPE html>" in reason
    assert "--http-port" in reason


async def test_ports_in_each_others_place_are_told_apart(server: FakeLMCache) -> None:
    swapped = {
        "url": server.http_url.replace("http:", "tcp:"),
        "http_url": server.url.replace("tcp:", "http:"),
    }
    reason = await failure_of(lms.CacheConnectError, server, **swapped)
    assert "a ZeroMQ socket answers there" in reason
    assert "--http-port option (not of --port)" in reason
    impatient = lms.Timeouts(connect=0.5)
    reason = await failure_of(lms.CacheConnectError, server, url=swapped["url"], timeouts=impatient)
    assert "an HTTP server answers there, but it does not speak ZeroMQ" in reason
    assert "--port option" in reason


@pytest.mark.parametrize("which", ["url", "http_url"])
async def test_where_nothing_listens_the_connect_timeout_ends_it(server: FakeLMCache, which: str) -> None:
    scheme = "tcp" if which == "url" else "http"
    nowhere = {which: f"{scheme}://127.0.0.1:9"}
    began = time.monotonic()
    reason = await failure_of(lms.CacheConnectError, server, timeouts=lms.Timeouts(connect=0.5), **nowhere)
    assert time.monotonic() - began < 10
    assert "127.0.0.1:9" in reason
    assert "Is `lmcache server` running" in reason


async def test_a_pool_that_is_not_on_this_machine_says_what_to_do(server: FakeLMCache) -> None:
    if not server.shared_memory:
        pytest.skip("there is no pool")
    name, server.shm_name = server.shm_name, "lmcs-fake-nowhere"
    reason = await failure_of(lms.CacheConnectError, server)
    server.shm_name = name
    assert "run on the server's machine" in reason


async def test_a_config_file_is_read_and_a_missing_one_is_told(server: FakeLMCache) -> None:
    with pytest.raises(lms.GeometryError, match="no config found"):
        await connecting(server, geometry=None, model_config="/nowhere")
    with pytest.raises(lms.GeometryError, match="model_config="):
        await connecting(server, geometry=None)
    assert server.registered == {}


# Cancels.


Possessions = tuple[list[str], list[str]]


def possessions() -> Possessions:
    """Sockets (ZeroMQ's event descriptors too), and threads of ZeroMQ and of this library."""
    open_here = read(Path("/proc/self/fd"), lambda path: str(path.readlink()))
    running = read(Path("/proc/self/task"), lambda path: (path / "comm").read_text().strip())
    workers = [thread.name for thread in threading.enumerate() if "lmcache" in thread.name]
    return (
        sorted(link for link in open_here if link.startswith("socket:") or "eventfd" in link),
        sorted([*(name for name in running if "ZMQ" in name), *workers]),
    )


def read(folder: Path, of: Callable[[Path], str]) -> list[str]:
    found = []
    for path in folder.iterdir():
        # What was there a moment ago may be gone.
        with contextlib.suppress(OSError):
            found.append(of(path))
    return found


async def nothing_more_than(before: Possessions) -> None:
    with anyio.move_on_after(10):
        while any(len(now) > len(then) for now, then in zip(possessions(), before, strict=True)):
            await asyncio.sleep(0.005)
        return
    raise AssertionError(f"{possessions()} where there were {before}")


Attempt = Callable[[], Coroutine[Any, Any, None]]


def ways_through(server: FakeLMCache) -> dict[str, Attempt]:
    async def awaited() -> None:
        context = await connecting(server)
        await context.aclose()

    async def entered() -> None:
        async with connecting(server):
            pass

    async def refused() -> None:
        server.mode = "cuda_ipc"
        with pytest.raises(lms.CacheError):
            await connecting(server, timeouts=lms.Timeouts(connect=0.1))

    async def used() -> None:
        async with connecting(server) as context:
            await context.store(random_kv(12), TOKENS)
            await context.retrieve(TOKENS)

    return {"awaited": awaited, "entered": entered, "refused": refused, "used": used}


async def settled(attempt: Attempt) -> Possessions:
    """What there is after a first attempt, when the server's own threads and sockets are up."""
    await attempt()
    await asyncio.sleep(0.05)
    return possessions()


WAYS = ["awaited", "entered", "refused", "used"]


@pytest.mark.parametrize("way", WAYS)
async def test_a_cancel_at_any_suspension_leaves_nothing(server: FakeLMCache, way: str) -> None:
    attempt = ways_through(server)[way]
    before = await settled(attempt)
    for number in range(1, 1000):
        server.clear(force=True)
        if not await cancelled_at(attempt(), number):
            break
        assert server.registered == {}, f"at suspension {number}"
        await nothing_more_than(before)
    assert number > 5


@pytest.mark.parametrize("way", WAYS)
async def test_a_cancel_at_any_turn_leaves_nothing(server: FakeLMCache, way: str) -> None:
    attempt = ways_through(server)[way]
    before = await settled(attempt)
    turns = 0
    while True:
        server.clear(force=True)
        task = asyncio.ensure_future(attempt())
        for _ in range(turns):
            await asyncio.sleep(0)
            if task.done():
                break
        if task.done():
            await task
            break
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert server.registered == {}, f"at turn {turns}"
        await nothing_more_than(before)
        turns += 1 + turns // 12
    assert turns > 20


async def test_cancels_without_end_do_not_interrupt_the_closing(server: FakeLMCache) -> None:
    before = await settled(ways_through(server)["awaited"])
    server.delays = {"unregister_kv_cache_engine_driven_context": 0.1}

    async def work() -> None:
        async with connecting(server):
            await asyncio.sleep(60)

    task = asyncio.ensure_future(work())
    with anyio.fail_after(10):
        while not server.registered:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    while not task.done():
        task.cancel()
        await asyncio.sleep(0.01)
    assert task.cancelled()
    assert server.registered == {}
    await nothing_more_than(before)


async def test_closing_a_server_that_is_gone_does_not_wait(server: FakeLMCache) -> None:
    context = await connecting(server, timeouts=lms.Timeouts(connect=60))
    await server.stop()
    with anyio.fail_after(10):
        await context.aclose()
    await server.start()


async def test_closing_ends_what_waits_with_a_closed_error(
    server: FakeLMCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_stream.cache.lifecycle._CLOSE_GRACE", 0.1)
    context = await connecting(server)
    kv = random_kv(12)
    await context.store(kv, TOKENS)
    server.silent = {"prepare_retrieve", "prepare_store"}
    waiting: list[asyncio.Task[Any]] = []
    # The second of two equal ones waits for the first.
    for _ in range(2):
        waiting.append(asyncio.create_task(context.retrieve(TOKENS)))
        waiting.append(asyncio.create_task(context.store(kv[:, :, :8], [1, *TOKENS[:7]], own_salt=True)))
    await asyncio.sleep(0.1)
    server.prefetch_done.clear()
    waiting.append(asyncio.create_task(context.lookup([7] * 12)))
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in waiting)
    await context.aclose()
    done, late = await asyncio.wait(waiting, timeout=8)
    assert not late
    assert {type(task.exception()) for task in done} == {lms.ClosedError}


@pytest.mark.parametrize("turns", range(12))
async def test_a_cancel_while_closing_is_still_a_cancel(
    server: FakeLMCache, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    monkeypatch.setattr("lmcache_stream.cache.lifecycle._CLOSE_GRACE", 0)
    context = await connecting(server)
    await context.store(random_kv(12), TOKENS)
    server.silent = {"prepare_retrieve"}
    waiting = [asyncio.create_task(context.retrieve(TOKENS)) for _ in range(2)]
    await asyncio.sleep(0.05)
    server.silent.add("query_prefetch_status")
    waiting.append(asyncio.create_task(context.retrieve(TOKENS)))
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(context.aclose())
    for _ in range(turns):
        await asyncio.sleep(0)
    cancelled = [task.cancel() for task in waiting]
    await asyncio.wait([closing, *waiting])
    for task, was_cancelled in zip(waiting, cancelled, strict=True):
        assert task.cancelled() is was_cancelled


async def test_a_lease_may_be_given_back_after_the_closing(server: FakeLMCache) -> None:
    context = await connecting(server)
    await context.store(random_kv(12), TOKENS)
    lease = await context.pin(TOKENS)
    assert lease.chunks == 3
    await context.aclose()
    await context.unpin(lease)
    await context.unpin(lease)


async def test_a_store_that_no_message_can_carry_is_an_error_and_leaves_nothing(
    server: FakeLMCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    if server.shared_memory:
        pytest.skip("it carries everything")
    # Never touched, and so no memory.
    large = memoryview(mmap.mmap(-1, 2**32))
    monkeypatch.setattr("lmcache_stream.cache.transfers.dump_chunks", lambda _: large)
    async with connecting(server) as context:
        with pytest.raises(lms.CacheError, match="pickle plane"):
            await context.store(random_kv(12), TOKENS)
    assert server.registered == {}


# Restarts.


async def until_registered_again(context: lms.AsyncLMCacheContext, server: FakeLMCache) -> None:
    with anyio.fail_after(20):
        while not server.registered:
            try:
                await context.lookup(TOKENS)
            except lms.CacheError:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
async def test_after_a_restart_the_new_servers_pool_is_used(server: FakeLMCache, killed: bool) -> None:
    kv = random_kv(12)
    async with connecting(server) as context:
        await context.store(random_kv(12, seed=1), TOKENS)
        await server.stop(killed=killed)
        await server.start()
        server.put(TOKENS, kv)
        await until_registered_again(context, server)
        found = await context.retrieve(TOKENS)
        assert found is not None
        assert torch.equal(found, kv)
        assert await context.store(kv, [1, *TOKENS[1:]])
        there = [chunk for key, chunk in sorted(server.chunks.items()) if key[2][0] == 1]
        assert torch.equal(torch.cat(there, dim=2), kv)


async def test_a_new_pool_that_cannot_be_mapped_does_not_leave_the_old_one_in_use(
    server: FakeLMCache,
) -> None:
    if not server.shared_memory:
        pytest.skip("there is no pool")
    async with connecting(server) as context:
        await context.store(random_kv(12, seed=1), TOKENS)
        await server.stop(killed=True)
        await server.start()
        server.put(TOKENS, random_kv(12))
        name, server.shm_name = server.shm_name, "lmcs-fake-nowhere"
        for _ in range(2):
            with pytest.raises(lms.CacheConnectError, match="lmcs-fake-nowhere"):
                await context.retrieve(TOKENS)
        server.shm_name = name
        found = await context.retrieve(TOKENS)
        assert found is not None
        assert torch.equal(found, random_kv(12))


async def test_a_store_that_a_restart_broke_leaves_no_registration(server: FakeLMCache) -> None:
    async with connecting(server) as context:
        server.silent = {"prepare_store"}
        store = asyncio.create_task(context.store(random_kv(12), TOKENS))
        with anyio.fail_after(10):
            while "prepare_store" not in server.calls:
                await asyncio.sleep(0.005)
        await server.stop()
        with pytest.raises(lms.CacheConnectError):
            await store
        server.silent = set()
        await server.start()
        await until_registered_again(context, server)
        assert await context.store(random_kv(12), TOKENS)
    assert server.registered == {}


async def test_a_transfer_does_not_touch_another_servers_pool(
    server: FakeLMCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the reply with the slots and the copy, the server is replaced."""
    if not server.shared_memory:
        pytest.skip("there is no pool")
    kv = random_kv(12)
    async with connecting(server) as context:
        go_on = asyncio.Event()
        begun = asyncio.Event()
        run = context._workers.run_each

        async def held(function: Callable[..., Any], arguments: Any) -> Any:
            begun.set()
            await go_on.wait()
            return await run(function, arguments)

        monkeypatch.setattr(context._workers, "run_each", held)
        store = asyncio.create_task(context.store(kv, TOKENS))
        await begun.wait()
        await server.stop(killed=True)
        await server.start()
        server.put([2] * 12, random_kv(12, seed=2))
        await until_registered_again(context, server)
        go_on.set()
        with pytest.raises(lms.CacheConnectError):
            await store
        monkeypatch.setattr(context._workers, "run_each", run)
        found = await context.retrieve([2] * 12)
        assert found is not None
        assert torch.equal(found, random_kv(12, seed=2))
    assert server.registered == {}


# The dtype of an engine that does not register it.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
async def test_the_first_retrieve_corrects_an_assumed_dtype(server: FakeLMCache, dtype: torch.dtype) -> None:
    kv = random_kv(12).to(dtype)
    server.put(TOKENS, kv)
    async with connecting(server, geometry=None, model_config=CONFIG) as context:
        assert context.geometry.dtype is torch.float32
        (assumed,) = server.registered
        found = await context.retrieve(TOKENS)
        assert found is not None
        assert found.dtype is dtype
        assert torch.equal(found, kv)
        assert context.geometry.dtype is dtype
        # A registration keeps its shape, so a new one took its place; the old one stays until closing,
        # for what may still run on it.
        before, corrected = server.registered
        assert before == assumed
        assert server.registered[corrected].dtype is dtype
        assert server.locked == (0, 0)
        assert await context.store(kv, [1, *TOKENS[1:]])
    assert server.registered == {}


@pytest.mark.parametrize("change", ["more", "less"])
async def test_what_was_found_is_what_is_held_after_the_correction(
    server: FakeLMCache, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """An edit has made up its mind about what follows the prefix by then."""
    kv = random_kv(12).bfloat16()
    server.put(TOKENS[:8], kv[:, :, :8])
    correct = knowledge.Knowledge.correct

    async def meanwhile(self: knowledge.Knowledge, mismatch: Any) -> None:
        await correct(self, mismatch)
        if change == "more":
            server.put_chunk(TOKENS, kv[:, :, 8:])
        else:
            del server.chunks["model", "", tuple(TOKENS[:8])]

    monkeypatch.setattr(knowledge.Knowledge, "correct", meanwhile)
    async with connecting(server, geometry=None, model_config=CONFIG) as context:
        lease = await context.pin(TOKENS)
        async with context.hold(lease) as held:
            assert (held and held.tokens) == (TOKENS[:8] if change == "more" else None)
        assert server.locked == (0, 0)


async def test_many_first_retrieves_correct_it_once(server: FakeLMCache) -> None:
    kv = random_kv(12).bfloat16()
    server.put(TOKENS, kv)
    async with connecting(server, geometry=None, model_config=CONFIG) as context:
        server.calls.clear()
        found = await asyncio.gather(*(context.retrieve(TOKENS[: 4 + 4 * (i % 3)]) for i in range(9)))
        for index, one in enumerate(found):
            assert one is not None
            assert torch.equal(one, kv[:, :, : 4 + 4 * (index % 3)])
        assert server.calls.count("register_kv_cache_engine_driven_context") == 1
        assert len(server.registered) == 2
        assert server.locked == (0, 0)


async def test_a_retrieve_that_runs_while_another_corrects_comes_through(server: FakeLMCache) -> None:
    kv = random_kv(12).bfloat16()
    server.put(TOKENS, kv)
    other = [1, *TOKENS[1:]]
    server.put(other, kv)
    async with connecting(server, geometry=None, model_config=CONFIG) as context:
        server.delays = {"commit_retrieve": 0.1}
        first = asyncio.create_task(context.retrieve(TOKENS))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(context.retrieve(other))
        for one in (await first, await second):
            assert one is not None
            assert torch.equal(one, kv)
        assert server.locked == (0, 0)
    assert server.registered == {}


async def test_nothing_is_sent_on_a_registration_that_is_under_way(server: FakeLMCache) -> None:
    """The server works on requests side by side, and answers unknown clients with silence."""
    kv = random_kv(12).bfloat16()
    server.put(TOKENS, kv)
    other = [1, *TOKENS[1:]]
    server.put(other, kv)
    registering = "register_kv_cache_engine_driven_context"
    async with connecting(server, geometry=None, model_config=CONFIG) as context:
        server.calls.clear()
        server.delays = {registering: 0.2}
        first = asyncio.create_task(context.retrieve(TOKENS))
        with anyio.fail_after(10):
            while registering not in server.calls:
                await asyncio.sleep(0.005)
        with anyio.fail_after(10):
            for one in (await context.retrieve(other), await first):
                assert one is not None
                assert torch.equal(one, kv)


async def test_a_cancel_anywhere_in_the_correction_leaves_nothing_behind(server: FakeLMCache) -> None:
    kv = random_kv(12).bfloat16()
    server.put(TOKENS, kv)
    turns = 0
    while True:
        async with connecting(server, geometry=None, model_config=CONFIG) as context:
            task = asyncio.create_task(context.retrieve(TOKENS))
            for _ in range(turns):
                await asyncio.sleep(0)
            came_through = task.done()
            task.cancel()
            await asyncio.wait({task})
            found = await context.retrieve(TOKENS)
            assert found is not None
            assert torch.equal(found, kv)
            last = [entry.dtype for entry in server.registered.values()][-1]
            assert last is torch.bfloat16, f"turn {turns}"
        assert server.registered == {}
        assert server.locked == (0, 0)
        if came_through:
            break
        turns += 1
    assert turns > 20


async def test_before_any_retrieve_an_assumed_dtype_stores_nothing(server: FakeLMCache) -> None:
    kv = random_kv(12)
    async with connecting(server, geometry=None, model_config=CONFIG) as context:
        server.calls.clear()
        assert await context.retrieve(TOKENS) is None
        with pytest.raises(lms.GeometryError, match=r"retrieve first, or pass geometry="):
            await context.store(kv, TOKENS)
        assert "prepare_store" not in server.calls
        server.put(TOKENS, kv)
        assert await context.retrieve(TOKENS) is not None
        assert await context.store(kv, [1, *TOKENS[1:]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_a_retrieve_that_refuted_the_layout_opens_no_way_for_stores(dtype: torch.dtype) -> None:
    async with FakeLMCache(shared_memory=False, engine_use_mla=True) as server:
        tokens = [1, 2, 3, 4] * 8
        for end in range(4, 33, 4):
            # Of random numbers no layout can be right.
            server.chunks["model", "", tuple(tokens[:end])] = torch.randn((2, 4, 32)).to(dtype)
        async with connecting(server, geometry=None, model_config=CONFIG) as context:
            assert context.geometry.layout == "cpu-vec"
            with pytest.raises(lms.LayoutError):
                await context.retrieve(tokens)
            with pytest.raises(lms.GeometryError, match="retrieve first"):
                await context.store(random_kv(12).to(dtype), TOKENS)


async def test_a_given_geometry_is_not_corrected(server: FakeLMCache) -> None:
    server.put(TOKENS, random_kv(12).bfloat16())
    async with connecting(server) as context:
        with pytest.raises(lms.GeometryError, match=r"chunks are torch.bfloat16\[2, 2, 4, 16\]"):
            await context.retrieve(TOKENS)
        assert context.geometry == GEOMETRY
        assert server.locked == (0, 0)


async def test_chunks_of_another_shape_are_never_corrected(server: FakeLMCache) -> None:
    server.put(TOKENS, random_kv(12)[..., :12].bfloat16())
    async with connecting(server, geometry=None, model_config=CONFIG) as context:
        with pytest.raises(lms.GeometryError, match=r"chunks are torch.bfloat16\[2, 2, 4, 12\]"):
            await context.retrieve(TOKENS)
        assert context.geometry.dtype is torch.float32
        assert len(server.registered) == 1
        assert server.locked == (0, 0)
