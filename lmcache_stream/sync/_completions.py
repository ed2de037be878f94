"""The blocking face of the engine side, and PostCompletions that are ordinary generators."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

import anyio

from .._background import to_the_end
from .._workers import Workers
from ..completions import CompletionTimeouts, FinishEvent, PostCompletion, ServedModel, TokenEvent
from ..completions import VLLMCompletions as AsyncVLLMCompletions
from ..completions import find_model as find_model_async
from ..errors import InvalidRequestError
from ._portal import Portal

# How long a pass that is left waits for its generator to be closed, which may be in a blocking call.
_CLOSE_SECONDS = 1.0

Event: TypeAlias = TokenEvent | FinishEvent
SyncPostCompletion: TypeAlias = Callable[[list[int], dict[str, Any], str], Iterable[Event]]


def find_model(base_url: str, model: str, *, api_key: str | None = None) -> ServedModel:
    """Ask an engine for the model that it serves as ``model``; see ``lmcache_stream.find_model``."""

    async def find() -> ServedModel:
        return await find_model_async(base_url, model, api_key=api_key)

    portal = Portal(f"the connection to {base_url}")
    try:
        return portal.call(find)
    finally:
        portal.release()


class VLLMCompletions:
    """``lmcache_stream.VLLMCompletions`` without ``await``: an engine for streams, or to iterate."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeouts: CompletionTimeouts = CompletionTimeouts(),  # noqa: B008 - frozen
    ) -> None:
        async def make() -> AsyncVLLMCompletions:
            return AsyncVLLMCompletions(base_url, model, api_key=api_key, headers=headers, timeouts=timeouts)

        self._portal = Portal(f"the connection to {base_url}")
        try:
            self._inner = self._portal.call(make)
        except BaseException:
            self._portal.release()
            raise

    @property
    def base_url(self) -> str:
        """The server's address, without ``/v1``."""
        return self._inner.base_url

    @property
    def inner(self) -> AsyncVLLMCompletions:
        """The asynchronous one, which lives on the loop of ``sync``."""
        return self._inner

    def __call__(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        cache_salt: str = "",
    ) -> Iterator[Event]:
        """Yield the events of one pass; closing the iterator aborts it in the engine."""
        events: Any = self._inner(prompt_token_ids, sampling_params, cache_salt)
        try:
            while True:
                try:
                    yield self._portal.call(events.__anext__)
                except StopAsyncIteration:
                    return
        finally:
            self._portal.call(events.aclose)

    def close(self) -> None:
        """Close every connection; idempotent."""
        self._portal.close(self._inner.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        portal = getattr(self, "_portal", None)
        if portal is not None and portal.is_open:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)


def as_async(post_completion: Any) -> PostCompletion:
    """Return an asynchronous PostCompletion for a blocking one; those that are asynchronous stay."""
    if isinstance(post_completion, VLLMCompletions):
        return post_completion.inner
    if isinstance(post_completion, AsyncVLLMCompletions):
        return post_completion
    call = getattr(post_completion, "__call__", None)  # noqa: B004 - its kind is asked for
    if inspect.isasyncgenfunction(post_completion) or inspect.isasyncgenfunction(call):
        asynchronous: PostCompletion = post_completion
        return asynchronous
    if not callable(post_completion):
        raise InvalidRequestError("post_completion must be callable, e.g. sync.VLLMCompletions")

    def run(
        prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str
    ) -> AsyncIterator[Event]:
        return _iterate_in_thread(post_completion, prompt_token_ids, sampling_params, cache_salt)

    return run


async def _iterate_in_thread(post_completion: SyncPostCompletion, *arguments: Any) -> AsyncIterator[Event]:
    """Iterate and close an ordinary generator in one thread, which is where its connections live."""
    thread = Workers("lmcache-stream post_completion", 1)
    events: Iterator[Event] | None = None
    try:
        made: Any = await thread.run(post_completion, *arguments)
        if hasattr(made, "__aiter__"):
            async with contextlib.aclosing(made) if hasattr(made, "aclose") else contextlib.nullcontext():
                async for event in made:
                    yield event
            return
        if not hasattr(made, "__iter__"):
            raise InvalidRequestError(
                f"post_completion must return an iterator of events, not {type(made).__name__}"
            )
        events = iter(made)
        over = object()
        while (event := await thread.run(_next, events, over)) is not over:
            yield event
    finally:
        close = getattr(events, "close", None)
        if close is not None:
            await to_the_end(_close_in(thread, close))
        thread.close()


async def _close_in(thread: Workers, close: Callable[[], None]) -> None:
    """Close a generator behind a `next` that may still run: a thread cannot be interrupted."""
    loop, closed = asyncio.get_running_loop(), asyncio.Event()

    def work() -> None:
        try:
            close()
        finally:
            # The loop may be over by then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(closed.set)

    thread.submit(work)
    with anyio.move_on_after(_CLOSE_SECONDS):
        await closed.wait()


def _next(events: Iterator[Event], over: object) -> Any:
    return next(events, over)
