"""One prompt of the recall task, prefilled once and answered from several edits of its KV."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import torch

import lmcache_stream as lms

from ...dropping import Policy
from .recall_task import RecallPrompt, RecallTask, is_recalled
from .run import Stack

__all__ = ["Prefilled", "RecallAnswer", "prefill", "recall"]

# A space, four digits and what ends the number, by a tokenizer that knows single digits alone.
_ANSWER_TOKENS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """A prompt whose KV is in the cache.

    Attributes:
        task: what is asked.
        prompt: the same as token ids.
        cache_salt: what it is cached under.
        kv: its whole chunks, ``[2, L, T, D]``.
        seconds: time that the engine took.
    """

    task: RecallTask
    prompt: RecallPrompt
    cache_salt: str
    kv: torch.Tensor
    seconds: float

    @property
    def cached_token_ids(self) -> tuple[int, ...]:
        """The T tokens of ``kv``."""
        return self.prompt.token_ids[: self.kv.shape[2]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallAnswer:
    """What was decoded from one edit of a prompt's KV, or from the whole.

    Attributes:
        text: behind the words that were given.
        token_ids: the same as ids.
        is_right: whether it begins with the code.
        kept_indices: indices of the prompt's tokens that were left.
        fact_kept: how many tokens of the asked sentence are among them.
        edit: the report of the edit; None for the whole KV.
        ttft: seconds to the first token.
        decode_seconds: of the whole decoding pass.
    """

    text: str
    token_ids: tuple[int, ...]
    is_right: bool
    kept_indices: tuple[int, ...]
    fact_kept: int
    edit: lms.EditReport | None
    ttft: float | None
    decode_seconds: float


async def prefill(
    stack: Stack, context: lms.AsyncLMCacheContext, task: RecallTask, prompt: RecallPrompt
) -> Prefilled:
    """Compute a prompt's KV, under a salt of its own, and wait until it is in the cache."""
    salt = f"recall-{secrets.token_hex(8)}"
    stream = lms.create_request(context, stack.post_completion, prompt.token_ids, salt)
    metrics = await stream.generate({"max_tokens": 1, "temperature": 0})
    kv = await stream.retrieve_kv()
    return Prefilled(task=task, prompt=prompt, cache_salt=salt, kv=kv, seconds=metrics.duration)


async def recall(
    stack: Stack,
    context: lms.AsyncLMCacheContext,
    prefilled: Prefilled,
    policy: Policy | None = None,
    *,
    queries: torch.Tensor | None = None,
) -> RecallAnswer:
    """Decode the answer from KV that ``policy`` has edited, or from the whole where it is None.

    Each call edits a copy: the prefilled KV stays as it was.
    """
    prompt = prefilled.prompt
    # A stream of its own, because of the one that prefilled, the first token was decoded from the whole KV.
    stream = lms.create_request(context, stack.post_completion, prompt.token_ids, prefilled.cache_salt)
    kept = range(len(prefilled.cached_token_ids))
    edit = None
    if policy is not None:
        await stream.modify_kv(policy, queries=queries)
        edit = stream.edits[-1]
        assert edit.kept_indices is not None
        kept = edit.kept_indices
    metrics = await stream.generate({"max_tokens": _ANSWER_TOKENS, "temperature": 0})
    behind = range(len(prefilled.cached_token_ids), len(prompt.token_ids))
    text = stream.output_text()
    every = (*kept, *behind)
    return RecallAnswer(
        text=text,
        token_ids=tuple(stream.output_tokens()),
        is_right=is_recalled(text, prefilled.task.code),
        kept_indices=every,
        fact_kept=len(set(every) & set(prompt.fact)),
        edit=edit,
        ttft=metrics.ttft,
        decode_seconds=metrics.duration,
    )
