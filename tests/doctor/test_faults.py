"""Each fault that a first user meets, with its own line and what to do; nothing is left on the server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from aiohttp import web

from lmcache_stream.doctor import Deadlines, Status, Targets
from lmcache_stream.embedded import EmbeddedCacheServer
from lmcache_stream.embedded.engine import CausalModel

from ..fakes.lmcache import FakeLMCache
from ..real.stack import free_port
from .conftest import Stage, clients_of, http_server, in_between, nothing_is_held, staged
from .lines import DEADLINES, Line, check_lines, examined

HURRIED = Deadlines(answer=0.5, completion=20, offload=1, transfer=10, total=60)


@dataclass(frozen=True)
class Fault:
    """A fault of the addresses or the model, on servers that are well.

    Attributes:
        targets: made from those of the healthy stage and an empty folder.
        lines: all checks that fail or warn, and what they say.
    """

    targets: Callable[[Stage, Path], Targets]
    lines: dict[str, Line] = field(default_factory=dict)


def http_to_tcp(url: str) -> str:
    return url.replace("http:", "tcp:")


def tcp_to_http(url: str) -> str:
    return url.replace("tcp:", "http:")


def moved(**urls: Callable[[Targets], str]) -> Callable[[Stage, Path], Targets]:
    """The targets with other addresses."""
    return lambda stage, _: replace(stage.targets, **{name: url(stage.targets) for name, url in urls.items()})


def configured(**changes: object) -> Callable[[Stage, Path], Targets]:
    """The targets with another configuration of the model."""
    return lambda stage, folder: stage.with_config(folder, **changes)


NOBODY = f"127.0.0.1:{free_port()}"
FAULTS = {
    "healthy": Fault(lambda stage, _: stage.targets),
    "the only model": Fault(lambda stage, _: replace(stage.targets, model=None)),
    "an address with /v1": Fault(moved(engine_url=lambda it: f"{it.engine_url}/v1/")),
    "no engine": Fault(
        moved(engine_url=lambda _: f"http://{NOBODY}"),
        {
            "engine/reachable": Line(
                f"nothing listens at http://{NOBODY} (Connection refused)", "vllm serve"
            ),
        },
    ),
    "no cache HTTP": Fault(
        moved(http_url=lambda _: f"http://{NOBODY}"),
        {
            "cache HTTP/reachable": Line(
                f"nothing listens at http://{NOBODY} (Connection refused)", "lmcache server --http-port"
            )
        },
    ),
    "no cache ZeroMQ": Fault(
        moved(cache_url=lambda _: f"tcp://{NOBODY}"),
        {
            "cache ZeroMQ/reachable": Line(
                f"nothing listens at tcp://{NOBODY} (Connection refused)", "lmcache server --port"
            )
        },
    ),
    "the engine's URL is the cache's HTTP": Fault(
        moved(engine_url=lambda it: it.http_url),
        {
            "engine/API": Line("LMCache's HTTP port answers at", "that is an address for --http-url"),
        },
    ),
    "the engine's URL is the cache's ZeroMQ": Fault(
        moved(engine_url=lambda it: tcp_to_http(it.cache_url)),
        {
            "engine/reachable": Line("a ZeroMQ socket answers at http://", "for --cache-url tcp://127.0.0.1"),
        },
    ),
    "the cache's URL is its HTTP": Fault(
        moved(cache_url=lambda it: http_to_tcp(it.http_url)),
        {
            "cache ZeroMQ/reachable": Line(
                "LMCache's HTTP port answers at tcp://", "for --http-url; --cache-url is LMCache's --port"
            )
        },
    ),
    "the cache's URL is the engine": Fault(
        moved(cache_url=lambda it: http_to_tcp(it.engine_url)),
        {
            "cache ZeroMQ/reachable": Line(
                "an engine's API answers at tcp://", "for --engine-url; --cache-url"
            )
        },
    ),
    "the HTTP URL is the cache's ZeroMQ": Fault(
        moved(http_url=lambda it: tcp_to_http(it.cache_url)),
        {
            "cache HTTP/reachable": Line(
                "a ZeroMQ socket answers at http://", "for --cache-url tcp://127.0.0.1"
            )
        },
    ),
    "the HTTP URL is the engine": Fault(
        moved(http_url=lambda it: it.engine_url),
        {"cache HTTP/status": Line("an engine's API answers at http://", "for --engine-url; --http-url is")},
    ),
    "the cache's ports in each other's place": Fault(
        moved(http_url=lambda it: tcp_to_http(it.cache_url), cache_url=lambda it: http_to_tcp(it.http_url)),
        {
            "cache HTTP/reachable": Line("a ZeroMQ socket answers at", "--cache-url"),
            "cache ZeroMQ/reachable": Line("LMCache's HTTP port answers at", "--http-url"),
        },
    ),
    "a model that vLLM does not serve": Fault(
        lambda stage, _: replace(stage.targets, model="huge"),
        {
            "engine/model": Line("vLLM does not serve 'huge'; it serves: 'tiny'", "the served name"),
            "model/registered": Line("'huge' is not registered with this LMCache; registered: '/", "path"),
        },
    ),
    "the model's path for its served name": Fault(
        lambda stage, _: replace(stage.targets, model=stage.model.name),
        {"engine/model": Line("is the model's path; vLLM serves it as 'tiny'", "--model tiny")},
    ),
    "no configuration there": Fault(
        lambda stage, _: replace(stage.targets, model_path="/nowhere"),
        {"model/geometry": Line("'/nowhere': no config found", "--model-path")},
    ),
    "the configuration of a model with more layers": Fault(
        configured(num_hidden_layers=4),
        {"round trip/retrieve": Line("[2, 3, 16, 32], but the geometry gives", "--model-path")},
    ),
    "the configuration of a model with more heads": Fault(
        configured(num_key_value_heads=4),
        {"round trip/retrieve": Line("[2, 3, 16, 32], but the geometry gives", "--model-path")},
    ),
    "a wrong theta": Fault(
        configured(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
        {"round trip/layout": Line("keys of equal tokens differ by", "--model-path")},
    ),
    "heads of half the size": Fault(
        configured(head_dim=8, num_key_value_heads=4),
        {"round trip/layout": Line("keys of equal tokens differ by", "--model-path")},
    ),
    "a RoPE that changes with the length": Fault(
        configured(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
        {
            "model/RoPE": Line("dynamic", "tokens not be dropped"),
            "round trip/layout": Line("could not be checked", "silently wrong", Status.WARNING),
        },
    ),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_has_its_own_line(stage: Stage, tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    clients = await clients_of(stage.cache)
    check_lines(await examined(fault.targets(stage, tmp_path)), fault.lines)
    await nothing_is_held(stage.cache, clients)


# Servers that are ill themselves.


@asynccontextmanager
async def no_shared_memory(model: CausalModel) -> AsyncIterator[Targets]:
    async with staged(model, shared_memory=False) as stage:
        yield stage.targets


@asynccontextmanager
async def pool_of_another_machine(model: CausalModel) -> AsyncIterator[Targets]:
    async with staged(model) as stage:
        path = Path("/dev/shm") / stage.cache.shm_name
        hidden = path.rename(path.with_name(f"lmcs-hidden-{path.name}"))
        yield stage.targets
        hidden.rename(path)


@asynccontextmanager
async def engine_without_cache(model: CausalModel) -> AsyncIterator[Targets]:
    async with staged(model, connected=False) as stage:
        yield stage.targets


@asynccontextmanager
async def engine_beside_one_with_cache(model: CausalModel) -> AsyncIterator[Targets]:
    async with staged(model, connected=False) as stage:
        stage.cache.announce(model.name, model.geometry)
        yield stage.targets


@asynccontextmanager
async def engine_beside_another_model(model: CausalModel) -> AsyncIterator[Targets]:
    async with staged(model, connected=False) as stage:
        stage.cache.announce("/models/other", model.geometry)
        yield stage.targets


@asynccontextmanager
async def other_layers_registered(model: CausalModel) -> AsyncIterator[Targets]:
    async with staged(model) as stage:
        stage.cache.announce(model.name, replace(model.geometry, num_layers=7))
        yield stage.targets


@asynccontextmanager
async def two_cache_servers(model: CausalModel) -> AsyncIterator[Targets]:
    async with staged(model) as stage, EmbeddedCacheServer(chunk_size=16, size_gb=0.01) as other:
        other.announce(model.name, model.geometry)
        yield replace(stage.targets, cache_url=other.url)


@asynccontextmanager
async def chunks_longer_than_prompts(model: CausalModel) -> AsyncIterator[Targets]:
    async with staged(model, chunk_size=8192) as stage:
        yield stage.targets


def fake_cache(**settings: object) -> Callable[[CausalModel], AbstractAsyncContextManager[Targets]]:
    @asynccontextmanager
    async def open_it(model: CausalModel) -> AsyncIterator[Targets]:
        fake = FakeLMCache(engine_model=model.name, engine_block_size=1, **settings)  # type: ignore[arg-type]
        async with staged(model, connected=False) as stage, fake:
            yield replace(stage.targets, cache_url=fake.url, http_url=fake.http_url)
            assert fake.registered == {}

    return open_it


def rewritten(
    server: str, pattern: str, by: str, *, path: str = ""
) -> Callable[[CausalModel], AbstractAsyncContextManager[Targets]]:
    """The healthy stage, but what ``server`` answers is changed."""

    def rewrite(asked: str, answer: str) -> str:
        return re.sub(pattern, by, answer) if path in asked else answer

    @asynccontextmanager
    async def open_it(model: CausalModel) -> AsyncIterator[Targets]:
        async with (
            staged(model) as stage,
            in_between(getattr(stage.targets, server), rewrite) as address,
        ):
            yield replace(stage.targets, **{server: address})

    return open_it


def answering(status: int, text: str) -> Callable[[CausalModel], AbstractAsyncContextManager[Targets]]:
    """The healthy stage, but another server in place of the engine."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, text=text)

    @asynccontextmanager
    async def open_it(model: CausalModel) -> AsyncIterator[Targets]:
        async with staged(model) as stage, http_server(answer) as address:
            yield replace(stage.targets, engine_url=address, model_path=model.name)

    return open_it


