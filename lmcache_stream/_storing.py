"""Storing what an edit made, until all of it is in the cache, and making it the stream's state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import torch

from ._checks import checked_token_ids
from ._state import EditReport, StreamState
from .cache.context import AsyncLMCacheContext
from .errors import InvalidRequestError, StoreIncompleteError

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0
LEAST_STORE = 1.0
"""Seconds that a store gets at the least, however little is left."""


@dataclass(frozen=True, slots=True)
class AppliedEdit:
    """What an edit made of a prefix.

    Attributes:
        tokens_before: length of the prefix.
        tokens: the n token ids that it left.
        kv: their KV, ``[2, L, n, D]``; None where its whole chunks are stored already.
        kept: int64 ``[n]``, which of the tokens before these are; None where a function made them.
        prints: the fingerprint of what is stored already.
    """

    tokens_before: int
    tokens: Sequence[int]
    kv: torch.Tensor | None
    kept: torch.Tensor | None = None
    prints: torch.Tensor | None = None


async def commit_edit(
    context: AsyncLMCacheContext,
    state: StreamState,
    edit: AppliedEdit,
    tail: Sequence[int],
    cache_salt: str,
    *,
    own_salt: bool,
    started: float,
    timeout: float,
) -> None:
    """Store an edit, report it, and let ``state`` go on from it; an error leaves ``state`` as it was.

    Args:
        context: the cache.
        state: the stream's.
        edit: what was made of the prefix.
        tail: the tokens that follow the prefix.
        cache_salt: what to store it under.
        own_salt: whether nobody else stores under it.
        started: ``time.perf_counter()`` when the edit was asked for.
        timeout: seconds for the store.

    Raises:
        InvalidRequestError, StoreIncompleteError: see ``store_whole``.
    """
    ids, prints = await store_whole(context, edit, cache_salt, own_salt=own_salt, timeout=timeout)
    whole = len(prints) * context.chunk_size
    before, per_token = edit.tokens_before, context.geometry.bytes_per_token
    kept = None if edit.kept is None else tuple(state.origins[index] for index in edit.kept.tolist())
    report = EditReport(
        tokens_before=before,
        tokens_after=len(ids),
        recomputed_tokens=len(ids) - whole,
        bytes_before=before * per_token,
        bytes_after=whole * per_token,
        cache_salt=cache_salt,
        seconds=time.perf_counter() - started,
        kept_indices=kept,
        layout_spread=context.layout_spread,
    )
    behind = [*ids[whole:], *tail, *state.suffix]
    origins = None if kept is None else (*kept, *state.origins[before:], *state.suffix_origins)
    state.replace(ids[:whole], behind, cache_salt, report, prints, origins)


def whole_chunks(num_tokens: int, chunk_size: int) -> int:
    """Return how many tokens of an edit are in whole chunks.

    Raises:
        InvalidRequestError: not one chunk.
    """
    whole = num_tokens // chunk_size * chunk_size
    if whole == 0:
        raise InvalidRequestError(
            f"the edit left {num_tokens} tokens, less than one chunk of {chunk_size}: there is nothing "
            "to store"
        )
    return whole


async def store_whole(
    context: AsyncLMCacheContext, edit: AppliedEdit, cache_salt: str, *, own_salt: bool, timeout: float
) -> tuple[list[int], torch.Tensor]:
    """Store an edit's whole chunks until a lookup finds every one of them, unless that was done before.

    With no room in the cache it holds no lock while it waits for the server's eviction. Returns the edit's
    token ids and the fingerprint of what was stored.

    Raises:
        InvalidRequestError: KV and ids do not fit each other or the cache, or are less than a chunk.
        StoreIncompleteError: not all was in within ``timeout`` seconds, or never can be.
    """
    ids = checked_token_ids(edit.tokens, "tokens")
    if edit.kv is None:
        assert edit.prints is not None
        return ids, edit.prints
    context.check_kv(edit.kv, len(ids))
    whole = whole_chunks(len(ids), context.chunk_size)
    kv, tokens = edit.kv[:, :, :whole], ids[:whole]
    if kv.device.type != "cpu":
        # Once, for every try and for the fingerprint.
        kv = await context.edit_workers.run(kv.cpu)
    end = anyio.current_time() + timeout
    pause = _FIRST_PAUSE
    wanted = len(tokens) // context.chunk_size
    while True:
        left = max(end - anyio.current_time(), LEAST_STORE)
        result = await context.store(kv, tokens, cache_salt, own_salt=own_salt, deadline=left)
        if result:
            return ids, await context.fingerprint(kv)
        stored = wanted - result.refused
        if result.conflicting:
            raise StoreIncompleteError(
                f"{result.conflicting} of {wanted} chunks: other KV of the same tokens is in LMCache "
                "under this salt and is never overwritten; use isolation='fork'",
                stored=stored,
                wanted=wanted,
            )
        if anyio.current_time() + pause > end:
            raise StoreIncompleteError(
                f"{stored} of {wanted} chunks of the edit are in LMCache after {timeout:g} s: its memory "
                "is full of KV in use; give the cache more (--l1-size-gb) or edit fewer streams at once",
                stored=stored,
                wanted=wanted,
            )
        await anyio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
