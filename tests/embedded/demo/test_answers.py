"""The demo on the embedded stack: its answers are those of transformers, whole and edited."""

from __future__ import annotations

import torch

from lmcache_stream.embedded import EmbeddedStack
from lmcache_stream.embedded.demo import Document, Options, run_demo
from lmcache_stream.embedded.demo.plan import kept_indices
from lmcache_stream.embedded.engine import CausalModel

from ... import reference
from ..engine.test_answers import reference_of

DOCUMENT = Document("a text", "So it goes, and on it goes. " * 30, "Where does it go?")


async def test_both_answers_are_those_of_the_reference(model: CausalModel) -> None:
    async with EmbeddedStack(model, cache_gb=0.05) as stack:
        (found,) = [one async for one in run_demo(stack, [DOCUMENT], Options(max_tokens=30))]
    network, prompt = reference_of(model), list(found.prompt_token_ids)
    length = len(prompt) // 32 * 32
    whole = reference.kv_of(network, prompt, length)
    kept = kept_indices(found.dropped, length)
    assert len(kept) < length
    edited = reference.dropped(network, whole, kept)
    # Both prefills decode the first token from the whole prompt.
    first = found.whole.token_ids[0]
    for answer, kv in ((found.whole, whole), (found.edited, edited)):
        assert answer.token_ids[0] == first
        rest = reference.decoded(network, kv, [*prompt[length:], first], 29)
        assert list(answer.token_ids[1:]) == rest[: len(answer.token_ids) - 1]
        assert len(answer.token_ids) > 2
    assert found.whole.token_ids != found.edited.token_ids
    assert not torch.equal(whole[:, :, : len(kept)], edited)
