"""Queries from a Hugging Face model, for an engine that keeps none."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidRequestError
from .recording import QUERY_ATTENTION, recording, register

__all__ = ["HFQueries"]

# Keys of layer 0 know only their token and position: what differs is rounding (0.0026 between transformers
# and vLLM in bfloat16, on SmolLM2-135M), or the model is another one.
_MOST_DIFFERENCE = 0.05


class HFQueries:
    """Computes the queries of a sequence's last tokens, in one forward pass of these over the cached KV.

    Give it as ``queries=`` to ``modify_kv`` with a policy that needs queries; it runs in a worker thread.
    There it is also told what follows the whole chunks: a question is mostly the end of a prompt, and with
    LMCache's chunks of 256 tokens half a chunk of it, on average, has no cached KV.

    Args:
        model: the model that the engine serves: a transformers causal LM, whose attention implementation is
            set to one that equals ``sdpa``, or a folder or Hub id, which is loaded at its first use.
        window: queries to compute; that of the policy.
    """

    def __init__(self, model: Any, *, window: int = 32) -> None:
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise InvalidRequestError(f"HFQueries: window={window!r} must be a positive int")
        self._model = model
        self._window = window
        self._loading = threading.Lock()

    @torch.no_grad()
    def __call__(self, kv: Tensor, tokens: Sequence[int], behind: Sequence[int] = ()) -> Tensor:
        """Return rotated queries ``[L, W, query heads x head size]`` of the last W of all tokens.

        Args:
            kv: ``[2, L, T, D]``.
            tokens: the T token ids.
            behind: those that follow; their KV is computed.

        Raises:
            InvalidRequestError: transformers is missing or cannot load the model, or it is not the one that
                computed ``kv``.
        """
        model = self._loaded()
        start = max(0, len(tokens) - self._window)
        cache = _cache_of(model, kv[:, :, :start])
        accepted = inspect.signature(model.forward).parameters
        name = "cache" if "cache" in accepted else "past_key_values"
        given: dict[str, Any] = {name: cache}
        if "logits_to_keep" in accepted:
            given["logits_to_keep"] = 1
        with recording() as recorded:
            model(
                input_ids=torch.tensor([[*tokens[start:], *behind]], device=model.device),
                use_cache=True,
                **given,
            )
        own = (
            cache.layers[0]
            .keys[0, :, start : len(tokens)]
            .transpose(0, 1)
            .flatten(1)
            .to("cpu", torch.float32)
        )
        cached = kv[0, 0, start:].float()
        if own.shape != cached.shape or float((own - cached).norm()) > _MOST_DIFFERENCE * float(
            cached.norm()
        ):
            raise InvalidRequestError(
                "HFQueries: the model's layer-0 keys are not those in the cache: it is not the model that "
                "the engine serves"
            )
        last = slice(-self._window, None)
        return torch.stack([one[0, :, last].transpose(0, 1).flatten(1).cpu() for one in recorded])

    def _loaded(self) -> Any:
        with self._loading:
            register()
            if isinstance(self._model, str):
                from transformers import AutoModelForCausalLM

                try:
                    loaded: Any = AutoModelForCausalLM.from_pretrained(
                        self._model, attn_implementation=QUERY_ATTENTION, dtype="auto"
                    )
                except (OSError, ValueError) as error:
                    raise InvalidRequestError(
                        f"HFQueries: transformers cannot load the model {self._model!r}: {error}"
                    ) from error
                self._model = loaded.eval()
            elif self._model.config._attn_implementation != QUERY_ATTENTION:
                self._model.set_attn_implementation(QUERY_ATTENTION)
            return self._model


def _cache_of(model: Any, kv: Tensor) -> Any:
    """Return a transformers cache of ``kv`` (``[2, L, T, D]``), which may have no token."""
    from transformers import DynamicCache

    config = model.config.get_text_config()
    cache: Any = DynamicCache(config=model.config)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    planes, layers, length, width = kv.shape
    if planes != 2 or layers != config.num_hidden_layers or width % heads:
        raise InvalidRequestError(
            f"HFQueries: KV of {layers} layers and {width} elements a token is not that of a model with "
            f"{config.num_hidden_layers} layers and {heads} KV heads"
        )
    if length:
        by_head = kv.view(2, layers, length, heads, -1).transpose(2, 3).to(model.device, model.dtype)
        for layer in range(layers):
            cache.update(by_head[0, layer][None], by_head[1, layer][None], layer)
    return cache
