"""The recall task on a stack: a prompt is prefilled once, and answered from several edits of its KV."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

import lmcache_stream as lms

from ..._editing import Queries
from ...dropping import HFQueries, KeyDiff, Policy, RandomDrop, SnapKV, StreamingLLM
from .plan import check_length
from .recall_task import RecallPrompt, RecallTask, is_recalled, make_task, recall_prompt
from .run import Stack

__all__ = ["Recall", "RecallAnswer", "RecallStep", "demo_policies", "prefill", "recall", "run_recall"]

# A space, four digits and what ends the number, by a tokenizer that knows single digits alone.
_ANSWER_TOKENS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallAnswer:
    """What was decoded from one edit of a prompt's KV, or from the whole.

    Attributes:
        policy: name of the policy that chose; None for the whole KV.
        text: behind the words that were given.
        token_ids: the same as ids.
        is_right: whether it begins with the code.
        kept_indices: indices of the prompt's tokens that were left.
        fact_kept: how many tokens of the asked sentence are among them.
        edit: the report of the edit; None for the whole KV.
        ttft: seconds to the first token.
        cached_tokens: tokens whose KV the engine took from the cache.
    """

    policy: str | None
    text: str
    token_ids: tuple[int, ...]
    is_right: bool
    kept_indices: tuple[int, ...]
    fact_kept: int
    edit: lms.EditReport | None
    ttft: float | None
    cached_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """The answers to one task.

    Attributes:
        seed: of the task.
        task: what was asked.
        prompt: the same as token ids.
        prefill_seconds: the pass in which the engine computed the prompt's KV.
        answers: from the whole KV, then one a policy.
    """

    seed: int
    task: RecallTask
    prompt: RecallPrompt
    prefill_seconds: float
    answers: tuple[RecallAnswer, ...]


@dataclass(frozen=True, slots=True)
class RecallStep:
    """Where the run is: the index of the task, and its answers so far."""

    task: int
    answers: int


def demo_policies(ratio: float) -> tuple[Policy, ...]:
    """Return the policies that are shown beside the whole KV."""
    return (
        RandomDrop(ratio=ratio),
        StreamingLLM(ratio=ratio),
        KeyDiff(ratio=ratio),
        SnapKV(ratio=ratio),
    )


async def prefill(
    stack: Stack, context: lms.AsyncLMCacheContext, prompt: RecallPrompt, cache_salt: str
) -> float:
    """Have the engine compute a prompt's KV, and wait until it is cached; return the engine's seconds."""
    stream = lms.create_request(context, stack.post_completion, prompt.token_ids, cache_salt)
    metrics = await stream.generate({"max_tokens": 1, "temperature": 0})
    # Engines offload in the background: without this wait the whole prompt would be computed again.
    await stream.retrieve_kv()
    return metrics.duration


async def recall(
    stack: Stack,
    context: lms.AsyncLMCacheContext,
    task: RecallTask,
    prompt: RecallPrompt,
    cache_salt: str,
    policy: Policy | None = None,
    *,
    queries: Queries | None = None,
) -> RecallAnswer:
    """Decode the answer from KV that ``policy`` has edited, or from the whole where it is None.

    The prompt is prefilled under ``cache_salt``; its KV there stays as it was.
    """
    # A stream of its own: of the one that prefilled, the first token was decoded from the whole KV.
    stream = lms.create_request(context, stack.post_completion, prompt.token_ids, cache_salt)
    kept: Sequence[int] = range(len(prompt.token_ids))
    edit = None
    if policy is not None:
        await stream.modify_kv(policy, queries=queries if policy.needs_queries else None)
        edit = stream.edits[-1]
        assert edit.kept_indices is not None
        kept = (*edit.kept_indices, *kept[edit.tokens_before :])
    metrics = await stream.generate({"max_tokens": _ANSWER_TOKENS, "temperature": 0})
    text = stream.output_text()
    return RecallAnswer(
        policy=None if policy is None else type(policy).__name__,
        text=text,
        token_ids=tuple(stream.output_tokens()),
        is_right=is_recalled(text, task.code),
        kept_indices=tuple(kept),
        fact_kept=len(set(kept).intersection(prompt.fact)),
        edit=edit,
        ttft=metrics.ttft,
        cached_tokens=metrics.cached_tokens,
    )


async def run_recall(
    stack: Stack,
    seeds: Sequence[int],
    policies: Sequence[Policy],
    queries: HFQueries,
    on_step: Callable[[RecallStep], None] = lambda _: None,
    *,
    prompt_tokens: int = 960,
) -> AsyncGenerator[Recall, None]:
    """Yield the answers to the task of each seed, in order; close the iterator if it is left early.

    Args:
        stack: where it runs.
        seeds: of the tasks.
        policies: what edits the KV, each a copy of its own.
        queries: for the policies that need them.
        on_step: called before the first answer to a task and after each.
        prompt_tokens: see ``make_task``.

    Raises:
        InvalidRequestError: the prompt does not fit into the model, or a policy cannot choose.
        LMCacheStreamError: what streams raise.
    """
    check_length(prompt_tokens=prompt_tokens, max_tokens=_ANSWER_TOKENS, max_model_len=stack.max_model_len)
    async with stack.connect() as context:
        for index, seed in enumerate(seeds):
            on_step(RecallStep(index, 0))
            task = await asyncio.to_thread(make_task, stack.tokenizer, seed=seed, prompt_tokens=prompt_tokens)
            prompt = recall_prompt(stack.tokenizer, task)
            salt = f"recall-{secrets.token_hex(8)}"
            seconds = await prefill(stack, context, prompt, salt)
            answers: list[RecallAnswer] = []
            for policy in (None, *policies):
                answers.append(await recall(stack, context, task, prompt, salt, policy, queries=queries))
                on_step(RecallStep(index, len(answers)))
            yield Recall(seed=seed, task=task, prompt=prompt, prefill_seconds=seconds, answers=tuple(answers))
