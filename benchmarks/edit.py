"""Dropping half of many prompts' KV on a real LMCache server: this library beside ``lmcache.sdk``.

    python tests/real/install_stack.py  # a real LMCache server, once
    python benchmarks/edit.py --streams 12 --tokens 1024 --rounds 5

Qwen3-8B-shaped bfloat16 KV (36 layers, 8 KV heads of 128), chunks of 256 tokens, shared memory. From
each prompt the middle half is dropped, and what is behind it is rotated to its new positions; each side
retrieves, edits, stores and confirms all streams at once. The sdk leaves the edit to a function: it runs
once with the procedure of LMCache's examples (two rotations of every key, in bfloat16), and once with the
least work that we know (one rotation of what moves); see ``edit_sdk.py``. GB/s count the prompts' KV
(10^9 bytes). Every round has new prompts and both sides in turn, and beside them a plain copy of as many
bytes. Ratios come first: seconds depend on the machine, ratios less so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import torch

import lmcache_stream as lms
from lmcache_stream.rope import RopeConfig, rotate_keys

MODEL = "benchmark"
THETA = 1e6
SHAPE = lms.KVGeometry(
    num_layers=36, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, layout="two-plane", block_size=16
)
ROPE = RopeConfig(
    head_size=SHAPE.head_size,
    inv_freq=tuple(THETA ** (-i / SHAPE.head_size) for i in range(0, SHAPE.head_size, 2)),
    pairing="half",
)
WORDS = 500
OURS = "lmcache_stream"
THEIRS = {"lmcache_sdk": "two_rotations", "lmcache_sdk_with_one_rotation": "one_rotation"}


@contextmanager
def lmcache_server(python: Path, size_gb: float, chunk_size: int) -> Iterator[tuple[str, str]]:
    """Run a real server on free loopback ports and yield its URLs."""
    port, http_port = _free_port(), _free_port()
    command = [
        *(str(python.parent / "lmcache"), "server", "--host", "127.0.0.1", "--http-host", "127.0.0.1"),
        *("--port", str(port), "--http-port", str(http_port), "--chunk-size", str(chunk_size)),
        *("--l1-size-gb", str(size_gb), "--eviction-policy", "LRU", "--no-l1-use-lazy"),
        *("--supported-transfer-mode", "auto", "--shm-name", f"lmcs{secrets.token_hex(4)}"),
    ]
    quiet = {**os.environ, "DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false"}
    http_url = f"http://127.0.0.1:{http_port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=quiet, stdout=log, stderr=subprocess.STDOUT)
        try:
            for _ in range(240):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{http_url}/healthcheck", timeout=2).close()
                    break
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"the LMCache server ended:\n{log.read()[-2000:].decode()}")
                time.sleep(0.25)
            else:
                raise SystemExit(f"no LMCache server at {http_url} within a minute")
            yield f"tcp://127.0.0.1:{port}", http_url
        finally:
            process.terminate()
            process.wait(30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def sdk(python: Path, url: str, http_url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the peer and yield its process, once it is connected."""
    shape = {
        "num_layers": SHAPE.num_layers,
        "num_kv_heads": SHAPE.num_kv_heads,
        "head_size": SHAPE.head_size,
        "block_size": SHAPE.block_size,
        "dtype": "bfloat16",
        "theta": THETA,
    }
    peer = Path(__file__).with_name("edit_sdk.py")
    quiet = {**os.environ, "DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(str(python), str(peer), url, http_url, MODEL, json.dumps(shape)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=quiet,
            limit=1 << 24,
        )
        try:
            if await answer(process) != "ready":
                raise SystemExit("lmcache.sdk did not get ready")
            yield process
        except EOFError:
            log.seek(0)
            raise SystemExit(f"lmcache.sdk ended:\n{log.read()[-3000:].decode()}") from None
        finally:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                await asyncio.wait_for(process.wait(), 20)
            if process.returncode is None:
                process.kill()


