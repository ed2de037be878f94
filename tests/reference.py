"""What transformers decodes from an edited cache, the edit made here by other means."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def dropped(network: Any, kv: torch.Tensor, kept: list[int]) -> torch.Tensor:
    """Keep rows of ``kv`` (``[2, L, T, D]``) and move their keys, in float64 and with complex numbers.

    Independent of the library's rotation: the pairs are complex numbers, each key is first turned back
    to position 0 and then to its new position.
    """
    config = network.config
    head_size: int = config.hidden_size // config.num_attention_heads
    theta: float = config.rope_parameters["rope_theta"]
    rows = kv[:, :, kept].double()
    _, layers, length, _ = rows.shape
    keys = rows[0].view(layers, length, -1, 2, head_size // 2).transpose(-1, -2).contiguous()
    pairs = torch.view_as_complex(keys)
    exponents = torch.arange(head_size // 2, dtype=torch.float64) * 2 / head_size
    speed = theta**-exponents

    def turn(positions: torch.Tensor, sign: int) -> torch.Tensor:
        angles = sign * positions.double()[:, None] * speed
        return torch.polar(torch.ones_like(angles), angles)[:, None]

    moved = pairs * turn(torch.tensor(kept), -1) * turn(torch.arange(length), 1)
    flat = torch.view_as_real(moved).transpose(-1, -2).reshape(layers, length, -1)
    return torch.stack([flat, rows[1]]).to(kv.dtype)


def _cache_name(network: Any) -> str:
    """The cache's parameter, which newer versions of transformers have renamed."""
    return "cache" if "cache" in inspect.signature(network.forward).parameters else "past_key_values"


@torch.no_grad()
def prefilled(network: Any, prompt: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each layer's keys and values ``[H, T, HS]`` that transformers computes for ``prompt``."""
    from transformers import DynamicCache

    cache: Any = DynamicCache(config=network.config)
    network(input_ids=torch.tensor([prompt]), use_cache=True, **{_cache_name(network): cache})
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def recalled(network: Any, prompt: list[int], kept: list[int], chunk_size: int, count: int) -> list[int]:
    """Return ``count`` greedy ids behind ``prompt``, of whose whole chunks only ``kept`` is left."""
    length = len(prompt) // chunk_size * chunk_size
    kv = kv_of(network, prompt, length)
    inside = [index for index in kept if index < length]
    if len(inside) < length:
        kv = dropped(network, kv, inside)
    if length == len(prompt):
        # An engine that has found every token computes the last one again.
        kv, length = kv[:, :, :-1], length - 1
    return decoded(network, kv, prompt[length:], count)


def kv_of(network: Any, prompt: list[int], length: int) -> torch.Tensor:
    """Return the KV of the first ``length`` tokens that transformers computes, ``[2, L, length, D]``."""
    layers = prefilled(network, prompt)
    planes = [
        [one.transpose(0, 1).flatten(1)[:length] for one in plane] for plane in zip(*layers, strict=True)
    ]
    return torch.stack([torch.stack(plane) for plane in planes])


@torch.no_grad()
def decoded(network: Any, kv: torch.Tensor, rest: list[int], count: int) -> list[int]:
    """Return ``count`` greedy ids of transformers behind the cache ``kv`` and the tokens ``rest``."""
    cache = _cache_of(network, kv)
    ids: list[int] = []
    step = torch.tensor([rest])
    for _ in range(count):
        logits = network(input_ids=step, use_cache=True, **{_cache_name(network): cache}).logits
        ids.append(int(logits[0, -1].argmax()))
        step = torch.tensor([[ids[-1]]])
    return ids


@torch.no_grad()
def shortfalls(network: Any, kv: torch.Tensor, rest: list[int], answer: list[int]) -> torch.Tensor:
    """Return how far the logit of each id of ``answer`` is below the greatest one at its place.

    0 for a greedy answer of transformers behind ``kv`` and ``rest``; little where rounding alone chose.
    """
    ids = torch.tensor([[*rest, *answer[:-1]]])
    cache = {_cache_name(network): _cache_of(network, kv)}
    logits: torch.Tensor = network(input_ids=ids, use_cache=True, **cache).logits[0, len(rest) - 1 :].float()
    return logits.amax(-1) - logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]


def _cache_of(network: Any, kv: torch.Tensor) -> Any:
    from transformers import DynamicCache

    heads: int = network.config.num_key_value_heads
    cache = DynamicCache(config=network.config)
    for layer in range(kv.shape[1]):
        planes = kv[:, layer].view(2, kv.shape[2], heads, -1).transpose(1, 2)
        cache.update(planes[0][None].contiguous(), planes[1][None].contiguous(), layer)
    return cache
