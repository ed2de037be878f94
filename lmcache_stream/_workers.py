"""Worker threads for tensor work, which must not hold the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Workers:
    """A bounded set of threads that ends with its owner.

    anyio's worker threads would live on, idle, until the event loop ends, and would keep an
    interpreter from exiting whose loop runs in a daemon thread.
    """

    def __init__(self, name: str, limit: int | None = None) -> None:
        self._executor = ThreadPoolExecutor(limit or min(8, os.cpu_count() or 1), name)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run ``function`` in a thread; a cancelled caller leaves at once, the thread goes on."""
        context = contextvars.copy_context()
        work = partial(context.run, _guarded, function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Let the threads end when they are through with what they do; idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _guarded(function: Callable[..., T], *arguments: Any) -> T:
    try:
        return function(*arguments)
    except StopIteration as error:
        # No future can carry it: whoever awaits would wait for ever.
        raise RuntimeError(f"{function!r} raised StopIteration") from error
