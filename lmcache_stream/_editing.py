"""Applying an edit to retrieved KV, and storing its result until all of it is in the cache."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import torch

from .cache.context import AsyncLMCacheContext
from .cache.edit import drop_tokens
from .dropping.keep import Keep
from .errors import InvalidRequestError, StoreIncompleteError

Edited = tuple[torch.Tensor, Sequence[int]]
KVEdit = Callable[[torch.Tensor, list[int]], Edited | Awaitable[Edited]] | Keep

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0
# The least time that a store gets, however little is left.
_LEAST_STORE = 1.0


async def apply_edit(context: AsyncLMCacheContext, fn: KVEdit, kv: torch.Tensor, tokens: list[int]) -> Edited:
    """Return what ``fn`` makes of ``kv`` (``[2, L, T, D]``) and ``tokens``, both private to it.

    Raises:
        InvalidRequestError: the result is no pair.
        GeometryError, LayoutError: the edit cannot be done right for this model.
    """
    if isinstance(fn, Keep):
        kept = fn.kept_indices(len(tokens))
        return await context.edit_workers.run(drop_tokens, kv, tokens, kept, context.rope)
    # An object counts as asynchronous by its __call__.
    call = getattr(fn, "__call__", None)  # noqa: B004
    edited: Any
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(call):
        edited = fn(kv, tokens)
        edited = await edited
    else:
        edited = await context.edit_workers.run(fn, kv, tokens)
        if inspect.isawaitable(edited):
            edited = await edited
    try:
        new_kv, new_tokens = edited
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"the edit must return (new_kv, new_tokens), not {type(edited).__name__}"
        ) from error
    return new_kv, new_tokens


async def store_whole(
    context: AsyncLMCacheContext,
    kv: torch.Tensor,
    tokens: list[int],
    cache_salt: str,
    *,
    own_salt: bool,
    timeout: float,
) -> torch.Tensor:
    """Store ``kv`` (``[2, L, T, D]``, whole chunks) until a lookup finds every chunk of it.

    With no room in the cache it holds no lock while it waits for the server's eviction. Returns the
    fingerprint of what was stored.

    Raises:
        StoreIncompleteError: not all was in within ``timeout`` seconds, or never can be.
    """
    end = anyio.current_time() + timeout
    pause = _FIRST_PAUSE
    wanted = len(tokens) // context.chunk_size
    while True:
        left = max(end - anyio.current_time(), _LEAST_STORE)
        result = await context.store(kv, tokens, cache_salt, own_salt=own_salt, deadline=left)
        if result:
            return await context.edit_workers.run(fingerprint, kv, context.chunk_size)
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


def fingerprint(kv: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Return two sums over the bits of each chunk of ``kv`` (``[2, L, T, D]``): int64 ``[T / c, 2]``.

    They tell edited KV from the plain KV of the same tokens, not from what somebody made to look alike.
    """
    bits = kv.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[kv.dtype.itemsize])
    rows = []
    for start in range(0, kv.shape[2], chunk_size):
        chunk = bits[:, :, start : start + chunk_size].to(torch.int64)
        rows.append(torch.stack([chunk.sum(), (chunk * chunk).sum()]))
    return torch.stack(rows)
