"""``AsyncLMCacheStream``: one logical request over several passes and edits of its KV."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch

from ._checks import checked_salt, checked_seconds, checked_token_ids
from ._edited import ADVICE
from ._editing import KVEdit, Queries, apply_edit, check_edit
from ._listener import same_listener
from ._retrieval import wait_for_prefix
from ._state import EditReport, StreamState, forked_salt
from ._storing import AppliedEdit, commit_edit
from ._turns import Turns
from .cache.context import AsyncLMCacheContext
from .cache.lookups import PrefixLease
from .completions import PostCompletion, VLLMCompletions
from .errors import CacheLostError, InvalidRequestError
from .generation import Generation
from .metrics import StreamPerfMetrics

__all__ = ["AsyncLMCacheStream", "create_request"]

T = TypeVar("T")


class AsyncLMCacheStream:
    """One logical request: prefill, take its KV, edit it, put it back, decode from it.

    One operation at a time. A failed, timed-out or cancelled edit leaves the stream as it was.

    Args:
        ctx: the cache, from ``connect``.
        post_completion: the engine, e.g. ``VLLMCompletions``.
        prompt_token_ids: the prompt.
        cache_salt: isolates the request in engine and cache; "" for none.
        isolation: ``fork`` stores every edit under a fresh salt of this stream's own; ``shared`` keeps
            the salt, so that others with equal tokens are served the edited KV.

    Raises:
        InvalidRequestError: an empty prompt, bad ids, a bad salt, an unknown isolation, or an engine whose
            address is the cache's.
    """

    def __init__(
        self,
        ctx: AsyncLMCacheContext,
        post_completion: PostCompletion,
        prompt_token_ids: Sequence[int],
        cache_salt: str = "",
        *,
        isolation: Literal["fork", "shared"] = "fork",
    ) -> None:
        tokens = checked_token_ids(prompt_token_ids)
        if not tokens:
            raise InvalidRequestError("prompt_token_ids is empty: there is nothing to prefill")
        if isolation not in ("fork", "shared"):
            raise InvalidRequestError(f"isolation={isolation!r} is neither 'fork' nor 'shared'")
        if not callable(post_completion):
            raise InvalidRequestError("post_completion must be callable, e.g. VLLMCompletions")
        if isinstance(post_completion, VLLMCompletions) and same_listener(post_completion.base_url, ctx.url):
            # What is posted there can end the thread in which LMCache answers everybody.
            raise InvalidRequestError(f"{post_completion!r} is at LMCache's own ZeroMQ port, not at vLLM's")
        self._context = ctx
        self._post_completion = post_completion
        self._isolation = isolation
        self._base_salt = checked_salt(cache_salt)
        self._state = StreamState(tokens, cache_salt)
        self._stream_id = uuid.uuid4().hex
        self._turns = Turns()

    def stream_id(self) -> str:
        """Return the stream's own id, unique to it."""
        return self._stream_id

    def suffix_tokens(self) -> tuple[int, ...]:
        """Return the tokens that the next pass sends after ``tokens``; they have no stored KV."""
        return tuple(self._state.suffix)

    def decoded_tokens(self) -> int:
        """Return how many tokens were generated so far, over all passes."""
        return len(self._state.decoded)

    def output_text(self) -> str:
        """Return the text that was generated so far, never the prompt."""
        return "".join(self._state.text)

    def output_tokens(self) -> list[int]:
        """Return the ids that were generated so far, never the prompt's."""
        return list(self._state.decoded)

    def is_done(self) -> bool:
        """Return whether the model has finished: the last pass ended by itself, not by its limit."""
        return self._state.done

    @property
    def tokens(self) -> tuple[int, ...]:
        """The sequence whose head has stored KV; the next prompt starts with it."""
        return tuple(self._state.tokens)

    @property
    def edits(self) -> tuple[EditReport, ...]:
        """A report for each edit, in order."""
        return tuple(self._state.edits)

    @property
    def cache_salt(self) -> str:
        """The salt that the next operation uses; with ``fork``, every edit changes it."""
        return self._state.cache_salt

    @property
    def prefix_bytes(self) -> int:
        """Bytes of the KV that an edit sees now: of the whole chunks of the last prompt."""
        tokens = self._state.cacheable(self._context.chunk_size)
        return tokens * self._context.geometry.bytes_per_token

    async def generate(
        self, sampling_params: Mapping[str, Any], suffix_tokens: Sequence[int] = ()
    ) -> StreamPerfMetrics:
        """Run one pass to its end and return its figures; see ``open_generation``."""
        async with self.open_generation(sampling_params, suffix_tokens) as generation:
            async for _ in generation:
                pass
        return generation.metrics

    def open_generation(
        self, sampling_params: Mapping[str, Any], suffix_tokens: Sequence[int] = ()
    ) -> Generation:
        """Return a pass over tokens, suffix and ``suffix_tokens``, to iterate within ``async with``.

        Args:
            sampling_params: under the engine's names, e.g. ``{"max_tokens": 256, "temperature": 0}``.
            suffix_tokens: tokens to add behind the sequence, e.g. the user's next turn.

        Raises (while it is entered and iterated):
            StreamBusyError: another operation is under way.
            CacheLostError: the edited KV is gone; nothing was sent, or the answer is not the edit's.
            EngineError: see its families; before the first token the stream is as it was.
        """
        if not isinstance(sampling_params, Mapping):
            raise InvalidRequestError(
                f"sampling_params must be a mapping, not {type(sampling_params).__name__}"
            )
        return Generation(
            self._context,
            self._post_completion,
            self._state,
            sampling_params,
            checked_token_ids(suffix_tokens, "suffix_tokens"),
            self._turns,
        )

    async def retrieve_kv(
        self,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        min_tokens: int | None = None,
    ) -> torch.Tensor:
        """Wait for the KV of the last prompt's whole chunks and return it, ``[2, L, T, D]``.

        The tensor is private and writable, on the CPU, K rotated at positions 0 to T - 1.

        Args:
            timeout: seconds to wait for the engine's offloading; then a shorter prefix is returned
                with a warning.
            poll_interval: the longest pause between two looks, in seconds.
            min_tokens: the fewest tokens to accept at the deadline; any whole chunk by default.

        Raises:
            InvalidRequestError: the prompt is under one chunk, or ``min_tokens`` beyond it.
            KVNotReadyError: nothing, or less than ``min_tokens``, was there in time.
            CacheLostError: the stream's edited KV is gone.
        """
        with self._turns.during("retrieve_kv"):
            size = self._context.chunk_size
            least = size if min_tokens is None else min_tokens
            kv = await self._retrieve(self._context.read, timeout, poll_interval, least)
            self._state.retrieved = kv.shape[2]
            return kv

    async def update_kv(
        self,
        kv: torch.Tensor,
        tokens: Sequence[int],
        *,
        tail: Sequence[int] | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Store edited KV: from now on the sequence is ``tokens``, then ``tail``, then the suffix.

        Whole chunks are stored. What is left of ``tokens`` joins the suffix, so that the engine
        computes it anew (``edits[-1].recomputed_tokens``).

        Args:
            kv: ``[2, L, T, D]`` of the cache's dtype, K rotated at positions 0 to T - 1. It is read until
                the store is over, which may be after a cancelled call: do not write into it.
            tokens: T token ids.
            tail: what follows; by default what followed the prefix of the last ``retrieve_kv``, or of the
                last edit where nothing was retrieved since.
            timeout: seconds within which every chunk must be in.

        Raises:
            InvalidRequestError: a wrong shape, dtype or length, or less than one chunk.
            StoreIncompleteError: not every chunk was in the cache in time.
        """
        with self._turns.during("update_kv"):
            started = time.perf_counter()
            checked_seconds(timeout, "timeout")
            behind = self._state.tail() if tail is None else checked_token_ids(tail, "tail")
            before = self._state.retrieved or len(self._state.tokens)
            await self._commit(AppliedEdit(before, tokens, kv), behind, self._new_salt(), started, timeout)

    async def modify_kv(
        self,
        fn: KVEdit,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        *,
        min_tokens: int | None = None,
        queries: Queries | None = None,
    ) -> None:
        """Retrieve the KV, edit it, store the result and go on from it.

        Args:
            fn: ``keep(indices)``, a policy of ``lmcache_stream.dropping``, or a function of ``(kv, tokens)``
                that returns ``(new_kv, new_tokens)``, ``[2, L, T, D]`` in and out, K rotated at contiguous
                positions from 0. A plain function runs in a worker thread.
            timeout: seconds to wait for the KV, and again for every chunk of the edit to be stored.
            poll_interval: the longest pause between two looks, in seconds.
            min_tokens: the shortest prefix to edit at the deadline; the whole one by default.
            queries: for policies that need them: ``HFQueries``; or ``[L, W, query heads x head size]``,
                rotated, of the prefix's last W tokens; or what returns them for ``(kv, tokens)``. One with a
                parameter ``behind`` is also given the tokens behind the prefix and returns the queries of
                the last W of all.

        Raises:
            InvalidRequestError: no edit, a policy that cannot choose, or a result of a wrong shape.
            KVNotReadyError: the prefix was not there in time.
            GeometryError, LayoutError: the edit could not be done right for this model.
            What ``fn`` raises; the stream is then as it was, as with every other error.
        """
        with self._turns.during("modify_kv"):
            started = time.perf_counter()
            check_edit(fn, queries)
            salt, fork = self._new_salt(), self._isolation == "fork"

            async def use(lease: PrefixLease) -> AppliedEdit | None:
                behind = self._state.prompt(())[lease.chunks * self._context.chunk_size :]
                own_salt = salt if fork else None
                return await apply_edit(self._context, fn, lease, queries, behind, own_salt, timeout)

            edit = await self._retrieve(use, timeout, poll_interval, min_tokens)
            behind = self._state.tokens[edit.tokens_before :]
            await self._commit(edit, behind, salt, started, timeout)

    async def _retrieve(
        self,
        use: Callable[[PrefixLease], Awaitable[T | None]],
        timeout: float,
        pause: float,
        min_tokens: int | None,
    ) -> T:
        state = self._state
        if state.lost:
            raise CacheLostError(f"{state.lost}. {ADVICE}")
        prefix = state.tokens[: state.cacheable(self._context.chunk_size)]
        return await wait_for_prefix(
            self._context,
            prefix,
            state.cache_salt,
            use,
            timeout=timeout,
            poll_interval=pause,
            min_tokens=min_tokens,
            was_sent=bool(state.sent or state.edits),
        )

    def _new_salt(self) -> str:
        return forked_salt(self._base_salt) if self._isolation == "fork" else self._base_salt

    async def _commit(
        self, edit: AppliedEdit, tail: Sequence[int], salt: str, started: float, timeout: float
    ) -> None:
        own = self._isolation == "fork"
        context, state = self._context, self._state
        await commit_edit(context, state, edit, tail, salt, own_salt=own, started=started, timeout=timeout)

    def __repr__(self) -> str:
        state = self._state
        counts = f"tokens={len(state.tokens)} suffix={len(state.suffix)} decoded={len(state.decoded)}"
        return f"<AsyncLMCacheStream {self._stream_id[:8]} {counts} edits={len(state.edits)}>"


create_request = AsyncLMCacheStream
"""``AsyncLMCacheStream`` under the name that LMCache's own sdk has for it."""
