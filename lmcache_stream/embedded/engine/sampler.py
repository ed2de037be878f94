"""From logits to the next token, by transformers' own processors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .params import CompletionParams
from .problems import NotFiniteError

__all__ = ["Sampler"]

# Below it vLLM takes the likeliest token, too.
_GREEDY = 1e-5


class Sampler:
    """Chooses the tokens of one answer; with a seed the same ones each time.

    Args:
        params: of the request.
        ending: ids that end the answer, which ``min_tokens`` forbids for a while.
    """

    def __init__(self, params: CompletionParams, ending: frozenset[int]) -> None:
        from transformers import (
            MinPLogitsWarper,
            RepetitionPenaltyLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        self._params = params
        self._ending = sorted(ending)
        self._is_greedy = params.temperature < _GREEDY
        self._penalties: list[Any] = []
        self._warpers: list[Any] = []
        if params.repetition_penalty != 1:
            self._penalties.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        if not self._is_greedy:
            if params.temperature != 1:
                self._warpers.append(TemperatureLogitsWarper(params.temperature))
            if params.min_p > 0:
                self._warpers.append(MinPLogitsWarper(params.min_p))
            if params.top_k > 0:
                self._warpers.append(TopKLogitsWarper(params.top_k))
            if params.top_p < 1:
                self._warpers.append(TopPLogitsWarper(params.top_p))
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            # Of torch's seeds only the non-negative ones differ from each other in all bits.
            self._generator.manual_seed(params.seed % 2**63)

    def choose(self, logits: Tensor, decoded: Sequence[int]) -> int:
        """Return the next token after the prompt and ``decoded``.

        Args:
            logits: ``[V]`` float32.
            decoded: the answer so far.
        """
        params = self._params
        scores = logits.clone()[None]
        for token, bias in params.logit_bias.items():
            scores[0, token] += bias
        if params.allowed_token_ids is not None:
            allowed = torch.full_like(scores, -torch.inf)
            allowed[0, params.allowed_token_ids] = 0
            scores += allowed
        if len(decoded) < params.min_tokens and self._ending:
            scores[0, self._ending] = -torch.inf
        if self._penalties:
            ids = torch.tensor([[*params.prompt, *decoded]])
            for penalty in self._penalties:
                scores = penalty(ids, scores)
        if decoded and (params.presence_penalty or params.frequency_penalty):
            counts = Counter(decoded)
            times = torch.tensor(list(counts.values()), dtype=scores.dtype)
            scores[0, list(counts)] -= params.presence_penalty + params.frequency_penalty * times
        if not bool(torch.isfinite(scores.max())):
            # Of which greedy decoding would make token 0, silently.
            raise NotFiniteError(
                "the logits are not finite: the cached KV or a sampling parameter makes nonsense of them"
            )
        if self._is_greedy:
            return int(scores.argmax())
        for warper in self._warpers:
            scores = warper(None, scores)
        return int(torch.multinomial(scores.softmax(-1)[0], 1, generator=self._generator))
