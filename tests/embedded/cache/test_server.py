"""The running server: its ports, its end, and everything that must not stop it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import socket as sockets
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import torch
import zmq
import zmq.asyncio

from lmcache_stream.cache import messages
from lmcache_stream.cache.geometry import KVGeometry
from lmcache_stream.cache.requests import RequestClient
from lmcache_stream.embedded.cache import CacheOptions, EmbeddedCacheServer
from lmcache_stream.embedded.serve_cache import serve_cache
from lmcache_stream.errors import (
    CacheConnectError,
    CacheError,
    ClosedError,
    GeometryError,
    InvalidRequestError,
)

from .clock import Clock
from .test_clients import registration
from .test_tensors import Evil

encode = msgspec.msgpack.encode
OPTIONS = CacheOptions(chunk_size=4, size_bytes=1 << 20)
SHM = Path("/dev/shm")


async def get(url: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return await answer.json()


def listens(url: str) -> bool:
    with sockets.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0


async def chunk_size(server: EmbeddedCacheServer) -> int:
    requests = RequestClient(server.url, connect_timeout=5)
    await requests.start()
    try:
        return await requests.call(messages.GET_CHUNK_SIZE, deadline=5)
    finally:
        await requests.aclose()


@contextlib.asynccontextmanager
async def dealer(server: EmbeddedCacheServer) -> AsyncIterator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(server.url)
    try:
        yield socket
    finally:
        socket.close(linger=0)
        context.term()


async def test_ports_and_pool_are_known_when_it_runs_and_gone_when_it_ends() -> None:
    async with EmbeddedCacheServer(options=OPTIONS) as server:
        assert await chunk_size(server) == 4
        assert (await get(f"{server.http_url}/config"))["mp"]["shm_name"] == server.shm_name
        path = SHM / server.shm_name
        assert path.stat().st_size == 1 << 20
        assert all(map(listens, (server.url, server.http_url)))
    assert not path.exists()
    assert not any(map(listens, (server.url, server.http_url)))
    await server.aclose()
    await server.aclose()


async def test_the_defaults_are_those_of_lmcache() -> None:
    # Not in shared memory, of which containers often have less than that.
    async with EmbeddedCacheServer(shared_memory=False) as server:
        status = await get(f"{server.http_url}/status")
    l1 = status["storage_manager"]["l1_manager"]
    assert (status["chunk_size"], l1["memory_total_bytes"]) == (256, 1 << 30)
    assert (l1["read_ttl_seconds"], l1["write_ttl_seconds"]) == (300, 600)


async def test_the_pickle_plane_has_no_segment() -> None:
    async with EmbeddedCacheServer(size_gb=0.001, shared_memory=False) as server:
        assert server.shm_name == ""


async def test_two_servers_stand_side_by_side() -> None:
    async with EmbeddedCacheServer(options=OPTIONS) as one, EmbeddedCacheServer(options=OPTIONS) as other:
        assert one.url != other.url
        assert one.shm_name != other.shm_name


async def test_ports_can_be_told() -> None:
    async with EmbeddedCacheServer(options=OPTIONS) as first:
        ports = [int(url.rpartition(":")[2]) for url in (first.url, first.http_url)]
    async with EmbeddedCacheServer(options=OPTIONS, port=ports[0], http_port=ports[1]) as second:
        assert (second.url, second.http_url) == (first.url, first.http_url)
        for port, http_port in ((ports[0], 0), (ports[1], 0), (0, ports[1])):
            server = EmbeddedCacheServer(options=OPTIONS, port=port, http_port=http_port)
            with pytest.raises(CacheConnectError, match="cannot listen"):
                await server.start()
            assert not (SHM / (server.shm_name or "nothing")).exists()


@pytest.mark.parametrize("port", [-1, 65536, True, "80"])
@pytest.mark.parametrize("name", ["port", "http_port"])
def test_what_is_no_port(name: str, port: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        EmbeddedCacheServer(**{name: port})


async def test_a_host_that_is_not_here() -> None:
    with pytest.raises(CacheConnectError, match="cannot listen"):
        async with EmbeddedCacheServer(options=OPTIONS, host="192.0.2.1"):
            pass


async def test_all_addresses_of_this_machine() -> None:
    async with EmbeddedCacheServer(options=OPTIONS, host="0.0.0.0") as server:
        assert server.url.startswith("tcp://127.0.0.1:")
        assert await chunk_size(server) == 4
        assert await get(f"{server.http_url}/healthcheck") == {"status": "healthy"}


async def test_a_pool_that_there_is_no_room_for_leaves_nothing() -> None:
    with pytest.raises(CacheError, match="no pool"):
        async with EmbeddedCacheServer(size_gb=1 << 20):
            pass


async def test_it_is_started_once() -> None:
    async with EmbeddedCacheServer(options=OPTIONS) as server:
        with pytest.raises(ClosedError):
            await server.start()
        assert await chunk_size(server) == 4
    with pytest.raises(ClosedError):
        await server.start()


async def test_closing_goes_through_though_it_is_cancelled() -> None:
    server = EmbeddedCacheServer(options=OPTIONS)
    await server.start()
    path = SHM / server.shm_name
    task = asyncio.create_task(server.aclose())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not path.exists()
    assert not any(map(listens, (server.url, server.http_url)))


def test_one_that_was_forgotten_is_told_of_and_its_segment_is_unlinked() -> None:
    names: list[str] = []

    async def forget() -> None:
        server = EmbeddedCacheServer(options=OPTIONS)
        await server.start()
        names.append(server.shm_name)

    with pytest.warns(ResourceWarning) as told:
        asyncio.run(forget())
        gc.collect()
    assert any("EmbeddedCacheServer" in str(one.message) for one in told)
    assert not (SHM / names[0]).exists()


def test_it_runs_on_the_loop_of_any_thread() -> None:
    answers: list[int] = []

    async def run() -> None:
        async with EmbeddedCacheServer(options=OPTIONS) as server:
            answers.append(await chunk_size(server))

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    thread.join()
    assert answers == [4]


async def test_it_serves_until_it_is_cancelled(capfd: pytest.CaptureFixture[str]) -> None:
    ready: asyncio.Future[EmbeddedCacheServer] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve_cache(chunk_size=8, size_gb=0.001, on_ready=ready.set_result))
    server = await ready
    assert await chunk_size(server) == 8
    path = SHM / server.shm_name
    assert path.exists()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not path.exists()
    assert capfd.readouterr() == ("", "")


# What must not stop it.

KEY = {
    "model_name": "model",
    "world_size": 1,
    "worker_id": 0,
    "token_ids": [1, 2, 3, 4],
    "start": 0,
    "end": 4,
    "request_id": "r",
    "num_kv_readers": 1,
}
HUGE = 2**64 - 1
FLOAT_CHUNK = torch.zeros(2, 1, 4, 8)
ODD_KEYS: list[dict[str, Any]] = [
    {"start": HUGE},
    {"end": HUGE},
    {"start": -4},
    {"start": -(2**63), "end": -(2**63)},
    {"world_size": HUGE},
    {"world_size": 0},
    {"world_size": -1},
    {"worker_id": HUGE},
    {"num_kv_readers": HUGE},
    {"token_ids": [HUGE] * 4},
    {"token_ids": [-1] * 4},
    {"token_ids": []},
    {"model_name": "a@b"},
    {"request_id": "\0" * 1000},
    {"request_configs": {"a": [1] * 100}},
]
HOSTILE: list[tuple[bytes, ...]] = [
    (),
    (b"",),
    (b"", b""),
    (b"", b"", b""),
    (encode(1),),
    (encode(1), b""),
    (encode(1), b"\xc1"),
    (b"\xff" * 100_000, encode(21), b""),
    (encode(1), encode([21])),
    (encode(1), encode(HUGE)),
    (encode(1), encode("x" * 100_000)),
    (encode(1), encode(8), b"\x91" * 1_000_000, encode(1)),
    (encode(1), encode(8), b"\xdd\xff\xff\xff\xff", encode(1)),
    (encode(1), encode(8), b"\xc6\xff\xff\xff\xff", encode(1)),
    (encode(1), encode(8), *([encode(KEY)] * 500)),
    *(
        (encode(1), encode(operation), encode({**KEY, **change}), encode(1), *data)
        for operation, data in ((8, ()), (12, ()), (16, ()), (17, (encode(b""),)), (18, ()), (19, ()))
        for change in ODD_KEYS
    ),
    *(
        (encode(1), encode(17), encode(KEY), encode(1), encode(data))
        for data in (
            b"x",
            b"\x80\x05",
            b"\x80\x05]" + b"(" * 1000,
            pickle.dumps(Evil()),
            pickle.dumps([Evil()]),
            pickle.dumps([FLOAT_CHUNK.expand(2, 1, 4, 8), 1]),
            pickle.dumps([torch.zeros(1, 1, 1, 1).expand(2, 1, 4, 2**40)]),
            pickle.dumps([FLOAT_CHUNK.to(torch.complex64)[..., :1]]),
            pickle.dumps([FLOAT_CHUNK.to_sparse()]),
            pickle.dumps([FLOAT_CHUNK])[:-50],
            pickle.dumps(torch.zeros(1000)),
        )
    ),
]


@pytest.mark.parametrize("shared_memory", [True, False])
async def test_nothing_that_comes_in_stops_it_or_leaves_a_lock(shared_memory: bool) -> None:
    options = CacheOptions(chunk_size=4, size_bytes=1 << 20, shared_memory=shared_memory)
    async with EmbeddedCacheServer(options=options) as server, dealer(server) as socket:
        known = registration(
            instance_id=1, num_layers=1, num_physical_slots=4, hidden_dim_size=8, dtype_str="float32"
        )
        odd: list[dict[str, Any]] = [
            {"instance_id": 2, "num_layers": HUGE, "hidden_dim_size": HUGE},
            {"instance_id": 3, "num_layers": -1},
            {"instance_id": 4, "world_size": HUGE},
            {"instance_id": 5, "dtype_str": "__class__"},
            {"instance_id": 6, "dtype_str": "quint8"},
            {"instance_id": HUGE, "num_physical_slots": HUGE},
        ]
        body = msgspec.to_builtins(known)
        for entry in (body, *({**body, **change} for change in odd)):
            await socket.send_multipart([encode(0), encode(14), encode(entry)])
        for frames in HOSTILE:
            await socket.send_multipart(frames or (b"",))
        for instance in (2, 3, 4, 6, HUGE):
            key = encode({**KEY, "token_ids": [instance % 100] * 4, "request_id": str(instance)})
            await socket.send_multipart([encode(1), encode(16), key, encode(instance)])
            data = encode(pickle.dumps([torch.zeros(2, 3, 8, 16)]))
            await socket.send_multipart([encode(1), encode(17), key, encode(instance), data])
            await socket.send_multipart([encode(1), encode(18), key, encode(instance)])
        await socket.send_multipart([encode(99), encode(21)])
        async with asyncio.timeout(20):
            while (await socket.recv_multipart())[0] != encode(99):
                pass
        for instance in (1, 2, 3, 4, 6, HUGE):
            await socket.send_multipart([encode(1), encode(15), encode(instance)])
        await socket.send_multipart([encode(100), encode(21)])
        async with asyncio.timeout(20):
            while (await socket.recv_multipart())[0] != encode(100):
                pass
        assert await chunk_size(server) == 4
        async with asyncio.timeout(10):
            while await locks(server) != (0, 0):
                await asyncio.sleep(0.05)
        assert (await get(f"{server.http_url}/status"))["registered_non_cuda_instance_ids"] == []


async def locks(server: EmbeddedCacheServer) -> tuple[int, int]:
    l1 = (await get(f"{server.http_url}/status"))["storage_manager"]["l1_manager"]
    return l1["read_locked_count"], l1["write_locked_count"]


async def test_bytes_that_are_no_zeromq_do_not_stop_it() -> None:
    async with EmbeddedCacheServer(options=OPTIONS) as server:
        for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f" + b"x" * 1000, b"\0" * 100):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            writer.write(sent)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            del reader
        assert await chunk_size(server) == 4


async def test_a_client_that_is_gone_before_the_answer_does_not_stop_it() -> None:
    async with EmbeddedCacheServer(options=OPTIONS) as server:
        for _ in range(20):
            async with dealer(server) as socket:
                for _ in range(20):
                    await socket.send_multipart([encode(1), encode(21)])
        assert await chunk_size(server) == 4


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nowhere", b"", 404),
        ("POST", "/status", b"", 405),
        ("GET", "/cache/clear", b"", 405),
        ("POST", "/cache/clear", b"[" * 60_000, 422),
        ("POST", "/cache/clear", b"\xff", 422),
        ("POST", "/cache/clear", b"x" * (1 << 20), 413),
        ("GET", "/conf", b"", 200),
    ],
)
async def test_http_that_makes_no_sense(method: str, path: str, body: bytes, status: int) -> None:
    async with EmbeddedCacheServer(options=OPTIONS) as server, aiohttp.ClientSession() as session:
        async with session.request(method, server.http_url + path, data=body) as answer:
            assert answer.status == status
        assert await get(f"{server.http_url}/healthcheck") == {"status": "healthy"}


# What it does by itself.


async def test_it_forgets_silent_clients() -> None:
    clock = Clock()
    async with EmbeddedCacheServer(options=OPTIONS, clock=clock) as server, dealer(server) as socket:
        await socket.send_multipart([encode(1), encode(14), encode(registration())])
        await socket.recv_multipart()
        clock.advance(3601)
        async with asyncio.timeout(5):
            while (await get(f"{server.http_url}/status"))["registered_non_cuda_instance_ids"]:
                await asyncio.sleep(0.05)


async def test_an_engine_can_announce_itself() -> None:
    shape = KVGeometry(
        num_layers=3, num_kv_heads=2, head_size=16, dtype=torch.float16, layout="two-plane", block_size=4
    )
    async with EmbeddedCacheServer(options=OPTIONS) as server:
        server.announce("model", shape)
        meta = (await get(f"{server.http_url}/status"))["cache_context_meta"]
        assert [entry["model_name"] for entry in meta.values()] == ["model"]
        with pytest.raises(GeometryError, match="two-plane"):
            server.announce("model", replace(shape, layout="fused"))
