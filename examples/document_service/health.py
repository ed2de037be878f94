"""Whether engine and cache can be reached."""

from __future__ import annotations

import anyio
from aiohttp import ClientError, ClientSession, ClientTimeout

import lmcache_stream as lms

__all__ = ["health_problems"]

_SECONDS = 2.0


async def health_problems(
    cache: lms.AsyncLMCacheContext, session: ClientSession, engine_url: str
) -> list[str]:
    """Return what is wrong, a line each; nothing where both answer in time."""
    problems: list[str] = []

    async def engine() -> None:
        url = f"{engine_url}/health"
        try:
            async with session.get(url, timeout=ClientTimeout(total=_SECONDS)) as response:
                if response.status != 200:
                    problems.append(f"engine: GET {url}: HTTP {response.status}")
        except (ClientError, TimeoutError) as error:
            problems.append(f"engine: GET {url}: {error or type(error).__name__}")

    async def server() -> None:
        try:
            with anyio.fail_after(_SECONDS):
                # One chunk that no prompt begins with: nothing is found, locked or read.
                await cache.lookup([0] * cache.chunk_size, "healthz")
        except (lms.LMCacheStreamError, TimeoutError) as error:
            problems.append(f"cache: {error or f'no answer in {_SECONDS:g} s'}")

    async with anyio.create_task_group() as group:
        group.start_soon(engine)
        group.start_soon(server)
    return [" ".join(problem.split()) for problem in sorted(problems)]
