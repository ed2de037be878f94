"""A scripted LMCache multiprocess server for tests: the protocol, its silences, and a strict account
of every lock. It stands beside the tests on the real server, for what that one does not do on demand:
pending prefetches, silence, delays, a full pool, restarts."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pickle
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
import zmq
import zmq.asyncio
from aiohttp import web

from lmcache_stream.cache import messages

_NAMES = {
    operation.number: operation.name
    for operation in vars(messages).values()
    if isinstance(operation, messages.Operation)
}
ChunkKey = tuple[str, str, tuple[int, ...]]
SILENCE = object()


@dataclass
class Registered:
    """One engine-driven client."""

    model_name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    block_size: int
    use_mla: bool


@dataclass
class FakeLMCache:
    """The server; ``async with`` starts and stops it.

    Attributes:
        chunk_size: tokens of a chunk.
        shared_memory: which data plane it offers.
        capacity: chunks that fit; None for no limit.
        engine_model: the model that an engine has registered, None for none.
        silent: operations that get no reply.
        delays: seconds before an operation is worked on.
        prefetch_done: while not set, every prefetch is pending.
        calls: operations in the order of their arrival.
        violations: what no client may do, e.g. a lock released twice.
    """

    chunk_size: int = 4
    shared_memory: bool = True
    capacity: int | None = None
    engine_model: str | None = "model"
    engine_block_size: int = 4
    engine_use_mla: bool = False
    mode: str = "auto"
    silent: set[str] = field(default_factory=set)
    delays: dict[str, float] = field(default_factory=dict)
    prefetch_done: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    chunks: dict[ChunkKey, torch.Tensor] = field(default_factory=dict)
    read_locks: Counter[ChunkKey] = field(default_factory=Counter)
    unwritten: dict[ChunkKey, torch.Tensor] = field(default_factory=dict)
    registered: dict[int, Registered] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prefetch_done.set()
        self._hits: dict[str, int] = {}
        self._lookups: dict[str, dict[str, Any]] = {}
        self._writes: dict[Any, list[ChunkKey]] = {}
        self._reads: dict[Any, list[ChunkKey]] = {}
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._runner: web.AppRunner | None = None
        self._group = contextlib.AsyncExitStack()
        self._pool = torch.empty(0, dtype=torch.uint8)
        self._free: list[int] = []
        self._offsets: dict[ChunkKey, int] = {}
        self._slot = 0
        self._left_behind: list[Path] = []
        self.port = self.http_port = 0
        self.shm_name = ""

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def locked(self) -> tuple[int, int]:
        """Counts of read-locked and write-locked chunks."""
        return len(+self.read_locks), len(self.unwritten)

    async def __aenter__(self) -> Self:
        await self.start()
        app = web.Application()
        app.router.add_get("/status", self._status)
        app.router.add_get("/config", self._config)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.http_port)
        await site.start()
        self.http_port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        for path in self._left_behind:
            path.unlink()
        if self._runner is not None:
            await self._runner.cleanup()
        self._context.term()

    async def start(self) -> None:
        """Begin to answer; after ``stop`` on the same port, as a server that knows nothing."""
        self._socket = socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        if self.port:
            await _bind(socket, self.url)
        else:
            self.port = socket.bind_to_random_port("tcp://127.0.0.1")
        if self.shared_memory:
            self._make_pool()
        group = await self._group.enter_async_context(_serving())
        group.create_task(self._serve(socket, group))

    async def stop(self, *, killed: bool = False) -> None:
        """Go away without a word and forget everything; a killed server leaves its pool behind."""
        await self._group.aclose()
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
        for name in ("chunks", "read_locks", "unwritten", "registered"):
            getattr(self, name).clear()
        for state in (self._hits, self._lookups, self._writes, self._reads, self._offsets):
            state.clear()
        if self.shm_name:
            self._pool = torch.empty(0, dtype=torch.uint8)
            path = Path("/dev/shm") / self.shm_name
            if killed:
                self._left_behind.append(path)
            else:
                path.unlink()
            self.shm_name = ""

    def _make_pool(self, size: int = 1 << 22) -> None:
        self.shm_name = f"lmcs-fake-{secrets.token_hex(6)}"
        path = Path("/dev/shm") / self.shm_name
        with path.open("wb") as file:
            os.ftruncate(file.fileno(), size)
        # Filled with a pattern, so that a slot that is published unfilled is seen.
        self._pool = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        self._pool.fill_(0xAB)
        self._free, self._slot = [], 0

    async def _serve(self, socket: zmq.asyncio.Socket, group: asyncio.TaskGroup) -> None:
        while True:
            identity, uid, number, *payloads = await socket.recv_multipart()
            name = _NAMES[msgspec.msgpack.decode(number)]
            self.calls.append(name)
            group.create_task(self._answer(socket, identity, uid, number, name, payloads))

    async def _answer(
        self,
        socket: zmq.asyncio.Socket,
        identity: bytes,
        uid: bytes,
        number: bytes,
        name: str,
        payloads: list[bytes],
    ) -> None:
        if name in self.silent:
            return
        if name in self.delays:
            await asyncio.sleep(self.delays[name])
        try:
            result = getattr(self, f"_{name}")(*map(msgspec.msgpack.decode, payloads))
        except LookupError:
            return
        frames = [identity, uid, number]
        if result is not None:
            frames.append(msgspec.msgpack.encode(result))
        await socket.send_multipart(frames)

    # The operations.

    def _get_chunk_size(self) -> int:
        return self.chunk_size

    def _register_kv_cache_engine_driven_context(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.mode != "auto":
            raise LookupError("refused")
        plane = (body["num_layers"], body["num_physical_slots"], body["hidden_dim_size"])
        self.registered.setdefault(
            body["instance_id"],
            Registered(
                body["model_name"],
                plane if body["use_mla"] else (2, *plane),
                getattr(torch, body["dtype_str"]),
                body["block_size"],
                body["use_mla"],
            ),
        )
        return {"shm_name": self.shm_name, "pool_size": len(self._pool)}

    def _unregister_kv_cache_engine_driven_context(self, instance: int) -> None:
        self.registered.pop(instance, None)
        for key in [key for key in self._writes if key[0] == instance]:
            self.violations.append("unregistered with slots that were not committed")
            self._publish(self._writes.pop(key))

    def _lookup(self, key: dict[str, Any], _: int) -> None:
        self._lookups[key["request_id"]] = key

    def _query_prefetch_status(self, request_id: str) -> int | None:
        if not self.prefetch_done.is_set():
            return None
        key = self._lookups.pop(request_id, None)
        if key is None:
            return 0
        hit = 0
        keys = self._keys(key)
        while hit < len(keys) and keys[hit] in self.chunks:
            hit += 1
        self.read_locks.update(keys[:hit])
        self._hits[request_id] = hit
        return hit

    def _free_lookup_locks(self, key: dict[str, Any], _: int) -> None:
        hit = self._hits.get(key["request_id"], -1)
        if hit < 0:
            self.violations.append("locks freed that no result had granted")
            return
        start = key["start"] // self.chunk_size
        self._unlock(self._keys({**key, "start": 0})[start:hit])

    def _end_session(self, request_id: str) -> None:
        self._hits.pop(request_id, None)

    def _prepare_store(self, key: dict[str, Any], instance: int) -> dict[str, Any]:
        entry = self.registered[instance]
        if not self.shared_memory:
            return {"context": {}}
        slots, indices, keys = [], [], []
        for index, chunk in enumerate(self._keys(key)):
            room = self.capacity is None or len(self.chunks) + len(self.unwritten) < self.capacity
            if chunk in self.chunks or chunk in self.unwritten or not room:
                continue
            slots.append(self._reserve(chunk, entry))
            indices.append(index)
            keys.append(chunk)
        if keys:
            self._writes[self._transfer(key, instance)] = keys
        return {"context": {"slots": slots, "chunk_indices": indices}}

    def _commit_store(self, key: dict[str, Any], instance: int, data: bytes) -> bool:
        entry = self.registered[instance]
        if data:
            for chunk, tensor in zip(self._keys(key), pickle.loads(data), strict=True):
                if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
                    self.violations.append("pickled chunks of a wrong shape")
                elif self.capacity is None or len(self.chunks) < self.capacity:
                    self.chunks.setdefault(chunk, tensor)
            return True
        keys = self._writes.pop(self._transfer(key, instance), None)
        if keys is None:
            self.violations.append("a commit without slots")
            return False
        self._publish(keys)
        return True

    def _prepare_retrieve(self, key: dict[str, Any], instance: int) -> dict[str, Any]:
        if instance not in self.registered:
            raise LookupError("unknown instance")
        keys = self._keys(key)
        if any(chunk not in self.chunks for chunk in keys):
            self._unlock([chunk for chunk in keys if chunk in self.chunks])
            return {"success": False, "data": b"", "context": {}}
        if not self.shared_memory:
            data = pickle.dumps([self.chunks[chunk].clone() for chunk in keys])
            self._unlock(keys)
            return {"success": True, "data": data, "context": {}}
        transfer = self._transfer(key, instance)
        if transfer in self._reads:
            self.violations.append("two equal retrieves at once")
        self._reads[transfer] = keys
        slots = [self._slot_of(chunk, self.chunks[chunk]) for chunk in keys]
        return {"success": True, "data": b"", "context": {"slots": slots}}

    def _commit_retrieve(self, key: dict[str, Any], instance: int) -> bool:
        if instance not in self.registered:
            raise LookupError("unknown instance")
        self._unlock(self._reads.pop(self._transfer(key, instance), []))
        return True

    # What they work with.

    def _keys(self, key: dict[str, Any]) -> list[ChunkKey]:
        ids = tuple(key["token_ids"])
        ends = range(key["start"] + self.chunk_size, key["end"] + 1, self.chunk_size)
        return [(key["model_name"], key["cache_salt"], ids[:end]) for end in ends]

    def _transfer(self, key: dict[str, Any], instance: int) -> Any:
        ids = tuple(key["token_ids"])
        return instance, ids, key["start"], key["end"], key["cache_salt"], key["worker_id"]

    def _unlock(self, keys: list[ChunkKey]) -> None:
        for key in keys:
            if self.read_locks[key] <= 0:
                self.violations.append("a read lock released twice")
            self.read_locks[key] -= 1

    def _reserve(self, chunk: ChunkKey, entry: Registered) -> dict[str, Any]:
        length = math.prod(entry.shape) * entry.dtype.itemsize
        offset = self._free.pop() if self._free else self._slot
        if offset == self._slot:
            self._slot += length
        self._offsets[chunk] = offset
        view = self._pool[offset : offset + length].view(entry.dtype).view(entry.shape)
        self.unwritten[chunk] = view
        return self._slot_of(chunk, view)

    def _slot_of(self, chunk: ChunkKey, tensor: torch.Tensor) -> dict[str, Any]:
        return {
            "offset": self._offsets[chunk],
            "length": tensor.nbytes,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }

    def _publish(self, keys: list[ChunkKey]) -> None:
        for key in keys:
            tensor = self.unwritten.pop(key)
            if bool((tensor.reshape(-1).view(torch.uint8)[-8:] == 0xAB).all()):
                self.violations.append("an unfilled slot was published")
            self.chunks[key] = tensor

    def put(self, tokens: list[int], kv: torch.Tensor, *, salt: str = "", model: str = "model") -> None:
        """Put two-plane chunks of ``kv`` (``[2, L, T, D]``) in, as an engine's offloading does."""
        size = self.chunk_size
        for end in range(size, len(tokens) + 1, size):
            self.put_chunk(tokens[:end], kv[:, :, end - size : end], salt=salt, model=model)

    def put_chunk(self, tokens: list[int], kv: torch.Tensor, *, salt: str = "", model: str = "model") -> None:
        """Put the last chunk of ``tokens`` in: ``kv`` is ``[2, L, c, D]``."""
        chunk = kv.contiguous()
        key = (model, salt, tuple(tokens))
        if self.shared_memory:
            entry = Registered(model, tuple(chunk.shape), chunk.dtype, self.chunk_size, False)
            self._reserve(key, entry)
            slot = self.unwritten.pop(key)
            slot.copy_(chunk)
            chunk = slot
        self.chunks[key] = chunk

    def clear(self, *, force: bool = False) -> None:
        """Drop what is not locked, or everything."""
        for key in list(self.chunks):
            if force or self.read_locks[key] <= 0:
                del self.chunks[key]
                self.read_locks.pop(key, None)

    async def _status(self, _: web.Request) -> web.Response:
        engines = {}
        if self.engine_model is not None:
            engines["1"] = {
                "model_name": self.engine_model,
                "world_size": 1,
                "block_size": self.engine_block_size,
                "use_mla": self.engine_use_mla,
            }
        clients = {
            str(instance): {
                "model_name": entry.model_name,
                "world_size": 1,
                "block_size": entry.block_size,
                "use_mla": entry.use_mla,
            }
            for instance, entry in self.registered.items()
        }
        return web.json_response(
            {
                "is_healthy": True,
                "cache_context_meta": {},
                "registered_non_cuda_instance_ids": list(self.registered),
                "non_cuda_context_meta": {**engines, **clients},
            }
        )

    async def _config(self, _: web.Request) -> web.Response:
        section = {"chunk_size": self.chunk_size, "supported_transfer_mode": self.mode}
        return web.json_response({"mp": section})


async def _bind(socket: zmq.asyncio.Socket, url: str) -> None:
    """Bind where another socket was closed just now, which ZeroMQ does a little later."""
    for _ in range(200):
        try:
            socket.bind(url)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            await asyncio.sleep(0.01)
        else:
            return
    raise OSError(f"{url} stays in use")


@contextlib.asynccontextmanager
async def _serving() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that ends by cancelling what runs in it."""
    stopped = asyncio.Event()
    opened = asyncio.Event()
    groups: list[asyncio.TaskGroup] = []

    async def host() -> None:
        async with asyncio.TaskGroup() as group:
            groups.append(group)
            opened.set()
            await stopped.wait()

    task = asyncio.create_task(host())
    await opened.wait()
    try:
        yield groups[0]
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