SIZE_UNKNOWN = Line("does not tell the size of L1", "log", Status.WARNING)
ILL = {
    "no shared memory": (
        no_shared_memory,
        {
            "cache ZeroMQ/data plane": Line(
                "started without a pool name", "--shm-name lmcache --no-l1-use-lazy", Status.WARNING
            )
        },
    ),
    "shared memory of another machine": (
        pool_of_another_machine,
        {"cache ZeroMQ/data plane": Line("which is not there on this machine", "run on LMCache's machine")},
    ),
    "vLLM without LMCache": (
        engine_without_cache,
        {"model/registered": Line("no engine is connected to this LMCache", "LMCacheMPConnector")},
    ),
    "vLLM without LMCache, beside one that has it": (
        engine_beside_one_with_cache,
        {"round trip/offload": Line("vLLM answered, but nothing of the prompt is in", '"lmcache.mp.port": ')},
    ),
    "vLLM without LMCache, beside another model": (
        engine_beside_another_model,
        {"model/registered": Line("registered: '/models/other'", "another vLLM is connected to it")},
    ),
    "a configuration that contradicts": (
        other_layers_registered,
        {"model/geometry": Line("the engine registered 7 layers", "--model-path")},
    ),
    "two LMCache servers": (
        two_cache_servers,
        {"cache ZeroMQ/same server": Line("are different LMCache servers", "of one `lmcache server`")},
    ),
    "chunks longer than prompts": (
        chunks_longer_than_prompts,
        {"round trip/prefill": Line("a chunk of 8192 tokens is more than vLLM takes (4096)", "--chunk-size")},
    ),
    "LMCache without auto": (
        fake_cache(mode="lmcache_driven"),
        {
            "cache HTTP/transfer mode": Line(
                "transfer mode is 'lmcache_driven'", "--supported-transfer-mode auto"
            ),
            "cache HTTP/memory": SIZE_UNKNOWN,
        },
    ),
    "LMCache that does not answer a registration": (
        fake_cache(silent={"register_kv_cache_engine_driven_context"}),
        {
            "cache ZeroMQ/registration": Line("says nothing to a registration", "--supported-transfer-mode"),
            "cache HTTP/memory": SIZE_UNKNOWN,
        },
    ),
    "a ZeroMQ socket that is not LMCache's": (
        fake_cache(silent={"get_chunk_size"}),
        {
            "cache ZeroMQ/reachable": Line("does not answer get_chunk_size", "is it LMCache's?"),
            "cache HTTP/memory": SIZE_UNKNOWN,
        },
    ),
    "an unhealthy LMCache": (
        rewritten("http_url", '"is_healthy": true', '"is_healthy": false', path="/status"),
        {"cache HTTP/status": Line("calls itself unhealthy", "/status")},
    ),
    "a full L1": (
        rewritten("http_url", r'"memory_used_bytes": \d+', '"memory_used_bytes": 53600000', path="/status"),
        {"cache HTTP/memory": Line("L1 is full: ", "--l1-size-gb", Status.WARNING)},
    ),
    "vLLM that reports no cached tokens": (
        rewritten("engine_url", r', ?"prompt_tokens_details": ?\{[^}]*\}', "", path="/completions"),
        {
            "engine/cached tokens": Line("does not report", "--enable-prompt-tokens-details", Status.WARNING),
            "round trip/decode": Line("reports no cached", "--enable-prompt-tokens-details", Status.WARNING),
        },
    ),
    "vLLM that does not use what was stored": (
        rewritten("engine_url", r'"cached_tokens": ?\d+', '"cached_tokens": 16', path="/completions"),
        {"round trip/decode": Line("vLLM took 16 of 512 stored tokens", "kv_both")},
    ),
    "an engine without token ids": (
        rewritten("engine_url", '"token_ids"', '"other_ids"', path="/completions"),
        {"engine/token ids": Line("token ids are needed", "0.10.2 or newer")},
    ),
    "vLLM with an API key": (
        answering(401, '{"error":"Unauthorized"}'),
        {"engine/API": Line("it wants an API key", "--api-key")},
    ),
    "vLLM that starts": (
        answering(503, "starting"),
        {"engine/API": Line("HTTP 503: 'starting'", "vLLM is starting")},
    ),
    "a web server in place of the engine": (
        answering(200, "<!DOCTYPE html>"),
        {"engine/API": Line("neither vLLM nor LMCache answers at", "--engine-url is vLLM's --port")},
    ),
}


