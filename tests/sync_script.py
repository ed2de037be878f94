"""Programs that tests run as processes of their own: ``python -m tests.sync_script NAME URL HTTP_URL``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import torch

import lmcache_stream as lms
from lmcache_stream import sync

GEOMETRY = lms.KVGeometry(
    num_layers=2, num_kv_heads=2, head_size=8, dtype=torch.float32, layout="two-plane", block_size=4
)


def say(line: str) -> None:
    """Print a line at once and whole: `print` writes its end apart, and two threads print here."""
    os.write(1, f"{line}\n".encode())


def connect() -> sync.LMCacheContext:
    url, http_url = sys.argv[2:4]
    return sync.connect(url, http_url, "model", geometry=GEOMETRY)


def endless(prompt: Sequence[int], params: Mapping[str, Any], salt: str) -> Iterator[lms.TokenEvent]:
    try:
        while True:
            time.sleep(0.02)
            yield lms.TokenEvent(1, "x")
    finally:
        say("generator closed")


def interrupted(context: sync.LMCacheContext) -> None:
    """Print "ready", be interrupted in mid-pass, and go on using everything."""
    stream = sync.create_request(context, endless, [1, 2, 3, 4, 5])
    try:
        with stream.open_generation({"max_tokens": 10**6}) as generation:
            for count, _ in enumerate(generation):
                if count == 2:
                    say("ready")
    except KeyboardInterrupt:
        say("interrupted")
    stream.modify_kv  # noqa: B018 - the stream is still there
    say(f"lookup {context.lookup([1, 2, 3, 4])}")


def batch(context: sync.LMCacheContext) -> None:
    """Print "ready" once every stream of a batch decodes, be interrupted, and go on using everything."""
    decoding = closed = 0

    async def endless_too(*_: Any) -> AsyncIterator[lms.TokenEvent]:
        nonlocal decoding, closed
        try:
            yield lms.TokenEvent(1, "x")
            decoding += 1
            if decoding == 3:
                say("ready")
            while True:
                await asyncio.sleep(0.01)
                yield lms.TokenEvent(1, "x")
        finally:
            closed += 1
            if closed == 3:
                say("closed 3")

    streams = sync.LMCacheBatchedStream()
    for number in range(3):
        streams.add(sync.create_request(context, endless_too, [number, 2, 3, 4, 5]))
    try:
        streams.run_streams({"max_tokens": 10**6})
    except KeyboardInterrupt:
        say("interrupted")
    say(f"{streams.get_perf_metrics('decode').streams} outcomes")
    say(f"lookup {context.lookup([1, 2, 3, 4])}")


def blocked(context: sync.LMCacheContext) -> None:
    """Print "ready" and be interrupted in a lookup that the server never answers."""
    say("ready")
    started = time.monotonic()
    try:
        context.lookup([1, 2, 3, 4])
    except KeyboardInterrupt:
        say(f"interrupted {time.monotonic() - started:.3f}")


def forgotten(context: sync.LMCacheContext) -> None:
    """Print "ready", wait for the server to be gone, and exit without closing anything."""
    context.store(torch.zeros(GEOMETRY.kv_shape(4)), [1, 2, 3, 4])
    say("ready")
    sys.stdin.readline()
    say("exit")


def forked(context: sync.LMCacheContext) -> None:
    """Use the context before and after a fork, in the parent and in the child."""
    context.lookup([1, 2, 3, 4])
    child = os.fork()
    if child == 0:
        try:
            context.lookup([1, 2, 3, 4])
        except lms.ClosedError as error:
            say(f"child: {error}")
        with connect() as own:
            say(f"child's own: {own.lookup([1, 2, 3, 4])}")
        os._exit(0)
    os.waitpid(child, 0)
    say(f"parent: {context.lookup([1, 2, 3, 4])}")


if __name__ == "__main__":
    # A run in the background of a shell hands down an interrupt that is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    program = globals()[sys.argv[1]]
    opened = connect()
    program(opened)
    if sys.argv[1] != "forgotten":
        opened.close()
