"""The blocking faces of a stream and of one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import torch

from .._editing import KVEdit, Queries
from .._state import EditReport
from ..completions import PostCompletion, TokenEvent
from ..generation import Generation as AsyncGeneration
from ..metrics import StreamPerfMetrics
from ..stream import AsyncLMCacheStream
from ._completions import SyncPostCompletion, VLLMCompletions, as_async
from ._context import LMCacheContext
from ._portal import Portal


class Generation:
    """The tokens of one pass as they come: ``with stream.open_generation(...) as g: for event in g``."""

    def __init__(self, portal: Portal, generation: AsyncGeneration) -> None:
        self._portal = portal
        self._generation = generation

    @property
    def metrics(self) -> StreamPerfMetrics:
        """Figures of the pass, once it has ended."""
        return self._generation.metrics

    @property
    def finish_reason(self) -> str | None:
        """The engine's reason, None before the end and where it gave none."""
        return self._generation.finish_reason

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TokenEvent:
        try:
            return self._portal.call(self._generation.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Self:
        self._portal.call(self._generation.__aenter__)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the pass, aborting it in the engine if it still runs; idempotent."""
        # With the context, everything of it was closed.
        if self._portal.is_open:
            self._portal.call(self._generation.aclose)


class LMCacheStream:
    """``AsyncLMCacheStream`` without ``await``: the same names, blocking.

    Args:
        ctx: the cache, from ``sync.connect``.
        post_completion: the engine: ``sync.VLLMCompletions``, a generator function of ``(prompt_token_ids,
            sampling_params, cache_salt)``, or an asynchronous PostCompletion.
        prompt_token_ids: the prompt.
        cache_salt: isolates the request in engine and cache; "" for none.
        isolation: ``fork`` or ``shared``, as for ``AsyncLMCacheStream``.
    """

    def __init__(
        self,
        ctx: LMCacheContext,
        post_completion: VLLMCompletions | SyncPostCompletion | PostCompletion,
        prompt_token_ids: Sequence[int],
        cache_salt: str = "",
        *,
        isolation: Literal["fork", "shared"] = "fork",
    ) -> None:
        self._portal = ctx._portal
        self._stream = AsyncLMCacheStream(
            ctx._context,
            as_async(post_completion),
            prompt_token_ids,
            cache_salt,
            isolation=isolation,
        )

    def stream_id(self) -> str:
        """Return the stream's own id."""
        return self._stream.stream_id()

    def suffix_tokens(self) -> tuple[int, ...]:
        """Return the tokens that the next pass sends after ``tokens``."""
        return self._stream.suffix_tokens()

    def decoded_tokens(self) -> int:
        """Return how many tokens were generated so far."""
        return self._stream.decoded_tokens()

    def output_text(self) -> str:
        """Return the text that was generated so far."""
        return self._stream.output_text()

    def output_tokens(self) -> list[int]:
        """Return the ids that were generated so far."""
        return self._stream.output_tokens()

    def is_done(self) -> bool:
        """Return whether the model has finished."""
        return self._stream.is_done()

    @property
    def tokens(self) -> tuple[int, ...]:
        """The sequence whose head has stored KV."""
        return self._stream.tokens

    @property
    def edits(self) -> tuple[EditReport, ...]:
        """A report for each edit, in order."""
        return self._stream.edits

    @property
    def cache_salt(self) -> str:
        """The salt that the next operation uses."""
        return self._stream.cache_salt

    @property
    def prefix_bytes(self) -> int:
        """Bytes of the KV that an edit sees now."""
        return self._stream.prefix_bytes

    def generate(
        self, sampling_params: Mapping[str, Any], suffix_tokens: Sequence[int] = ()
    ) -> StreamPerfMetrics:
        """See ``AsyncLMCacheStream.generate``."""
        return self._portal.call(self._stream.generate, sampling_params, suffix_tokens)

    def open_generation(
        self, sampling_params: Mapping[str, Any], suffix_tokens: Sequence[int] = ()
    ) -> Generation:
        """See ``AsyncLMCacheStream.open_generation``."""
        generation = self._stream.open_generation(sampling_params, suffix_tokens)
        return Generation(self._portal, generation)

    def retrieve_kv(
        self, timeout: float = 30.0, poll_interval: float = 0.2, min_tokens: int | None = None
    ) -> torch.Tensor:
        """See ``AsyncLMCacheStream.retrieve_kv``."""
        return self._portal.call(self._stream.retrieve_kv, timeout, poll_interval, min_tokens)

    def update_kv(
        self,
        kv: torch.Tensor,
        tokens: Sequence[int],
        *,
        tail: Sequence[int] | None = None,
        timeout: float = 30.0,
    ) -> None:
        """See ``AsyncLMCacheStream.update_kv``."""

        async def update() -> None:
            await self._stream.update_kv(kv, tokens, tail=tail, timeout=timeout)

        self._portal.call(update)

    def modify_kv(
        self,
        fn: KVEdit,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        *,
        min_tokens: int | None = None,
        queries: Queries | None = None,
    ) -> None:
        """See ``AsyncLMCacheStream.modify_kv``."""

        async def modify() -> None:
            await self._stream.modify_kv(fn, timeout, poll_interval, min_tokens=min_tokens, queries=queries)

        self._portal.call(modify)

    def __repr__(self) -> str:
        return repr(self._stream).replace("AsyncLMCacheStream", "LMCacheStream")


def create_request(
    ctx: LMCacheContext,
    post_completion: VLLMCompletions | SyncPostCompletion | PostCompletion,
    prompt_token_ids: Sequence[int],
    cache_salt: str = "",
    *,
    isolation: Literal["fork", "shared"] = "fork",
) -> LMCacheStream:
    """Return a new stream; see ``LMCacheStream``."""
    return LMCacheStream(ctx, post_completion, prompt_token_ids, cache_salt, isolation=isolation)
