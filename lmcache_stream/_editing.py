"""Applying an edit to retrieved KV, and storing its result until all of it is in the cache."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import torch

from .cache.context import AsyncLMCacheContext
from .cache.edit import drop_tokens
from .dropping import CachedPrefix, Keep, Policy
from .errors import InvalidRequestError, StoreIncompleteError

Edited = tuple[torch.Tensor, Sequence[int]]
KVEdit = Callable[[torch.Tensor, list[int]], Edited | Awaitable[Edited]] | Keep | Policy
Queries = torch.Tensor | Callable[[torch.Tensor, list[int]], torch.Tensor | Awaitable[torch.Tensor]]

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0
# The least time that a store gets, however little is left.
_LEAST_STORE = 1.0


@dataclass(frozen=True, slots=True)
class AppliedEdit:
    """What an edit made.

    Attributes:
        kv: ``[2, L, n, D]``.
        tokens: its n token ids.
        kept: int64 ``[n]``, which of the tokens before these are; None where a function made them.
    """

    kv: torch.Tensor
    tokens: Sequence[int]
    kept: torch.Tensor | None = None


def check_edit(fn: KVEdit, queries: Queries | None) -> None:
    """Raise InvalidRequestError unless ``fn`` is an edit, and ``queries`` have a use."""
    if isinstance(fn, type):
        raise InvalidRequestError(
            f"modify_kv takes keep(...), a policy or a function, not the class {fn.__name__}: make one of it"
        )
    if not callable(fn) and not isinstance(fn, Keep | Policy):
        raise InvalidRequestError(f"modify_kv takes keep(...), a policy or a function, not {fn!r}")
    if queries is not None and not isinstance(fn, Policy):
        raise InvalidRequestError("queries= are for policies: keep(...) and functions get none")
    if queries is not None and not isinstance(queries, torch.Tensor) and not callable(queries):
        raise InvalidRequestError(f"queries= takes a tensor or a function, not a {type(queries).__name__}")


async def apply_edit(
    context: AsyncLMCacheContext,
    fn: KVEdit,
    kv: torch.Tensor,
    tokens: list[int],
    queries: Queries | None = None,
) -> AppliedEdit:
    """Return what ``fn`` makes of ``kv`` (``[2, L, T, D]``) and ``tokens``, both private to it.

    Raises:
        InvalidRequestError: the result is no pair, or a policy cannot choose.
        GeometryError, LayoutError: the edit cannot be done right for this model.
    """
    if isinstance(fn, Keep):
        return await _drop(context, kv, tokens, fn.kept_indices(len(tokens)))
    if isinstance(fn, Policy):
        # Before the scores: without RoPE nothing that is chosen could be moved.
        _ = context.rope
        made = None
        if queries is not None:
            made = queries if isinstance(queries, torch.Tensor) else await _call(context, queries, kv, tokens)
            if not isinstance(made, torch.Tensor):
                raise InvalidRequestError(f"queries= gave a {type(made).__name__}, no tensor")
        heads = context.geometry.num_kv_heads
        kept = await context.edit_workers.run(_choose, fn, kv, tokens, heads, made, context.chunk_size)
        return await _drop(context, kv, tokens, kept)
    edited = await _call(context, fn, kv, tokens)
    if isinstance(edited, torch.Tensor):
        raise InvalidRequestError("the edit must return (new_kv, new_tokens), not a tensor alone")
    try:
        new_kv, new_tokens = edited
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"the edit must return (new_kv, new_tokens), not {type(edited).__name__}"
        ) from error
    return AppliedEdit(new_kv, new_tokens)


async def _drop(
    context: AsyncLMCacheContext, kv: torch.Tensor, tokens: list[int], kept: torch.Tensor
) -> AppliedEdit:
    new_kv, ids = await context.edit_workers.run(drop_tokens, kv, tokens, kept, context.rope)
    return AppliedEdit(new_kv, ids, kept)


def _choose(
    policy: Policy,
    kv: torch.Tensor,
    tokens: list[int],
    num_kv_heads: int,
    queries: torch.Tensor | None,
    chunk_size: int,
) -> torch.Tensor:
    prefix = CachedPrefix.of(kv, tokens, num_kv_heads=num_kv_heads, queries=queries)
    with torch.no_grad():
        return policy.kept_indices(prefix, chunk_size)


async def _call(
    context: AsyncLMCacheContext, function: Callable[..., Any], kv: torch.Tensor, tokens: list[int]
) -> Any:
    """Call a caller's function: on the loop where it is asynchronous, else in a thread."""
    # An object counts as asynchronous by its __call__.
    call = getattr(function, "__call__", None)  # noqa: B004
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
        return await function(kv, tokens)
    result = await context.edit_workers.run(function, kv, tokens)
    return await result if inspect.isawaitable(result) else result


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