@pytest.mark.parametrize("name", ILL)
async def test_an_ill_server_has_its_own_line(model: CausalModel, name: str) -> None:
    opened, lines = ILL[name]
    async with opened(model) as targets:
        check_lines(await examined(targets, HURRIED), lines)


async def test_a_pool_of_another_user(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, *_: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("lmcache_stream.cache.shared_memory.os.open", refuse)
    line = Line("which this user may not open", "run as LMCache's user")
    check_lines(await examined(stage.targets), {"cache ZeroMQ/data plane": line})


async def test_a_login_is_sent_with_every_question(model: CausalModel) -> None:
    asked: dict[str, str | None] = {}

    async def answer(request: web.Request) -> web.Response:
        asked[request.path] = request.headers.get("Authorization")
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "tiny"}]})
        return web.Response(status=403)

    async with staged(model) as stage, http_server(answer) as address:
        targets = replace(stage.targets, engine_url=address, api_key="secret")
        results = await examined(targets)
        assert results["engine/token ids"].advice == "give --api-key the one of vLLM"
        # Of whoever answers first nothing is known, so that it is not told the key.
        assert asked.pop("/") is None
        assert asked == dict.fromkeys(("/v1/models", "/version", "/v1/completions"), "Bearer secret")
        assert "secret" not in repr(targets)
        assert not any("secret" in one.seen for one in results.values())


