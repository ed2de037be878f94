"""A Hugging Face causal language model with the few steps that an engine takes; each of them blocks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from ..._files import is_missing_folder
from ...cache.geometry import KVGeometry
from ...dropping.recording import QUERY_ATTENTION, recording, register
from ...errors import GeometryError, InvalidRequestError

__all__ = ["CausalModel"]

# An engine without a paged cache: its KV can be cut anywhere.
_BLOCK_SIZE = 1


class CausalModel:
    """The model, its tokenizer, and what they say of the KV.

    Attributes:
        name: the folder or Hub id that it was loaded from.
        tokenizer: of transformers.
        records_queries: whether ``forward_recording`` can be used.
        geometry: of its KV, as it is in the cache: two planes.
        num_query_heads: attention heads of a layer.
        vocab_size: token ids are below it.
        longest_token: characters of the longest token.
        max_model_len: the longest sequence, in tokens.
        eos_token_ids: ids that end an answer.
        defaults: sampling parameters that the model's authors recommend, under vLLM's names.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        *,
        max_model_len: int | None = None,
        records_queries: bool = False,
    ) -> None:
        """Take a loaded model.

        Raises:
            GeometryError: its layers do not all attend to all tokens, or do not cache K and V alike.
            InvalidRequestError: ``max_model_len`` is beyond what the model was made for.
        """
        self.name = name
        self.records_queries = records_queries
        self.tokenizer = tokenizer
        self._model = model.eval()
        accepted = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        # Newer models of transformers have another name for it, and warn of the old one.
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        config = model.config.get_text_config()
        self.geometry = self._probe(config)
        self.num_query_heads = int(config.num_attention_heads)
        self.vocab_size = int(config.vocab_size)
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        self.max_model_len = _max_model_len(config, max_model_len)
        generation = model.generation_config
        eos = generation.eos_token_id if generation.eos_token_id is not None else tokenizer.eos_token_id
        self.eos_token_ids = frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        found = {name: getattr(generation, name, None) for name in names}
        self.defaults = {name: value for name, value in found.items() if value is not None}

    @classmethod
    def load(
        cls,
        name: str,
        *,
        dtype: torch.dtype = torch.float32,
        max_model_len: int | None = None,
        records_queries: bool = False,
    ) -> Self:
        """Load a folder or Hub id onto the CPU.

        Raises:
            InvalidRequestError: transformers is missing or cannot load it.
            GeometryError: as the constructor.
        """
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise InvalidRequestError(
                "the embedded engine needs transformers: pip install 'lmcache-stream[embedded]'"
            ) from error
        if records_queries:
            register()
        if is_missing_folder(name):
            # transformers would say what a Hub id may not have in it.
            raise InvalidRequestError(f"transformers cannot load the model {name!r}: there is no such folder")
        attention = {"attn_implementation": QUERY_ATTENTION} if records_queries else {}
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **attention)
        except Exception as error:  # Of transformers, safetensors, torch, or the model's own code.
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InvalidRequestError(f"transformers cannot load the model {name!r}: {reason}") from error
        return cls(model, tokenizer, name, max_model_len=max_model_len, records_queries=records_queries)

    @property
    def config(self) -> Any:
        """The Hugging Face config."""
        return self._model.config

    def _probe(self, config: Any) -> KVGeometry:
        """Read the KV's shape off the cache of one token, whatever the config calls it."""
        if getattr(config, "is_encoder_decoder", False):
            raise GeometryError(f"{self.name!r} is an encoder-decoder model: only decoders have one KV cache")
        cache = self.new_cache()
        self.forward([0], cache)
        layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
        shapes = {(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in layers}
        kinds = {type(layer).__name__ for layer in cache.layers}
        if kinds != {"DynamicLayer"} or len(shapes) != 1 or len(layers) != len(cache.layers):
            raise GeometryError(
                f"{self.name!r} has layers of the kinds {', '.join(sorted(kinds))} (sliding-window, "
                "hybrid or recurrent): an edit by tokens cannot be right for all of them"
            )
        ((keys, values),) = shapes
        if keys != values:
            raise GeometryError(
                f"{self.name!r} caches keys of {keys[-1]} and values of {values[-1]} a head: refused"
            )
        return KVGeometry(
            num_layers=len(layers),
            num_kv_heads=keys[1],
            head_size=keys[3],
            dtype=layers[0].keys.dtype,
            layout="two-plane",
            block_size=_BLOCK_SIZE,
        )

    def new_cache(self, kv: Tensor | None = None, length: int = 0) -> Any:
        """Return a transformers cache that holds the first ``length`` tokens of ``kv`` (``[2, L, T, D]``)."""
        from transformers import DynamicCache

        cache: Any = DynamicCache(config=self._model.config)
        if kv is not None and length:
            heads = (length, self.geometry.num_kv_heads, self.geometry.head_size)
            for layer in range(self.geometry.num_layers):
                keys, values = (
                    kv[plane, layer, :length].view(heads).transpose(0, 1)[None] for plane in (0, 1)
                )
                cache.update(keys, values, layer)
        return cache

    def forward(self, tokens: Sequence[int], cache: Any) -> Tensor:
        """Append ``tokens`` to ``cache`` and return the logits behind the last, ``[V]`` float32."""
        given = {self._cache_name: cache, **self._last_only}
        with torch.no_grad():
            answer = self._model(input_ids=torch.tensor([list(tokens)]), use_cache=True, **given)
        logits: Tensor = answer.logits[0, -1].float()
        return logits

    def forward_recording(self, tokens: Sequence[int], cache: Any) -> tuple[Tensor, Tensor]:
        """As ``forward``, with the rotated queries of ``tokens``, ``[1, L, T, query heads x head size]``."""
        with recording() as recorded:
            logits = self.forward(tokens, cache)
        queries = [one[0].transpose(0, 1).flatten(1) for one in recorded]
        return logits, torch.stack(queries)[None]

    def kv_of(self, cache: Any, length: int) -> Tensor:
        """Return a copy of the cache's first ``length`` tokens, ``[2, L, length, D]``."""
        geometry = self.geometry
        kv = torch.empty(geometry.kv_shape(length), dtype=geometry.dtype)
        by_head = kv.view(2, geometry.num_layers, length, geometry.num_kv_heads, geometry.head_size)
        for index, layer in enumerate(cache.layers):
            by_head[0, index].copy_(layer.keys[0, :, :length].transpose(0, 1))
            by_head[1, index].copy_(layer.values[0, :, :length].transpose(0, 1))
        return kv


def _max_model_len(config: Any, wanted: int | None) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if wanted is None:
        if limit is None:
            raise InvalidRequestError(
                "the model's config names no max_position_embeddings: pass max_model_len="
            )
        return int(limit)
    if wanted < 1 or (limit is not None and wanted > limit):
        raise InvalidRequestError(f"max_model_len={wanted}: the model was made for 1 to {limit} tokens")
    return wanted
