"""The server of ``sse.py``: plays streams as vLLM sends them, one event a token, to all of them in step."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["MODEL", "PROMPT", "Settings", "add_arguments", "command_of", "settings_of"]

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add those that settings are made of."""
    add = parser.add_argument
    add("--streams", type=int, default=32, help="streams at once (default: %(default)s)")
    add("--tokens", type=int, default=2000, help="tokens of each (default: %(default)s)")
    add("--rounds", type=int, default=5, help="turns of each client (default: %(default)s)")
    add("--step-ms", type=float, default=10.0, help="pace of a step (default: %(default)s)")


def settings_of(given: argparse.Namespace) -> Settings:
    """Return the settings that the arguments make."""
    return Settings(given.streams, given.tokens, given.rounds, given.step_ms)


def command_of(settings: Settings) -> list[str]:
    """Return the command that runs this server in a process of its own."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(settings).items()]
    return [sys.executable, __file__, *arguments]


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    asyncio.run(serve(settings_of(parser.parse_args())))
