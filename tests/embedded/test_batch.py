"""A batch on the embedded stack: every row decodes as transformers does from the same edited KV."""

from __future__ import annotations

import lmcache_stream as lms
from lmcache_stream.dropping import KeyDiff
from lmcache_stream.embedded import EmbeddedStack
from lmcache_stream.embedded.engine import CausalModel

from .. import reference
from .engine.test_answers import GREEDY, prompt_of, reference_of

LENGTH = 96


async def test_a_batch_decodes_as_the_reference_row_by_row(model: CausalModel) -> None:
    prompts, network = [prompt_of(LENGTH + 5, seed=seed) for seed in range(6)], reference_of(model)
    async with EmbeddedStack(model, cache_gb=0.05) as stack, stack.connect() as context:
        batch = lms.AsyncLMCacheBatchedStream(3)
        for prompt in prompts:
            batch.add(lms.create_request(context, stack.post_completion, prompt))
        # A row that the engine refuses: its prompt is longer than what the model takes.
        batch.add(lms.create_request(context, stack.post_completion, [1] * 100_000))
        *outcomes, refused = await batch.run(KeyDiff(ratio=0.5), {**GREEDY, "max_tokens": 12})
    assert isinstance(refused.error, lms.EngineStatusError)
    assert (refused.failed_phase, refused.attempts) == ("prefill", 1)
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert outcome.edit is not None
        assert outcome.edit.kept_indices is not None
        edited = reference.dropped(
            network, reference.kv_of(network, prompt, LENGTH), list(outcome.edit.kept_indices)
        )
        first, *answer = outcome.token_ids
        assert answer == reference.decoded(network, edited, [*prompt[LENGTH:], first], 12)
    report = batch.get_perf_metrics("run")
    assert (report.completed, report.failures) == (6, {"EngineStatusError": 1})
    assert report.output_tokens == 6 * 13
    assert report.kv_bytes_before == 6 * LENGTH * context.geometry.bytes_per_token
    assert report.kv_bytes_after < report.kv_bytes_before
    assert report.cached_tokens == sum(each.edit.tokens_after for each in outcomes if each.edit)
