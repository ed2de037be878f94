"""The recall demo on the embedded stack: every answer is that of transformers from the same edited KV."""

from __future__ import annotations

import json

import pytest

import lmcache_stream as lms
from lmcache_stream.dropping import HFQueries, KeyDiff
from lmcache_stream.embedded import EmbeddedStack
from lmcache_stream.embedded.demo.as_json import recall_data
from lmcache_stream.embedded.demo.recall_run import RecallStep, demo_policies, run_recall
from lmcache_stream.embedded.demo.recall_task import is_recalled, make_task, recall_prompt
from lmcache_stream.embedded.engine import CausalModel

from ... import reference
from ..engine.test_answers import reference_of
from .conftest import FakeStack

TOKENS = 860


def seed_of(model: CausalModel, behind: range) -> int:
    """A seed whose prompt has so many tokens behind its whole chunks."""
    for seed in range(500):
        task = make_task(model.tokenizer, seed=seed, prompt_tokens=TOKENS)
        if len(recall_prompt(model.tokenizer, task).token_ids) % 32 in behind:
            return seed
    raise AssertionError("no such prompt")


async def test_every_answer_is_that_of_the_reference(model: CausalModel) -> None:
    network = reference_of(model)
    seeds = [seed_of(model, range(1)), seed_of(model, range(10, 20))]
    steps: list[RecallStep] = []
    async with EmbeddedStack(model, cache_gb=0.05) as stack:
        run = run_recall(
            stack,
            seeds,
            demo_policies(0.5),
            HFQueries(network),
            steps.append,
            prompt_tokens=TOKENS,
        )
        recalls = [one async for one in run]
    assert [recall.seed for recall in recalls] == seeds
    assert steps == [RecallStep(task, count) for task in (0, 1) for count in range(6)]
    for recall in recalls:
        prompt = list(recall.prompt.token_ids)
        names = [answer.policy for answer in recall.answers]
        assert names == [None, "RandomDrop", "StreamingLLM", "KeyDiff", "SnapKV"]
        assert len({answer.kept_indices for answer in recall.answers}) == 5
        for answer in recall.answers:
            kept = list(answer.kept_indices)
            wanted = reference.recalled(network, prompt, kept, 32, len(answer.token_ids))
            assert list(answer.token_ids) == wanted
            assert answer.fact_kept == sum(index in kept for index in recall.prompt.fact)
            assert answer.is_right == is_recalled(answer.text, recall.task.code)
            if answer.edit is None:
                assert kept == list(range(len(prompt)))
            else:
                behind = len(prompt) - len(prompt) // 32 * 32
                assert len(kept) == answer.edit.tokens_after + behind
                assert answer.edit.recomputed_tokens == 0
        data = json.loads(json.dumps(recall_data(recall), allow_nan=False))
        assert data["answers"][0]["edit_seconds"] is None
        assert data["answers"][4]["kept"] == list(recall.answers[4].kept_indices)
        assert data["code"] == recall.task.code


async def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_computed(stack: FakeStack) -> None:
    with pytest.raises(lms.InvalidRequestError, match="more than the 1000 that the model takes"):
        async for _ in run_recall(stack, [0], [KeyDiff(ratio=0.5)], HFQueries("nowhere"), prompt_tokens=995):
            pass
    assert stack.post_completion.requests == []
