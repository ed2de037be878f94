"""How much the last queries attend to each token of a prefix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import InvalidRequestError
from .prefix import CachedPrefix

__all__ = ["window_attention"]


def window_attention(prefix: CachedPrefix, layer: int, window: int) -> Tensor:
    """Return the attention weights of the last ``window`` queries of one layer, ``[Hq, window, T]``.

    Softmax over the tokens up to each query's own, scaled by the head size, in float32. What a query gives
    to tokens behind the prefix is left out: each row's weights add up to one over the prefix.

    Args:
        prefix: with queries; fewer than ``window`` of them give as many rows as there are.
        layer: index of the layer.
        window: queries to take, from the end.

    Raises:
        InvalidRequestError: the prefix has no queries.
    """
    if prefix.queries is None:
        raise InvalidRequestError(
            "the attention of a prefix without queries: set needs_queries in the policy"
        )
    queries = prefix.queries[layer, -window:].float()
    keys = prefix.keys[layer].float()
    rows, num_query_heads, head_size = queries.shape
    length, num_kv_heads, _ = keys.shape
    groups = num_query_heads // num_kv_heads
    by_group = queries.view(rows, num_kv_heads, groups, head_size)
    weights = torch.einsum("whgd,thd->hgwt", by_group, keys) / math.sqrt(head_size)
    end = length + prefix.num_behind
    positions = torch.arange(end - rows, end)
    weights.masked_fill_(torch.arange(length) > positions[:, None], -torch.inf)
    return weights.softmax(dim=-1).flatten(0, 1)