async def test_two_models_and_none_named(model: CausalModel) -> None:
    two = {"data": [{"id": "one", "root": "/1"}, {"id": "two", "root": "/2"}]}

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(two)

    async with staged(model) as stage, http_server(answer) as address:
        stage.cache.announce("/models/other", model.geometry)
        results = await examined(replace(stage.targets, engine_url=address, model=None))
    assert "vLLM serves: 'one', 'two'" in results["engine/model"].seen
    assert "no model was named; registered with this LMCache: " in results["model/registered"].seen
    assert "'/models/other'" in results["model/registered"].seen


async def test_what_hangs_has_a_deadline(model: CausalModel) -> None:
    async def hang(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "tiny"}]})
        await asyncio.sleep(60)
        raise AssertionError

    short = Deadlines(answer=0.3, completion=0.5, offload=1, transfer=1, total=60)
    async with staged(model) as stage, http_server(hang) as address:
        results = await examined(replace(stage.targets, engine_url=address), short)
        assert results["engine/API"].seen == "vLLM's API, without a version"
        assert "no token within 0.5 s" in results["engine/token ids"].seen
        hurried = replace(DEADLINES, total=0.4)
        results = await examined(replace(stage.targets, engine_url=address), hurried)
    seen = [one.seen for one in results.values() if not one.is_good]
    assert "0.4 s for all checks were over" in seen[0]
    assert seen[-1].startswith("because of engine: ") or seen[-1] == "the 0.4 s for all checks are over"
    assert results["cache HTTP/reachable"].seen == "the 0.4 s for all checks are over"


async def test_without_an_engine_the_only_model_of_the_cache_is_looked_at(stage: Stage) -> None:
    results = await examined(replace(stage.targets, engine_url=f"http://{NOBODY}"))
    assert results["model/registered"].seen == f"registered as {stage.model.name!r}"
    assert results["model/RoPE"].status is Status.OK
    stage.cache.announce("/models/other", stage.model.geometry)
    results = await examined(replace(stage.targets, engine_url=f"http://{NOBODY}"))
    assert results["model/registered"].status is Status.FAILED
    assert "registered: '/models/other', '/" in results["model/registered"].seen
    assert "--model-path" in results["model/registered"].advice
    named = replace(stage.targets, engine_url=f"http://{NOBODY}", model_path=stage.model.name)
    results = await examined(named)
    assert results["model/registered"].seen.startswith(f"registered as {stage.model.name!r}; registered: ")
