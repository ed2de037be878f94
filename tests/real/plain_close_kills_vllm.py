"""Show what the draining of ``VLLMCompletions`` is for: close connections plainly until vLLM is dead.

    python -m tests.real.plain_close_kills_vllm

Starts a stack of its own and cancels passes whose 3,000-token prefix is cached, at random points within
the first 150 ms, with a client that closes its connection at once. With vLLM 0.32.0 and LMCache 0.5.6 an
AssertionError ends the engine after some tens of them (LMCache#4938). Not a test: it shows a fault of
others, which may be mended any day.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

from .conftest import long_prompt
from .install_stack import default_folder
from .stack import Engine, lmcache_server, vllm_server

_MOST = 300


async def close_until_dead(engine: Engine) -> int | None:
    """Return the number of the close after which the engine no longer answered, None if it lived."""
    chance = random.Random(0)
    prompt = (long_prompt(16000) * 2)[:3000]

    async def run(session: aiohttp.ClientSession, extra: int) -> None:
        body: dict[str, Any] = {"prompt": [*prompt, extra], "model": engine.model, "stream": True}
        async with session.post(f"{engine.url}/v1/completions", json=body) as answer:
            await answer.read()

    async with aiohttp.ClientSession() as session:
        await run(session, 5)
        for number in range(1, _MOST + 1):
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(chance.uniform(0.0, 0.15)):
                    await run(session, 10 + number)
            if not await asyncio.to_thread(lambda: engine.is_alive):
                return number
    return None


def main() -> None:
    folder = default_folder()
    with (
        tempfile.TemporaryDirectory() as logs,
        lmcache_server(folder, Path(logs)) as cache,
        vllm_server(folder, Path(logs), cache) as engine,
    ):
        number = asyncio.run(close_until_dead(engine))
    outcome = f"died at close {number}" if number else f"survived {_MOST} closes"
    print(f"vLLM {outcome}")


if __name__ == "__main__":
    main()
