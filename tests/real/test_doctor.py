"""The doctor on the real servers: healthy, and ill in every way that they can be brought into."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmcache_stream.doctor import Deadlines, Status, Targets
from lmcache_stream.doctor.checks import CHECKS

from ..doctor.lines import Line, check_lines, examined
from .conftest import RealStack, until_unlocked
from .stack import CacheServer, Engine, free_port, lmcache_server, vllm_server

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.parametrize("stack", ["bfloat16-shared-memory"], indirect=True),
]

NOBODY = f"127.0.0.1:{free_port()}"


def targets_of(stack: RealStack) -> Targets:
    return Targets(
        engine_url=stack.engine.url,
        cache_url=stack.cache.url,
        http_url=stack.cache.http_url,
        model=stack.engine.model,
    )


def tcp(url: str) -> str:
    return url.replace("http:", "tcp:")


def http(url: str) -> str:
    return url.replace("tcp:", "http:")


async def check(cache: CacheServer, targets: Targets, lines: dict[str, Line], *, offload: float = 15) -> None:
    """Examine ``targets`` and assert what is said, and that ``cache`` holds nothing of it."""
    before = await asyncio.to_thread(lambda: cache.status)
    check_lines(await examined(targets, Deadlines(offload=offload)), lines)
    await until_unlocked(cache)
    after = await asyncio.to_thread(lambda: cache.status)
    for name in ("registered_non_cuda_instance_ids", "registered_gpu_ids", "active_sessions"):
        assert after.get(name) == before.get(name), name


def test_the_command_finds_a_healthy_stack_healthy(stack: RealStack) -> None:
    targets = targets_of(stack)
    urls = ["--engine-url", targets.engine_url, "--cache-url", targets.cache_url]
    command = [sys.executable, "-m", "lmcache_stream", "doctor", *urls, "--http-url", targets.http_url]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found = {f"{one['group']}/{one['name']}": one for one in json.loads(done.stdout)}
    assert list(found) == [one.path for one in CHECKS]
    assert {one["status"] for one in found.values()} == {"ok"}
    assert found["engine/API"]["seen"] == "vLLM 0.32.0"
    assert found["cache HTTP/status"]["seen"] == "LMCache 0.5.6, healthy"
    assert f"/dev/shm/lmcache_l1_pool_{stack.cache.shm_name}" in found["cache ZeroMQ/data plane"]["seen"]
    assert found["model/registered"]["seen"] == f"registered as {stack.model_name!r}"
    assert "vLLM took 512 of 512 stored tokens" in found["round trip/decode"]["seen"]
    assert stack.engine.is_alive


async def test_a_healthy_stack_is_left_as_it_was(stack: RealStack) -> None:
    await check(stack.cache, targets_of(stack), {})


ADDRESSES: dict[str, tuple[Any, dict[str, Line]]] = {
    "nothing listens": (
        lambda it: {
            "engine_url": f"http://{NOBODY}",
            "cache_url": f"tcp://{NOBODY}",
            "http_url": f"http://{NOBODY}",
        },
        {
            f"{group}/reachable": Line("nothing listens at ", "start ")
            for group in ("engine", "cache HTTP", "cache ZeroMQ")
        },
    ),
    "the cache's ports in each other's place": (
        lambda it: {"cache_url": tcp(it.http_url), "http_url": http(it.cache_url)},
        {
            "cache HTTP/reachable": Line("a ZeroMQ socket answers at", "for --cache-url tcp://"),
            "cache ZeroMQ/reachable": Line("LMCache's HTTP port answers at", "for --http-url"),
        },
    ),
    "the engine's URL is the cache's HTTP": (
        lambda it: {"engine_url": it.http_url},
        {"engine/API": Line("LMCache's HTTP port answers at", "for --http-url")},
    ),
    "the engine's URL is the cache's ZeroMQ": (
        lambda it: {"engine_url": http(it.cache_url)},
        {"engine/reachable": Line("a ZeroMQ socket answers at", "for --cache-url")},
    ),
    "the cache's URLs are the engine": (
        lambda it: {"cache_url": tcp(it.engine_url), "http_url": it.engine_url},
        {
            "cache HTTP/status": Line("an engine's API answers at", "for --engine-url"),
            "cache ZeroMQ/reachable": Line("an engine's API answers at", "for --engine-url"),
        },
    ),
    "an unknown model": (
        lambda it: {"model": "llama"},
        {
            "engine/model": Line("vLLM does not serve 'llama'; it serves: 'smollm2'", "the served name"),
            "model/registered": Line("'llama' is not registered with this LMCache; registered: '/", "path"),
        },
    ),
}


@pytest.mark.parametrize("name", ADDRESSES)
async def test_a_wrong_address_or_name_has_its_own_line(stack: RealStack, name: str) -> None:
    change, lines = ADDRESSES[name]
    targets = targets_of(stack)
    await check(stack.cache, replace(targets, **change(targets)), lines)


async def test_the_model_s_path_is_not_its_served_name(stack: RealStack) -> None:
    line = Line("is the model's path; vLLM serves it as 'smollm2'", "--model smollm2")
    await check(stack.cache, replace(targets_of(stack), model=stack.model_name), {"engine/model": line})


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"num_hidden_layers": 31}, "round trip/retrieve", "but the geometry gives"),
        ({"head_dim": 32, "num_key_value_heads": 6}, "round trip/layout", "keys of equal tokens differ by"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "round trip/layout", "differ by"),
    ],
    ids=["layers", "heads", "theta"],
)
async def test_a_configuration_of_another_model_has_its_own_line(
    stack: RealStack, tmp_path: Path, changes: dict[str, Any], path: str, words: str
) -> None:
    config = json.loads((stack.engine.model_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    targets = replace(targets_of(stack), model_path=str(tmp_path))
    await check(stack.cache, targets, {path: Line(words, "--model-path")})


@pytest.fixture(scope="module")
def bare_cache(installed: Path, logs: Path) -> Iterator[CacheServer]:
    """LMCache as it starts without further options."""
    with lmcache_server(installed, logs, shared_memory=False, takes_clients=False) as cache:
        yield cache


@pytest.fixture(scope="module")
def lonely_cache(installed: Path, logs: Path) -> Iterator[CacheServer]:
    """LMCache that no engine is connected to, without shared memory."""
    with lmcache_server(installed, logs, shared_memory=False) as cache:
        yield cache


async def test_lmcache_without_auto(stack: RealStack, bare_cache: CacheServer) -> None:
    targets = replace(targets_of(stack), cache_url=bare_cache.url, http_url=bare_cache.http_url)
    lines = {
        "cache HTTP/transfer mode": Line("is 'lmcache_driven'", "--supported-transfer-mode auto"),
        "model/registered": Line("no engine is connected to this LMCache", "LMCacheMPConnector"),
    }
    await check(bare_cache, targets, lines)


async def test_lmcache_without_shared_memory_and_engine(stack: RealStack, lonely_cache: CacheServer) -> None:
    targets = replace(targets_of(stack), cache_url=lonely_cache.url, http_url=lonely_cache.http_url)
    lines = {
        "cache ZeroMQ/data plane": Line("without a pool name", "--shm-name", Status.WARNING),
        "model/registered": Line("no engine is connected to this LMCache", "LMCacheMPConnector"),
    }
    await check(lonely_cache, targets, lines)


async def test_the_addresses_of_two_lmcache_servers(stack: RealStack, lonely_cache: CacheServer) -> None:
    targets = replace(targets_of(stack), cache_url=lonely_cache.url)
    line = Line("are different LMCache servers", "of one `lmcache server`")
    await check(stack.cache, targets, {"cache ZeroMQ/same server": line})


@pytest.fixture(scope="module")
def bare_engine(installed: Path, logs: Path) -> Iterator[Engine]:
    """vLLM of the same model, without LMCache and without the flag for cached tokens."""
    with vllm_server(installed, logs, None) as engine:
        yield engine


async def test_vllm_without_lmcache(stack: RealStack, bare_engine: Engine) -> None:
    """Its model is registered, by the other engine, so that only the missing KV tells."""
    targets = replace(targets_of(stack), engine_url=bare_engine.url)
    lines = {
        "engine/cached tokens": Line(
            "does not report cached tokens", "--enable-prompt-tokens-details", Status.WARNING
        ),
        "round trip/offload": Line("vLLM answered, but nothing of the prompt is in LMCache", "LMCacheMPConn"),
    }
    await check(stack.cache, targets, lines, offload=3)
