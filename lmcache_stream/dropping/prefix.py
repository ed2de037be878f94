"""What a policy sees of a prompt whose KV is cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..errors import InvalidRequestError
from ..rope import RopeConfig, rotate_keys
from .layers import Layers

__all__ = ["CachedPrefix"]

_QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """The KV of ``T`` tokens by heads, and queries where somebody has them.

    Attributes:
        keys: L layers of ``[T, H, d]``, rotated at the positions ``0 .. T - 1``; H KV heads of d elements.
        values: L layers of ``[T, H, d]``.
        tokens: the T token ids.
        num_kv_heads: H.
        head_size: d.
        queries: ``[L, W, Hq, d]``, rotated, of the last W of the ``T + num_behind`` tokens, or None. Hq is a
            multiple of H: query heads ``g * Hq / H`` to ``(g + 1) * Hq / H - 1`` attend to KV head ``g``.
        num_behind: how many tokens follow the T ones, in no whole chunk: they have queries, but no keys here.
        rope: how the keys are rotated, for policies that want them as they were before that; or None.
        positions: int64 ``[T]``, where the tokens are in the sequence; ``0 .. T - 1`` where None.
        num_tokens: T.
    """

    keys: Layers
    values: Layers
    tokens: Sequence[int]
    num_kv_heads: int
    head_size: int
    queries: Tensor | None = None
    num_behind: int = 0
    rope: RopeConfig | None = None
    positions: Tensor | None = None
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", len(self.tokens))

    @classmethod
    def of(
        cls,
        kv: Tensor,
        tokens: Sequence[int],
        *,
        num_kv_heads: int,
        queries: Tensor | None = None,
        num_behind: int = 0,
        rope: RopeConfig | None = None,
    ) -> CachedPrefix:
        """View ``kv`` (``[2, L, T, D]``) by heads; ``queries`` are ``[L, W, Dq]`` or ``[1, L, W, Dq]``.

        Raises:
            InvalidRequestError: shapes do not fit each other, or a query is not finite.
        """
        if kv.dim() != 4 or kv.shape[0] != 2 or kv.shape[2] != len(tokens) or kv.shape[3] % num_kv_heads:
            raise InvalidRequestError(
                f"kv of shape {list(kv.shape)} is not [2, L, T, D] of {len(tokens)} tokens and "
                f"{num_kv_heads} KV heads"
            )
        keys, values = kv.view(*kv.shape[:-1], num_kv_heads, -1)
        return cls.by_layer(
            Layers.of(keys),
            Layers.of(values),
            tokens,
            num_kv_heads=num_kv_heads,
            head_size=keys.shape[-1],
            queries=queries,
            num_behind=num_behind,
            rope=rope,
        )

    @classmethod
    def by_layer(
        cls,
        keys: Layers,
        values: Layers,
        tokens: Sequence[int],
        *,
        num_kv_heads: int,
        head_size: int,
        queries: Tensor | None = None,
        num_behind: int = 0,
        rope: RopeConfig | None = None,
    ) -> CachedPrefix:
        """Take layers that are read as they are needed; ``queries`` as in ``of``.

        Raises:
            InvalidRequestError: the queries do not fit, or one is not finite.
        """
        made = cls(
            keys=keys,
            values=values,
            tokens=tokens,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            num_behind=num_behind,
            rope=rope,
        )
        return made if queries is None else replace(made, queries=_by_head(queries, made))

    def select(self, kept: Tensor) -> CachedPrefix:
        """Return the prefix of some of the tokens, int64 ``[n]``, increasing.

        It has queries only where all tokens of the prefix that they belong to are kept.
        """
        queries = self.queries
        if queries is not None:
            inside = max(0, queries.shape[1] - self.num_behind)
            # Of a window with gaps the rows would no longer be those of the last tokens.
            whole = int((kept >= self.num_tokens - inside).sum()) == inside
            queries = queries if whole else None
        tokens = [self.tokens[index] for index in kept.tolist()]
        keys, values = self.keys.select(kept), self.values.select(kept)
        positions = self._places()[kept]
        return replace(self, keys=keys, values=values, tokens=tokens, queries=queries, positions=positions)

    def unrotated_keys(self) -> Layers:
        """Return the keys without their rotation, L layers of float32 ``[T, H, d]``.

        Raises:
            InvalidRequestError: ``rope`` is not known.
        """
        rope = self.rope
        if rope is None:
            raise InvalidRequestError("the prefix does not say how its keys are rotated: give it rope=")
        places = self._places()
        still = torch.zeros_like(places)

        def unrotated(keys: Tensor) -> Tensor:
            return rotate_keys(keys.float().flatten(1), places, still, rope).view(keys.shape)

        return self.keys.map(unrotated)

    def _places(self) -> Tensor:
        return torch.arange(self.num_tokens) if self.positions is None else self.positions


def _by_head(queries: Tensor, prefix: CachedPrefix) -> Tensor:
    layers, num_tokens = len(prefix.keys), prefix.num_tokens
    num_kv_heads, head_size = prefix.num_kv_heads, prefix.head_size
    given = list(queries.shape)
    if queries.layout != torch.strided or queries.is_meta or queries.dtype not in _QUERY_DTYPES:
        raise InvalidRequestError(
            f"queries of {queries.dtype}, {queries.layout} on {queries.device}: give a dense tensor of "
            "bfloat16, float16, float32 or float64"
        )
    # Keys are there, whatever computed the queries.
    queries = queries.detach().cpu()
    flat = queries[0] if queries.dim() == 4 and queries.shape[0] == 1 else queries
    fits = (
        flat.dim() == 3 and flat.shape[0] == layers and 1 <= flat.shape[1] <= num_tokens + prefix.num_behind
    )
    if not fits or not flat.shape[2] or flat.shape[2] % (num_kv_heads * head_size):
        raise InvalidRequestError(
            f"queries of shape {given} are not [L, W, query heads x head size] of the last W tokens, for "
            f"{layers} layers, at most {num_tokens} tokens, and heads of {head_size} in multiples of "
            f"{num_kv_heads}"
        )
    if not bool(torch.isfinite(flat).all()):
        raise InvalidRequestError("queries hold NaN or infinities")
    return flat.reshape(*flat.shape[:-1], -1, head_size)
