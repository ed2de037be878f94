"""The peer of ``edit.py``: ``lmcache.sdk``'s batched modify, run by an interpreter that has lmcache.

Started by ``edit.py``. A line of JSON with prompts on stdin is a batch; the answer is its seconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lmcache.sdk import LMCacheSDKCacheKind
from lmcache.sdk.batch import LMCacheBatchedStream
from lmcache.sdk.context import LMCacheSDKContext
from lmcache.sdk.request import create_request

# LMCache's own name for blocks of K and V planes, as vLLM's engines for GPUs register them.
_FORMAT = "NL_X_NB_TWO_NH_BS_HS"


def connect(url: str, http_url: str, model: str, shape: dict[str, Any]) -> Any:
    """Open a context on the geometry that an engine with a GPU would have registered."""
    context = LMCacheSDKContext(url, http_url, model, timeout=60)
    heads, block, size = shape["num_kv_heads"], shape["block_size"], shape["head_size"]
    group = {
        "dtype": f"torch.{shape['dtype']}",
        "tokens_per_block": block,
        "engine_kv_format": _FORMAT,
        "engine_kv_concrete_shape": f"{shape['num_layers']} x [1, 2, {heads}, {block}, {size}]",
    }
    layout = {"num_layers": shape["num_layers"], "kernel_groups": [group]}
    context._cache_context_meta_conf = {
        "0": {"model_name": model, "world_size": 1, "kv_cache_layout": layout}
    }
    context.register_caches()
    return context


def middle_dropped(theta: float, head_size: int) -> Any:
    """Return the edit: without the middle half, what is behind it rotated to its new positions."""
    inv_freq = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)

    def edit(tensors: Mapping[Any, torch.Tensor], tokens: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        kv = tensors[LMCacheSDKCacheKind.KV]
        length = len(tokens)
        quarter = length // 4
        kept = [*range(quarter), *range(length - quarter, length)]
        new = kv[:, :, kept]
        keys = new[0, :, quarter:].float()
        by_head = keys.view(*keys.shape[:-1], -1, head_size)
        angle = -(length - 2 * quarter) * inv_freq
        cos, sin = angle.cos().float(), angle.sin().float()
        first, second = by_head.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        new[0, :, quarter:] = turned.view(keys.shape).to(kv.dtype)
        return new, [tokens[index] for index in kept]

    return edit


def main() -> None:
    url, http_url, model, described = sys.argv[1:]
    shape = json.loads(described)
    context = connect(url, http_url, model, shape)
    edit = middle_dropped(shape["theta"], shape["head_size"])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        batch = LMCacheBatchedStream()
        for tokens in json.loads(line):
            batch.add(create_request([context], lambda *_: iter(()), tokens))
        print(json.dumps(batch.modify_request_streams(edit)), flush=True)
    context.close()


if __name__ == "__main__":
    main()