async def answer(process: asyncio.subprocess.Process) -> Any:
    """Return the next line of JSON; the peer's libraries print other lines too."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        with contextlib.suppress(ValueError):
            return json.loads(line)
    raise EOFError


class Prompts:
    """Makes prompts and KV whose layer 0 is what a RoPE decoder would hold for them."""

    def __init__(self, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._chance = random.Random(0)
        self._words = torch.randn(WORDS, SHAPE.hidden_size, generator=generator)
        self._kv = torch.randn(SHAPE.kv_shape(tokens), generator=generator).to(SHAPE.dtype)

    def make(self) -> tuple[list[int], torch.Tensor]:
        """Return a new prompt and its KV; the layers above 0 are always the same random numbers."""
        length = self._kv.shape[2]
        tokens = [self._chance.randrange(WORDS) for _ in range(length)]
        self._kv[0, 0] = rotate_keys(self._words[tokens], [0] * length, range(length), ROPE)
        return tokens, self._kv


async def ours(context: lms.AsyncLMCacheContext, prompts: list[list[int]]) -> tuple[float, list[Any]]:
    """Edit all prompts at once; return the seconds and the streams."""

    async def no_engine(*_: object) -> AsyncIterator[lms.TokenEvent | lms.FinishEvent]:
        events: tuple[lms.FinishEvent, ...] = ()
        for event in events:
            yield event

    length = len(prompts[0])
    kept = lms.keep([*range(length // 4), *range(length - length // 4, length)])
    streams = [lms.create_request(context, no_engine, tokens) for tokens in prompts]
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(stream.modify_kv(kept))
    return time.perf_counter() - started, streams


async def theirs(process: asyncio.subprocess.Process, edit: str, prompts: list[list[int]]) -> float:
    """Let the peer edit all prompts at once, in one of its two ways; return its seconds."""
    assert process.stdin is not None
    process.stdin.write(json.dumps([edit, prompts]).encode() + b"\n")
    return float(await answer(process))


def plain_copy(kv: torch.Tensor, times: int) -> float:
    """Return the seconds of copying ``kv`` so often into memory that was written before."""
    target = kv.clone()
    started = time.perf_counter()
    for _ in range(times):
        target.copy_(kv)
    return time.perf_counter() - started


def clear(http_url: str) -> None:
    """Empty the server, so that every round finds the same room."""
    body = json.dumps({"tier": "l1", "force": False}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{http_url}/cache/clear", data=body, headers=headers)
    urllib.request.urlopen(request, timeout=30).close()


async def measure(python: Path, streams: int, tokens: int, rounds: int, chunk_size: int) -> dict[str, Any]:
    """Return rates in GB/s, medians over the rounds, and their ratios."""
    prefix_bytes = streams * tokens * SHAPE.bytes_per_token
    rates: dict[str, list[float]] = {name: [] for name in (OURS, *THEIRS, "plain_copy")}
    made = Prompts(tokens)
    size_gb = max(1.0, 2.2 * prefix_bytes / 1e9)
    with lmcache_server(python, size_gb, chunk_size) as (url, http_url):
        async with (
            sdk(python, url, http_url) as process,
            lms.connect(url, http_url, MODEL, geometry=SHAPE, rope=ROPE) as context,
        ):
            for number in range(rounds + 1):
                sides = (OURS, *THEIRS)
                for side in sides if number % 2 else sides[::-1]:
                    prompts = []
                    for _ in range(streams):
                        ids, kv = made.make()
                        if not await context.store(kv, ids):
                            raise SystemExit("the server has no room for the prompts")
                        prompts.append(ids)
                    if side == OURS:
                        seconds, edited = await ours(context, prompts)
                        await check(context, edited[0], prompts[0])
                    else:
                        seconds = await theirs(process, THEIRS[side], prompts)
                    # The first round warms up: pages, connections, threads.
                    if number:
                        rates[side].append(prefix_bytes / seconds / 1e9)
                    clear(http_url)
                if number:
                    rates["plain_copy"].append(prefix_bytes / plain_copy(kv, streams) / 1e9)
                print(f"round {number} of {rounds}", file=sys.stderr)
    middle = {name: statistics.median(found) for name, found in rates.items()}
    return {
        **{f"ratio_to_{name}": middle[OURS] / middle[name] for name in (*THEIRS, "plain_copy")},
        "gb_per_second": middle,
        "least_and_greatest": {name: [min(found), max(found)] for name, found in rates.items()},
        "streams": streams,
        "tokens": tokens,
        "chunk_size": chunk_size,
        "rounds": rounds,
        "cores": os.cpu_count(),
    }


async def check(context: lms.AsyncLMCacheContext, stream: Any, prompt: list[int]) -> None:
    """Hold one edit against the same edit of a private copy, bit for bit.

    Raises:
        SystemExit: they differ, so that the figures are of something else.
    """
    length = len(prompt)
    kept = [*range(length // 4), *range(length - length // 4, length)]
    found = await context.retrieve(stream.tokens, stream.cache_salt)
    whole = await context.retrieve(prompt)
    if found is None or whole is None:
        raise SystemExit("the prompt or its edit is no longer in the cache")
    wanted = whole[:, :, kept]
    rotate_keys(whole[0], kept, range(len(kept)), ROPE, select=torch.tensor(kept), out=wanted[0])
    if not torch.equal(found, wanted):
        raise SystemExit("the edit is not bit for bit that of a private copy")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    home = Path(os.environ.get("LMCACHE_STREAM_REAL_STACK", Path.home() / ".cache/lmcache-stream/real-stack"))
    parser.add_argument("--python", type=Path, default=home / "venv/bin/python", help="one with lmcache")
    parser.add_argument("--streams", type=int, default=12, help="prompts of a batch (default: 12)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a prompt (default: 1024)")
    parser.add_argument("--rounds", type=int, default=5, help="batches a side (default: 5)")
    parser.add_argument("--chunk-size", type=int, default=256, help="of the server (default: 256)")
    given = parser.parse_args()
    if not given.python.exists():
        parser.error(f"--python: there is no {given.python}; run `python tests/real/install_stack.py` first")
    if given.tokens % (4 * given.chunk_size):
        parser.error("--tokens must be a multiple of four chunks, so that all that is kept is whole chunks")
    if min(given.streams, given.tokens, given.rounds) < 1:
        parser.error("--streams, --tokens and --rounds must be positive")
    try:
        found = asyncio.run(
            measure(given.python, given.streams, given.tokens, given.rounds, given.chunk_size)
        )
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
