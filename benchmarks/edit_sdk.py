"""The peer of ``edit.py``: ``lmcache.sdk``'s batched modify, run by an interpreter that has lmcache.

Started by ``edit.py``. A line of JSON on stdin, ``[edit, prompts]``, is a batch; the answer is its seconds.
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


class MiddleDropped:
    """Two ways to drop the middle half and to bring what is left to its new positions.

    ``two_rotations`` is the procedure of LMCache's examples: the kept tokens are gathered and cloned, then
    the keys of all of them are rotated back to position 0 and to their new positions, in the KV's own type.
    ``one_rotation`` is the fastest that we know to write for this interface: only what moves is rotated,
    once, in float32.
    """

    def __init__(self, theta: float, head_size: int) -> None:
        self._inv_freq = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
        self._head_size = head_size

    def two_rotations(
        self, tensors: Mapping[Any, torch.Tensor], tokens: Sequence[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """Edit as LMCache's examples do."""
        kept = torch.tensor(_kept(len(tokens)))
        new = tensors[LMCacheSDKCacheKind.KV][:, :, kept].clone()
        by_head = new[0].view(*new.shape[1:3], -1, self._head_size)
        cos, sin = self._cos_sin(kept, new.dtype)
        plain = by_head * cos - _rotated_half(by_head) * sin
        cos, sin = self._cos_sin(torch.arange(len(kept)), new.dtype)
        moved = plain * cos + _rotated_half(plain) * sin
        new[0] = moved.reshape(new.shape[1:])
        return new, [tokens[index] for index in kept.tolist()]

    def one_rotation(
        self, tensors: Mapping[Any, torch.Tensor], tokens: Sequence[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """Edit with as little work as this interface allows."""
        length = len(tokens)
        kept = _kept(length)
        quarter = length // 4
        new = tensors[LMCacheSDKCacheKind.KV][:, :, kept]
        keys = new[0, :, quarter:].float()
        angle = -(length - 2 * quarter) * self._inv_freq
        cos, sin = angle.cos(), angle.sin()
        first, second = keys.view(*keys.shape[:-1], -1, self._head_size).chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        new[0, :, quarter:] = turned.view(keys.shape).to(new.dtype)
        return new, [tokens[index] for index in kept]

    def _cos_sin(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None].float() * self._inv_freq
        both = torch.cat((angles, angles), dim=-1)[:, None]
        return both.cos().to(dtype), both.sin().to(dtype)


def _kept(length: int) -> list[int]:
    return [*range(length // 4), *range(length - length // 4, length)]


def _rotated_half(keys: torch.Tensor) -> torch.Tensor:
    first, second = keys.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def main() -> None:
    url, http_url, model, described = sys.argv[1:]
    shape = json.loads(described)
    context = connect(url, http_url, model, shape)
    edits = MiddleDropped(shape["theta"], shape["head_size"])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, prompts = json.loads(line)
        batch = LMCacheBatchedStream()
        for tokens in prompts:
            batch.add(create_request([context], lambda *_: iter(()), tokens))
        print(json.dumps(batch.modify_request_streams(getattr(edits, name))), flush=True)
    context.close()


if __name__ == "__main__":
    main()
