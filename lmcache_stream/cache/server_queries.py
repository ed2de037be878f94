"""The queries that an engine offloads beside its KV."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from .._workers import Workers
from ..errors import GeometryError, InvalidRequestError
from ..rope import RopeConfig
from .discovery import Discovery
from .geometry import KVGeometry
from .held import HeldPrefix
from .lookups import PrefixLease
from .model_config import ModelConfig
from .selfcheck import MAX_SPREAD, measure_spread, repeated_rows

__all__ = ["QUERY_MARK", "ServerQueries", "check_queries", "discover_queries"]

QUERY_MARK = "##query"
"""What LMCache puts behind a model's name where it keeps the model's queries."""

# Of the right tokens they differ by rounding alone; kernels of a caller may round more than the cache's.
_MOST_SPREAD = 5 * MAX_SPREAD


def discover_queries(model_name: str, kv: KVGeometry, config: ModelConfig | None) -> Discovery:
    """Return the geometry of a model's queries: one plane, as wide as all attention heads.

    Raises:
        GeometryError: the number of attention heads is not known.
    """
    heads = None if config is None else config.raw.get("num_attention_heads")
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise GeometryError(
            f"queries=True: the attention heads of {model_name!r} are not known: pass model_config= with "
            "num_attention_heads"
        )
    # Their dtype is the engine's business; the first chunks tell.
    return Discovery(replace(kv, num_kv_heads=heads, layout="queries"), assumed=True, alone=False)


def check_queries(rows: Tensor, tokens: Sequence[int], positions: Sequence[int], rope: RopeConfig) -> None:
    """Raise unless layer 0's queries can be those of these tokens, as far as repeated tokens tell.

    As with keys, they are functions of their token and its position alone.

    Args:
        rows: ``[n, D]``, layer 0's queries, rotated.
        tokens: the n token ids.
        positions: of these in the sequence.
        rope: how the model rotates.

    Raises:
        InvalidRequestError: they are not.
    """
    spread = measure_spread(rows, tokens, rope, positions=positions)
    if spread is not None and spread > _MOST_SPREAD:
        raise InvalidRequestError(
            "the queries are not those of the prefix's tokens: layer 0's of equal tokens differ by "
            f"{spread:.2f} (at most {_MOST_SPREAD} when model, rotation and rows are right)"
        )


class QueryCache(Protocol):
    """A context on the cache of a model's queries."""

    @property
    def chunk_size(self) -> int: ...

    @property
    def model_name(self) -> str: ...

    @property
    def edit_workers(self) -> Workers: ...

    async def pin(self, tokens: Sequence[int], cache_salt: str = "") -> PrefixLease: ...

    async def unpin(self, lease: PrefixLease) -> None: ...

    def hold(self, lease: PrefixLease) -> AbstractAsyncContextManager[HeldPrefix | None]: ...

    async def aclose(self) -> None: ...


class ServerQueries:
    """Retrieves queries from the cache of ``<model>##query``.

    Args:
        context: on that cache.
    """

    def __init__(self, context: QueryCache) -> None:
        self._context = context

    async def last(self, tokens: Sequence[int], cache_salt: str, count: int, rope: RopeConfig) -> Tensor:
        """Return the rotated queries ``[L, W, query heads x head size]`` of the last ``count`` tokens.

        Args:
            tokens: a prefix, whole chunks.
            cache_salt: its salt.
            count: tokens from its end; all of it where that is more.
            rope: how the model rotates.

        Raises:
            InvalidRequestError: the cache does not have the queries of all tokens, or has others.
        """
        lease = await self._context.pin(tokens, cache_salt)
        found = lease.chunks * self._context.chunk_size
        if found < len(tokens):
            await self._context.unpin(lease)
            raise self._missing(found, len(tokens))
        async with self._context.hold(lease) as held:
            if held is None:
                raise self._missing(0, len(tokens))
            await self._context.edit_workers.run(_check, held, tokens, rope)
            queries = await held.last(min(count, len(tokens)))
        return queries[0]

    def _missing(self, found: int, wanted: int) -> InvalidRequestError:
        return InvalidRequestError(
            f"LMCache has the queries of {found} of the prefix's {wanted} tokens (model "
            f"{self._context.model_name!r}): an engine offloads them only where it is told to, and only of "
            "prompts that it computes; pass queries=HFQueries(model) instead"
        )

    async def aclose(self) -> None:
        """Close the context; idempotent."""
        await self._context.aclose()


def _check(held: HeldPrefix, tokens: Sequence[int], rope: RopeConfig) -> None:
    places = repeated_rows(tokens)
    check_queries(held.layer0(places), [tokens[place] for place in places], places, rope)
