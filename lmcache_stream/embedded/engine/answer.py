"""One answer: the prefix loaded, the rest of the prompt computed, tokens chosen one after the other."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._workers import Workers
from .model import CausalModel
from .params import CompletionParams
from .prefixes import PrefixCache
from .sampler import Sampler
from .text import Detokenizer, StopStrings

__all__ = ["Answer", "Decoded"]

# Tokens of a prompt that are computed at a time: long prompts take turns with other requests, and one that is
# left stops soon.
_PREFILL_STEP = 512


@dataclass(frozen=True, slots=True)
class Decoded:
    """One token, and what it brings: text that is certain, and at the end why it ended.

    Attributes:
        stop_reason: the stop string or token id that ended the answer, else None.
    """

    token_id: int
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Answer:
    """Decodes one request.

    Each step is a job of its own in ``workers``, whose queue is in order of arrival: requests take turns.

    Attributes:
        cached_tokens: tokens of the prompt whose KV came from the cache; 0 before it is known.
    """

    def __init__(
        self,
        model: CausalModel,
        params: CompletionParams,
        workers: Workers,
        prefixes: PrefixCache | None,
        queries: PrefixCache | None = None,
    ) -> None:
        self._model = model
        self._params = params
        self._workers = workers
        self._prefixes = prefixes
        self._queries = queries
        self._eos = frozenset() if params.ignore_eos else model.eos_token_ids
        self._sampler = Sampler(params, self._eos | params.stop_token_ids)
        self._text = Detokenizer(
            model.tokenizer, params.prompt, skip_special_tokens=params.skip_special_tokens
        )
        self._stops = StopStrings(params.stop, keep=params.include_stop_str_in_output)
        self._recorded: list[Tensor] = []
        self._decoded: list[int] = []
        self._found = 0
        self.cached_tokens = 0

    async def tokens(self) -> AsyncGenerator[Decoded]:
        """Yield the tokens as they are decoded; the last one has a finish reason."""
        prompt, workers = self._params.prompt, self._workers
        cache = await self._load()
        start = self.cached_tokens
        while len(prompt) - start > _PREFILL_STEP:
            await workers.run(self._prefill, prompt[start : start + _PREFILL_STEP], cache)
            start += _PREFILL_STEP
        decoded = await workers.run(self._advance, prompt[start:], cache)
        self._offload(cache)
        yield decoded
        while decoded.finish_reason is None:
            decoded = await workers.run(self._advance, [decoded.token_id], cache)
            yield decoded

    async def _load(self) -> Any:
        params, kv = self._params, None
        if self._prefixes is not None:
            kv = await self._prefixes.load(params.prompt, params.cache_salt)
        # The last token is always computed: its logits are what the first decoded one is chosen by.
        self._found = 0 if kv is None else kv.shape[2]
        self.cached_tokens = min(self._found, len(params.prompt) - 1)
        return await self._workers.run(self._model.new_cache, kv, self.cached_tokens)

    def _prefill(self, tokens: list[int], cache: Any) -> Tensor:
        if self._queries is None or self.cached_tokens or self._decoded:
            return self._model.forward(tokens, cache)
        logits, queries = self._model.forward_recording(tokens, cache)
        self._recorded.append(queries)
        return logits

    def _advance(self, tokens: list[int], cache: Any) -> Decoded:
        params = self._params
        token = self._sampler.choose(self._prefill(tokens, cache), self._decoded)
        self._decoded.append(token)
        if token in self._eos or token in params.stop_token_ids:
            shown = self._text.push(token) if params.include_stop_str_in_output else ""
            return self._end(token, self._stops.push(shown), "stop", None if token in self._eos else token)
        text = self._stops.push(self._text.push(token), search=len(self._decoded) > params.min_tokens)
        if self._stops.found is not None:
            return Decoded(token, text, "stop", self._stops.found)
        if len(self._decoded) == params.max_tokens:
            return self._end(token, text, "length", None)
        return Decoded(token, text)

    def _end(self, token: int, text: str, reason: str, stop: int | None) -> Decoded:
        rest = self._stops.push(self._text.flush())
        if self._stops.found is not None:
            return Decoded(token, text + rest, "stop", self._stops.found)
        return Decoded(token, text + rest + self._stops.flush(), reason, stop)

    def _offload(self, cache: Any) -> None:
        prompt, salt = self._params.prompt, self._params.cache_salt
        if self._prefixes is None or (whole := self._prefixes.whole(len(prompt))) <= self._found:
            return
        self._prefixes.offload_soon(
            lambda: self._workers.run(self._model.kv_of, cache, whole), prompt[:whole], salt
        )
        recorded, self._recorded = self._recorded, []
        if self._queries is not None and recorded:
            self._queries.offload_soon(
                lambda: self._workers.run(_first, recorded, whole), prompt[:whole], salt
            )


def _first(parts: list[Tensor], length: int) -> Tensor:
    return torch.cat(parts, dim=2)[:, :, :length].contiguous()
