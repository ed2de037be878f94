"""Applying an edit: a function, kept indices or a policy, to a prefix that is locked in the cache."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import torch

from ._storing import LEAST_STORE, AppliedEdit, whole_chunks
from .cache.context import AsyncLMCacheContext
from .cache.edit import drop_tokens
from .cache.held import HeldPrefix
from .cache.kv_check import check_editable
from .cache.lookups import PrefixLease
from .cache.server_queries import check_queries
from .dropping import CachedPrefix, Keep, Layers, Policy
from .errors import InvalidRequestError

Edited = tuple[torch.Tensor, Sequence[int]]
KVEdit = Callable[[torch.Tensor, list[int]], Edited | Awaitable[Edited]] | Keep | Policy
Queries = torch.Tensor | Callable[..., torch.Tensor | Awaitable[torch.Tensor]]


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
    lease: PrefixLease,
    queries: Queries | None,
    behind: Sequence[int],
    own_salt: str | None,
    timeout: float,
) -> AppliedEdit | None:
    """Edit the prefix that ``lease`` locks, and use the lease up; None where the prefix was gone.

    Args:
        context: the cache.
        fn: the edit.
        lease: of the prefix.
        queries: for policies.
        behind: the tokens that follow what can be cached.
        own_salt: where tokens are only dropped, store what is left under it at once, from the server's
            memory into the server's memory. None where others store under the salt too.
        timeout: seconds for that.

    Raises:
        InvalidRequestError: the result is no pair, or a policy cannot choose.
        GeometryError, LayoutError: the edit cannot be done right for this model.
        CacheLostError: the server gave the prefix's memory away meanwhile.
    """
    if isinstance(fn, Keep | Policy):
        # Before anything is chosen or reserved: without RoPE, or K and V, nothing could be moved.
        try:
            check_editable(context.geometry, context.model_name)
            _ = context.rope
        except BaseException:
            await context.unpin(lease)
            raise
    async with context.hold(lease) as held:
        if held is None:
            return None
        if queries is None and isinstance(fn, Policy) and fn.needs_queries and context.queries is not None:
            queries = await context.queries.last(held.tokens, lease.cache_salt, fn.query_window, context.rope)
        if isinstance(fn, Keep | Policy) and own_salt is not None and not callable(queries):
            return await _drop_where_it_lies(context, fn, held, queries, own_salt, timeout)
        kv = await held.kv()
    # A caller's function may take long: it runs when the locks are given back.
    tokens = list(held.tokens)
    if isinstance(fn, Keep):
        return await _drop(context, kv, tokens, fn.kept_indices(len(tokens)))
    if isinstance(fn, Policy):
        made, seen = await _made_queries(context, queries, kv, tokens, behind)
        keys, values = kv.view(*kv.shape[:-1], context.geometry.num_kv_heads, -1)
        layers = Layers.of(keys), Layers.of(values)
        kept = await _choose(context, fn, layers, tokens, made, seen)
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
    return AppliedEdit(len(held.tokens), new_tokens, new_kv)


async def _made_queries(
    context: AsyncLMCacheContext,
    queries: Queries | None,
    kv: torch.Tensor,
    tokens: list[int],
    behind: Sequence[int],
) -> tuple[torch.Tensor | None, Sequence[int]]:
    """Return the queries, and those of the tokens ``behind`` the prefix that they go on into."""
    if queries is None or isinstance(queries, torch.Tensor):
        return queries, ()
    asks = _asks_for_behind(queries)
    made = await _call(context, partial(queries, behind=behind) if asks else queries, kv, tokens)
    if not isinstance(made, torch.Tensor):
        raise InvalidRequestError(f"queries= gave a {type(made).__name__}, no tensor")
    return made, behind if asks else ()


def _asks_for_behind(function: Callable[..., Any]) -> bool:
    try:
        return "behind" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # Functions of compiled modules may have no signature.
        return False


async def _drop_where_it_lies(
    context: AsyncLMCacheContext,
    fn: Keep | Policy,
    held: HeldPrefix,
    queries: torch.Tensor | None,
    cache_salt: str,
    timeout: float,
) -> AppliedEdit:
    """Choose and move in the server's memory; the prefix stays locked, also while a policy scores."""
    tokens = list(held.tokens)
    async with held.unchanged():
        if isinstance(fn, Keep):
            kept = fn.kept_indices(len(tokens))
        else:
            count = context.geometry.num_layers
            layers = Layers(count, held.keys), Layers(count, held.values)
            kept = await _choose(context, fn, layers, tokens, queries)
        whole = kept[: whole_chunks(len(kept), context.chunk_size)]
        deadline = max(timeout, LEAST_STORE)
        prints = await held.drop(whole, context.rope, cache_salt, deadline=deadline)
    if prints is None:
        # No room. To wait for some, the prefix must be held no longer, or others wait for this one.
        return await _drop(context, await held.kv(), tokens, kept)
    return AppliedEdit(
        len(tokens), [tokens[index] for index in kept.tolist()], None, kept=kept, prints=prints
    )


async def _drop(
    context: AsyncLMCacheContext, kv: torch.Tensor, tokens: list[int], kept: torch.Tensor
) -> AppliedEdit:
    new_kv, ids = await context.edit_workers.run(drop_tokens, kv, tokens, kept, context.rope)
    return AppliedEdit(len(tokens), ids, new_kv, kept=kept)


async def _choose(
    context: AsyncLMCacheContext,
    policy: Policy,
    layers: tuple[Layers, Layers],
    tokens: list[int],
    queries: torch.Tensor | None,
    behind: Sequence[int] = (),
) -> torch.Tensor:
    """Let the policy choose; ``behind`` are tokens that follow, whose queries are there as well."""

    def choose() -> torch.Tensor:
        geometry = context.geometry
        prefix = CachedPrefix.by_layer(
            *layers,
            tokens,
            num_kv_heads=geometry.num_kv_heads,
            head_size=geometry.head_size,
            queries=queries,
            num_behind=len(behind),
            rope=context.rope,
        )
        if prefix.queries is not None:
            ids = [*tokens, *behind]
            first = len(ids) - prefix.queries.shape[1]
            check_queries(prefix.queries[0].flatten(1), ids[first:], range(first, len(ids)), context.rope)
        with torch.no_grad():
            return policy.kept_indices(prefix, context.chunk_size)

    return await context.caller_workers.run(choose)


async def _call(
    context: AsyncLMCacheContext, function: Callable[..., Any], kv: torch.Tensor, tokens: list[int]
) -> Any:
    """Call a caller's function: on the loop where it is asynchronous, else in a thread."""
    # An object counts as asynchronous by its __call__.
    call = getattr(function, "__call__", None)  # noqa: B004
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
        return await function(kv, tokens)
    result = await context.caller_workers.run(function, kv, tokens)
    return await result if inspect.isawaitable(result) else result
