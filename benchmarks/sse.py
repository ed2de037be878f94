"""What it costs a client to read tokens: CPU time per token, and tokens a second, of four clients.

A server in a process of its own plays streams as vLLM sends them: one event a token, each event one
HTTP chunk and one write to its socket. It waits until all streams are there and then goes step by
step, as an engine does: one event to every stream, then the next.

- ``paced``: a step every ``--step-ms``, as from an engine that decodes. Events are read one by one.
- ``full speed``: the next step at once, as far as the sockets take it. Reads hold many events.

The clients: ``VLLMCompletions``; httpx with ``json.loads`` for each line, which is the loop of LMCache's
example; the openai client; and a bare asyncio protocol that drops the bytes, which is the least that this
machine needs for them. They take turns. A ratio is the median of those of the rounds, with the
least and the greatest; other figures are medians over the rounds. CPU time is the client process's own
(``time.process_time``), all of it from the first connection to the last token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import openai

from lmcache_stream import TokenEvent, VLLMCompletions

MODEL = "m"
PROMPT = list(range(1000, 1512))


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        streams: how many run at once.
        tokens: tokens of each.
        rounds: how often each client takes its turn, in each mode.
        step_ms: time between two steps of the paced mode, in milliseconds.
    """

    streams: int
    tokens: int
    rounds: int
    step_ms: float


@dataclass(frozen=True)
class Figure:
    """One client in one mode.

    Attributes:
        cpu_us: CPU time per token in microseconds.
        tokens_per_s: tokens received a second, over all streams.
    """

    cpu_us: float
    tokens_per_s: float


def rendered(tokens: int) -> list[bytes]:
    """Return the HTTP chunks of one answer, in the shape that vLLM 0.32 sends."""
    common = {"id": "cmpl-ab612305f5796ce4", "object": "text_completion", "created": 1795970412}
    chunks: list[dict[str, Any]] = []
    for number in range(tokens):
        choice = {
            "index": 0,
            "text": f" w{number % 997}",
            "logprobs": None,
            "finish_reason": "length" if number == tokens - 1 else None,
            "stop_reason": None,
            "prompt_token_ids": PROMPT if number == 0 else None,
            "token_ids": [number],
        }
        chunks.append({**common, "model": MODEL, "choices": [choice]})
    usage = {"prompt_tokens": len(PROMPT), "total_tokens": len(PROMPT) + tokens, "completion_tokens": tokens}
    chunks.append({**common, "model": MODEL, "choices": [], "usage": usage})
    events = [b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n" for chunk in chunks]
    return [b"%x\r\n%s\r\n" % (len(event), event) for event in [*events, b"data: [DONE]\n\n"]]


async def serve(settings: Settings) -> None:
    """Play streams until the standard input is closed; the port is the first line of the output."""
    chunks = rendered(settings.tokens)
    waiting: list[tuple[asyncio.StreamWriter, asyncio.Future[None]]] = []
    loop = asyncio.get_running_loop()

    async def play(paced: bool) -> None:
        group = waiting[:]
        waiting.clear()
        for writer, _ in group:
            writer.write(
                b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
        due = loop.time()
        for chunk in chunks:
            for writer, _ in group:
                writer.write(chunk)
            if paced:
                due += settings.step_ms / 1000
                await asyncio.sleep(max(0.0, due - loop.time()))
            else:
                for writer, _ in group:
                    await writer.drain()
                await asyncio.sleep(0)
        for writer, played in group:
            writer.write(b"0\r\n\r\n")
            played.set_result(None)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
                played = loop.create_future()
                waiting.append((writer, played))
                if len(waiting) == settings.streams:
                    playing.append(loop.create_task(play(paced=b" /paced/" in head)))
                await played
        writer.close()

    playing: list[asyncio.Task[None]] = []
    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=2**24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


Client = Callable[[str, Settings], Coroutine[Any, Any, int]]


async def lmcache_stream(url: str, settings: Settings) -> int:
    """Read all streams with this library."""
    async with VLLMCompletions(url, MODEL) as completions:

        async def one() -> int:
            total = 0
            async for event in completions(PROMPT, {"max_tokens": settings.tokens}, ""):
                if isinstance(event, TokenEvent):
                    total += event.token_id
            return total

        return await together(one, settings)


async def httpx_and_json(url: str, settings: Settings) -> int:
    """Read all streams with httpx and json, in the obvious loop."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": settings.tokens, "stream": True}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:

        async def one() -> int:
            total = 0
            async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        break
                    for choice in json.loads(data)["choices"]:
                        total += sum(choice["token_ids"])
            return total

        return await together(one, settings)


async def openai_client(url: str, settings: Settings) -> int:
    """Read all streams with the openai client."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=None) as client:

        async def one() -> int:
            total = 0
            stream = await client.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=settings.tokens, stream=True
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    total += sum((choice.model_extra or {})["token_ids"])
            return total

        return await together(one, settings)


async def bytes_alone(url: str, settings: Settings) -> int:
    """Read the bytes of all streams and look at none."""
    address, _, path = url.removeprefix("http://").partition("/")
    host, _, port = address.partition(":")
    body = json.dumps({"model": MODEL, "prompt": PROMPT}).encode()
    request = f"POST /{path}/v1/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    class Drain(asyncio.Protocol):
        def __init__(self) -> None:
            self.done = asyncio.get_running_loop().create_future()

        def data_received(self, data: bytes) -> None:
            if data.endswith(b"0\r\n\r\n"):
                self.done.set_result(None)

    async def one() -> int:
        transport, protocol = await asyncio.get_running_loop().create_connection(Drain, host, int(port))
        assert isinstance(transport, asyncio.Transport)
        transport.write(request)
        await protocol.done
        transport.close()
        return sum(range(settings.tokens))

    return await together(one, settings)


async def together(one: Callable[[], Awaitable[int]], settings: Settings) -> int:
    """Run ``one`` for every stream and return the sum of all ids."""

    async def run() -> int:
        return await one()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run()) for _ in range(settings.streams)]
    return sum(task.result() for task in tasks)


