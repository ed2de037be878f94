"""The HTTP side: every way in which a server can be the wrong one has an error that names URL and remedy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import zmq
from aioresponses import aioresponses

from lmcache_stream.cache.http import CacheHTTP
from lmcache_stream.errors import CacheConnectError, CacheError, CacheTimeoutError, ClosedError

URL = "http://cache.example:8080"


@pytest.fixture
async def http() -> AsyncIterator[CacheHTTP]:
    opened = CacheHTTP(URL, deadline=10)
    yield opened
    await opened.aclose()


async def test_the_status_is_what_the_server_answers(http: CacheHTTP) -> None:
    status = {"is_healthy": True, "cache_context_meta": {"7": {"model_name": "m"}}}
    with aioresponses() as answers:
        answers.get(f"{URL}/status", payload=status)
        assert await http.status() == status


async def test_the_configuration_is_its_multiprocess_section(http: CacheHTTP) -> None:
    with aioresponses() as answers:
        answers.get(f"{URL}/config", payload={"mp": {"chunk_size": 256}, "other": {}})
        assert await http.config() == {"chunk_size": 256}


async def test_an_older_server_has_its_configuration_elsewhere(http: CacheHTTP) -> None:
    with aioresponses() as answers:
        answers.get(f"{URL}/config", status=404, body="Not Found")
        answers.get(f"{URL}/conf", payload={"mp": {"chunk_size": 256}})
        assert await http.config() == {"chunk_size": 256}


async def test_only_a_missing_page_leads_to_the_older_one(http: CacheHTTP) -> None:
    with aioresponses() as answers:
        answers.get(f"{URL}/config", status=500, body="boom")
        answers.get(f"{URL}/conf", payload={"mp": {"chunk_size": 256}})
        with pytest.raises(CacheError, match="HTTP 500: 'boom'"):
            await http.config()


Read = Callable[[CacheHTTP], Awaitable[Any]]


def read_status(http: CacheHTTP) -> Awaitable[Any]:
    return http.status()


def read_config(http: CacheHTTP) -> Awaitable[Any]:
    return http.config()


HTML = "<!DOCTYPE html><html><head><title>Grafana</title></head><body>" + "x" * 5000


@pytest.mark.parametrize(
    ("read", "path", "answer", "reason"),
    [
        (read_status, "/status", {"body": HTML}, r"no JSON but '<!DOCTYPE html>.*--http-port"),
        (read_status, "/status", {"body": ""}, r"no JSON but ''.*--http-port"),
        (read_status, "/status", {"body": b"\xff\xfe\x00"}, "no JSON.*--http-port"),
        (read_status, "/status", {"body": "[" * 200_000}, "no JSON.*--http-port"),
        (read_status, "/status", {"status": 500, "body": "boom"}, "HTTP 500: 'boom'.*--http-port"),
        (read_status, "/status", {"status": 503, "body": HTML}, "HTTP 503: '<!DOCTYPE.*--http-port"),
        (read_status, "/status", {"status": 404, "body": "Not Found"}, "HTTP 404.*--http-port"),
        (read_status, "/status", {"status": 401, "body": "who?"}, "HTTP 401.*--http-port"),
        (read_status, "/status", {"body": "[1, 2]"}, "JSON object.*--http-port"),
        (read_status, "/status", {"body": "null"}, "JSON object.*--http-port"),
        (read_config, "/config", {"body": HTML}, "no JSON.*--http-port"),
        (read_config, "/config", {"body": "[1, 2]"}, "no section `mp`.*multiprocess"),
        (read_config, "/config", {"body": "{}"}, "no section `mp`.*multiprocess"),
        (read_config, "/config", {"body": '{"mp": null}'}, "no section `mp`.*multiprocess"),
        (read_config, "/config", {"body": '{"mp": [1]}'}, "no section `mp`.*multiprocess"),
    ],
)
async def test_another_answer_is_an_error_that_names_url_and_remedy(
    http: CacheHTTP, read: Read, path: str, answer: dict[str, Any], reason: str
) -> None:
    with aioresponses() as answers:
        answers.get(URL + path, **answer)
        with pytest.raises(CacheError, match=reason) as caught:
            await read(http)
    assert URL + path in str(caught.value)
    assert not isinstance(caught.value, CacheConnectError)
    # An excerpt, not the page.
    assert len(str(caught.value)) < 300


async def test_where_both_pages_are_missing_the_older_one_is_named(http: CacheHTTP) -> None:
    with aioresponses() as answers:
        answers.get(f"{URL}/config", status=404)
        answers.get(f"{URL}/conf", status=404)
        with pytest.raises(CacheError, match=f"GET {URL}/conf: HTTP 404"):
            await http.config()


@contextlib.asynccontextmanager
async def serving(answer: bytes | None, *, held: float = 0) -> AsyncIterator[str]:
    """A port that answers every connection with these bytes, or holds it and says nothing."""
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await reader.readuntil(b"\r\n\r\n")
            if answer is None:
                await asyncio.sleep(60)
            else:
                writer.write(answer)
                await writer.drain()
                await asyncio.sleep(held)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in connections:
            task.cancel()
        if connections:
            await asyncio.wait(connections)


async def failure_of(url: str, *, deadline: float = 0.3) -> CacheError:
    http = CacheHTTP(url, deadline=deadline)
    began = time.monotonic()
    try:
        with pytest.raises(CacheError) as caught:
            await http.status()
    finally:
        await http.aclose()
    assert time.monotonic() - began < 10
    assert f"{url}/status" in str(caught.value)
    assert "--http-port" in str(caught.value)
    return caught.value


async def test_a_refused_connection_is_told_apart() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    error = await failure_of(f"http://127.0.0.1:{port}")
    assert isinstance(error, CacheConnectError)
    assert "Is `lmcache server` running" in str(error)


async def test_a_host_that_does_not_exist_is_told_apart() -> None:
    error = await failure_of("http://no-such-host.invalid:80", deadline=5)
    assert isinstance(error, CacheConnectError | CacheTimeoutError)


async def test_a_server_that_accepts_and_says_nothing_is_a_timeout() -> None:
    async with serving(None) as url:
        error = await failure_of(url)
    assert isinstance(error, CacheTimeoutError)
    assert isinstance(error, TimeoutError)
    assert "0.3 s" in str(error)


async def test_a_server_that_stops_in_mid_answer_is_a_timeout() -> None:
    async with serving(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", held=60) as url:
        error = await failure_of(url)
    assert isinstance(error, CacheTimeoutError)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 302 Found\r\nLocation: /status\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: ftp://else.where/\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
    ],
)
async def test_what_is_no_answer_is_a_broken_connection(answer: bytes) -> None:
    async with serving(answer) as url:
        error = await failure_of(url, deadline=2)
    assert isinstance(error, CacheConnectError)
    assert "not of --port" in str(error)


async def test_the_zeromq_port_is_told_apart() -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    error = await failure_of(f"http://127.0.0.1:{port}")
    assert isinstance(error, CacheConnectError)
    assert "not of --port" in str(error)
    router.close(linger=0)
    context.term()


async def test_a_long_answer_is_read_whole() -> None:
    status = {"registered": list(range(200_000))}
    body = json.dumps(status).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n"
    async with serving(head.encode() + body) as url:
        http = CacheHTTP(url, deadline=5)
        assert await http.status() == status
        await http.aclose()


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
async def test_proxies_of_the_environment_are_not_used_for_this_machine(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # A proxy that answers nothing: the request would not come back.
    async with serving(None) as proxy, serving(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as url:
        monkeypatch.setenv(name, proxy)
        for host in (url, url.replace("127.0.0.1", "localhost")):
            http = CacheHTTP(host, deadline=5)
            assert await http.status() == {}
            await http.aclose()


async def test_proxies_of_the_environment_are_used_for_other_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"proxy": "!"}') as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        http = CacheHTTP("http://cache.invalid:8080", deadline=5)
        assert await http.status() == {"proxy": "!"}
        await http.aclose()


async def test_closing_twice_is_closing_once_and_then_it_says_so() -> None:
    http = CacheHTTP(URL, deadline=10)
    await http.aclose()
    await http.aclose()
    with pytest.raises(ClosedError, match=URL):
        await http.status()
