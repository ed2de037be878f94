"""An embedded stack for the command line's tests, and what starts commands."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from lmcache_stream.embedded.sync import EmbeddedStack

from ..tiny_model import write_tiny_llama
from .processes import Command, forking

Start = Callable[..., Command]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def stack(tiny: Path) -> Iterator[EmbeddedStack]:
    with EmbeddedStack(str(tiny), chunk_size=16, cache_gb=0.05) as running:
        yield running


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a command in a process."""
    commands: list[Command] = []
    with forking() as context:

        def begin(*arguments: str, file: str | None = None) -> Command:
            errors = tmp_path / f"stderr-{len(commands)}"
            errors.touch()
            commands.append(Command(context, arguments, errors, file))
            return commands[-1]

        yield begin
    for command in commands:
        command.close()


def write_prompts(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of an output, each of which must be whole."""
    content = path.read_bytes()
    assert content == b"" or content.endswith(b"\n")
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


def where(stack: EmbeddedStack) -> list[str]:
    named = ["--engine-url", stack.engine_url, "--cache-url", stack.url, "--http-url", stack.http_url]
    return [*named, "--model", stack.model_name]


def files(folder: Path) -> list[str]:
    return ["--prompts", str(folder / "prompts.jsonl"), "--output", str(folder / "out.jsonl")]


@pytest.fixture
def silent_engine(stack: EmbeddedStack, tmp_path: Path) -> Iterator[str]:
    """An engine that takes every request and answers none; it writes a line to ``asked`` for each."""
    card = {"id": stack.model_name, "root": stack.model_name, "max_model_len": 100}

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [card]})

    async def hold(_: web.Request) -> web.Response:
        with (tmp_path / "asked").open("a") as asked:
            asked.write("\n")
        await asyncio.sleep(60)
        raise AssertionError("it waits for ever")

    ready: Future[str] = Future()
    stop = threading.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/completions", hold)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ready.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}")
        while not stop.is_set():
            await asyncio.sleep(0.01)
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="silent engine")
    thread.start()
    yield ready.result(10)
    stop.set()
    thread.join(10)