OURS = "lmcache_stream"
CLIENTS: dict[str, Client] = {
    OURS: lmcache_stream,
    "httpx + json": httpx_and_json,
    "openai client": openai_client,
    "bytes alone": bytes_alone,
}


@contextlib.contextmanager
def server(settings: Settings) -> Iterator[str]:
    """Run the server in a process of its own and give its address."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(settings).items()]
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()


def measure(client: Client, url: str, settings: Settings) -> Figure:
    """Let ``client`` read all streams once."""
    number = settings.streams * settings.tokens
    expected = settings.streams * sum(range(settings.tokens))
    cpu, wall = time.process_time(), time.perf_counter()
    total = asyncio.run(client(url, settings))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    if total != expected:
        raise SystemExit(f"{client.__name__} read other tokens than were sent")
    return Figure(cpu_us=cpu / number * 1e6, tokens_per_s=number / wall)


def run(settings: Settings) -> dict[str, dict[str, list[Figure]]]:
    """Measure every client in both modes, turn by turn."""
    figures: dict[str, dict[str, list[Figure]]] = {}
    with server(settings) as url:
        for client in CLIENTS.values():
            # What a client does once, such as late imports, is not what is measured.
            measure(client, f"{url}/full", settings)
        for mode, path in (("paced", "/paced"), ("full speed", "/full")):
            figures[mode] = {name: [] for name in CLIENTS}
            for _ in range(settings.rounds):
                for name, client in CLIENTS.items():
                    figures[mode][name].append(measure(client, url + path, settings))
    return figures


def median(figures: list[Figure]) -> Figure:
    """Return the medians of ``figures``."""
    return Figure(
        cpu_us=statistics.median(one.cpu_us for one in figures),
        tokens_per_s=statistics.median(one.tokens_per_s for one in figures),
    )


def ratios(figures: dict[str, list[Figure]]) -> dict[str, list[float]]:
    """Return this library's CPU time per token as a part of each other client's, round by round."""
    return {
        name: [ours.cpu_us / theirs.cpu_us for ours, theirs in zip(figures[OURS], of, strict=True)]
        for name, of in figures.items()
        if name != OURS
    }


def environment() -> dict[str, str]:
    """Return what the figures depend on."""
    packages = {name: version(name) for name in ("aiohttp", "msgspec", "httpx", "openai")}
    return {"python": platform.python_version(), "machine": platform.machine(), **packages}


def report(settings: Settings, figures: dict[str, dict[str, list[Figure]]]) -> None:
    """Print ratios first, then what they are made of."""
    for mode, of in figures.items():
        parts = [
            f"{statistics.median(each):.3f} of {name} ({min(each):.3f} to {max(each):.3f})"
            for name, each in ratios(of).items()
        ]
        print(f"{mode}, CPU per token: {', '.join(parts)}")
    for mode, of in figures.items():
        print(f"\n{mode:24}{'CPU us/token':>14}{'tokens/s':>12}")
        for name, one in of.items():
            middle = median(one)
            print(f"{name:24}{middle.cpu_us:14.1f}{middle.tokens_per_s:12.0f}")
    print(f"\n{asdict(settings)}\n{environment()}")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32, help="streams at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each client (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="pace of a step (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON with the figures of every round")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    settings = Settings(options.streams, options.tokens, options.rounds, options.step_ms)
    if options.serve:
        asyncio.run(serve(settings))
        return
    figures = run(settings)
    if options.json:
        result = {
            mode: {
                "ratios": ratios(of),
                "median": {name: asdict(median(one)) for name, one in of.items()},
                "rounds": {name: [asdict(figure) for figure in one] for name, one in of.items()},
            }
            for mode, of in figures.items()
        }
        print(json.dumps({"settings": asdict(settings), "environment": environment(), "modes": result}))
    else:
        report(settings, figures)


if __name__ == "__main__":
    main()
