"""The edited prefix of a pass: there before it is used, held until it was, and confirmed afterwards."""

from __future__ import annotations

import warnings

import torch

from ._state import StreamState
from ._verdict import unused_edit
from .cache.context import AsyncLMCacheContext
from .cache.lookups import PrefixLease
from .errors import CacheLostError, EngineError, LMCacheStreamError

ADVICE = "Store the edit again with update_kv(), or open a new stream"
"""What is left to do when edited KV is gone."""


class EditedPrefix:
    """Guards one pass over edited KV; does nothing for a stream without an edit.

    Edited KV is not what the engine would compute from its tokens: where it is gone, the engine computes
    something else, answers with success, and stores that in its place.
    """

    def __init__(self, context: AsyncLMCacheContext, state: StreamState) -> None:
        self._context = context
        self._state = state
        self._length = state.edited
        self._lease: PrefixLease | None = None

    async def pin(self) -> None:
        """Lock every edited chunk.

        Raises:
            CacheLostError: one is gone, now or before; the salt is never used again.
        """
        state, context = self._state, self._context
        if not self._length:
            return
        if state.unconfirmed and not state.lost:
            await self._compare()
        if not state.lost:
            self._lease = await context.pin(state.tokens[: self._length], state.cache_salt)
            found = self._lease.chunks * context.chunk_size
            if found >= self._length:
                return
            state.lost = (
                f"{found} of {self._length} edited tokens are left in LMCache under the salt "
                f"{state.cache_salt!r} (cleared, evicted or restarted); nothing was sent"
            )
        raise CacheLostError(f"{state.lost}. {ADVICE}")

    async def _compare(self) -> None:
        # An earlier pass was left before the engine had said that it used the edited KV.
        state, context = self._state, self._context
        kv = await context.retrieve(state.tokens[: self._length], state.cache_salt)
        if kv is not None and kv.shape[2] == self._length and state.fingerprint is not None:
            found = await context.fingerprint(kv)
            if not torch.equal(found, state.fingerprint):
                state.lost = (
                    f"what LMCache has under the salt {state.cache_salt!r} is no longer the edited KV, so "
                    "that the last answer, which was left before its end, may not be the edit's"
                )
        state.unconfirmed = False

    def begin(self) -> None:
        """The request goes out: until ``confirm`` nothing is known of what the engine used."""
        self._state.unconfirmed = bool(self._length)

    def unpin(self) -> None:
        """Give the locks back, once; neither the first token nor a cancellation waits for the server."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._context.unpin_soon(lease)

    async def blame(self, error: EngineError) -> None:
        """Raise CacheLostError where the engine failed because the edited KV went away under it.

        vLLM calls a failed load of KV an internal server error, or dies of it.
        """
        context, state = self._context, self._state
        if not self._length:
            return
        try:
            found = await context.lookup(state.tokens[: self._length], state.cache_salt)
        except LMCacheStreamError:
            return
        if found < self._length:
            if self._lease is not None:
                # The locks went with the chunks; what is there now is somebody else's.
                self._lease.chunks = 0
            state.lost = (
                f"the engine failed ({error}), and {found} of {self._length} edited tokens are left in "
                f"LMCache under the salt {state.cache_salt!r}"
            )
            raise CacheLostError(f"{state.lost}. {ADVICE}") from error

    def confirm(self, cached: int | None, sent: int) -> None:
        """Hold the engine's count of cached tokens, of ``sent``, against the edit.

        Raises:
            CacheLostError: it did not use the edited KV.
        """
        state = self._state
        if not self._length:
            return
        if cached is None:
            warnings.warn(
                "the engine does not report cached tokens, so that nothing confirms that it decoded from "
                "the edited KV: start vLLM with --enable-prompt-tokens-details",
                RuntimeWarning,
                stacklevel=4,
            )
            return
        state.unconfirmed = False
        state.lost = unused_edit(cached, self._length, sent, state.cache_salt)
        if state.lost:
            raise CacheLostError(f"{state.lost}. {ADVICE}")
