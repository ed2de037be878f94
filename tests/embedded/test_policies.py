"""Policies in a stream: what they keep is decoded as transformers does, and reported as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lmcache_stream as lms
from lmcache_stream.dropping import (
    RKV,
    TOVA,
    AlwaysKeep,
    CachedPrefix,
    Chain,
    HFQueries,
    KeyDiff,
    KNorm,
    Policy,
    RandomDrop,
    Scored,
    SnapKV,
    StreamingLLM,
    ValueDiff,
    WholeChunks,
)
from lmcache_stream.embedded import EmbeddedStack
from lmcache_stream.embedded.engine import CausalModel

from .. import reference
from ..tiny_model import write_tiny_llama
from .engine.test_answers import GREEDY, layer_0_queries, prompt_of, reference_of

LENGTH = 352
QUERIES = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(5))

POLICIES: list[tuple[Policy, bool]] = [
    (RandomDrop(ratio=0.5), False),
    (StreamingLLM(ratio=0.5), False),
    (KNorm(ratio=0.5), False),
    (KeyDiff(budget=160), False),
    (ValueDiff(ratio=0.75), False),
    (TOVA(ratio=0.5), True),
    (SnapKV(ratio=0.5), True),
    (RKV(ratio=0.5), True),
    (AlwaysKeep(KeyDiff(ratio=0.5), [(10, 20)]), False),
    (WholeChunks(KeyDiff(ratio=0.5), 16), False),
    (Chain([StreamingLLM(ratio=0.25), KeyDiff(ratio=0.5)]), False),
    (Scored(ratio=0.5, function=lambda keys, queries, tokens: torch.tensor(tokens)), False),
]


@pytest.mark.parametrize(
    ("policy", "needs_queries"), POLICIES, ids=[type(one).__name__ for one, _ in POLICIES]
)
async def test_an_edit_by_a_policy_decodes_as_the_reference(
    model: CausalModel, policy: Policy, needs_queries: bool
) -> None:
    prompt, network = prompt_of(LENGTH + 8, seed=9), reference_of(model)
    async with EmbeddedStack(model, cache_gb=0.05) as stack, stack.connect() as context:
        stream = lms.create_request(context, stack.post_completion, prompt)
        await stream.generate({**GREEDY, "max_tokens": 1})
        kv = await stream.retrieve_kv()
        if needs_queries:
            with pytest.raises(lms.InvalidRequestError, match="needs queries"):
                await stream.modify_kv(policy)
            assert stream.edits == ()
        await stream.modify_kv(policy, queries=QUERIES if needs_queries else None)
        await stream.generate({**GREEDY, "max_tokens": 40})
    (report,) = stream.edits
    assert report.kept_indices is not None
    kept = list(report.kept_indices)
    assert len(kept) == report.tokens_after
    assert len(kept) % 32 == 0
    assert 0 < len(kept) < LENGTH
    assert report.recomputed_tokens == 0
    assert list(stream.tokens[: len(kept)]) == [prompt[index] for index in kept]
    edited = reference.dropped(network, kv, kept)
    first, *answer = stream.output_tokens()
    assert answer == reference.decoded(network, edited, [*prompt[LENGTH:], first], 40)


async def test_queries_may_be_made_from_the_kv(model: CausalModel) -> None:
    seen: list[tuple[Any, ...]] = []

    def make(kv: Tensor, tokens: list[int]) -> Tensor:
        seen.append((tuple(kv.shape), len(tokens)))
        return QUERIES

    async def make_later(kv: Tensor, tokens: list[int]) -> Tensor:
        return make(kv, tokens)

    kept = []
    async with EmbeddedStack(model, cache_gb=0.05) as stack, stack.connect() as context:
        for queries in (QUERIES, make, make_later):
            stream = lms.create_request(context, stack.post_completion, prompt_of(LENGTH))
            await stream.generate({**GREEDY, "max_tokens": 1})
            await stream.modify_kv(SnapKV(ratio=0.5), queries=queries)
            kept.append(stream.edits[-1].kept_indices)
    assert seen == [((2, 3, LENGTH, 32), LENGTH)] * 2
    assert kept[0] == kept[1] == kept[2]


BAD: list[tuple[Any, Any, str]] = [
    (SnapKV(ratio=0.5), torch.zeros(3, 32, 63), "queries of shape"),
    (SnapKV(ratio=0.5), lambda kv, tokens: None, "NoneType"),
    (SnapKV(ratio=0.5), 5, "int"),
    (lms.keep(range(32)), QUERIES, "queries= are for policies"),
    (KeyDiff(budget=16), None, "less than one chunk"),
    (KeyDiff(ratio=0.95, window=64), None, "window of 64"),
    (KeyDiff, None, "keep"),
    ("KeyDiff", None, "a policy or a function"),
]


@pytest.mark.parametrize(("policy", "queries", "message"), BAD)
async def test_what_cannot_be_done_is_refused_and_changes_nothing(
    model: CausalModel, policy: Any, queries: Any, message: str
) -> None:
    async with EmbeddedStack(model, cache_gb=0.05) as stack, stack.connect() as context:
        stream = lms.create_request(context, stack.post_completion, prompt_of(LENGTH))
        await stream.generate({**GREEDY, "max_tokens": 1})
        before = stream.tokens, stream.cache_salt
        with pytest.raises(lms.InvalidRequestError, match=message):
            await stream.modify_kv(policy, queries=queries)
        assert (stream.tokens, stream.cache_salt) == before
        assert stream.edits == ()


@pytest.mark.parametrize("make", [KeyDiff, KNorm, StreamingLLM])
async def test_ten_rounds_keep_positions_ids_and_text_right(
    model: CausalModel, make: Callable[..., Policy]
) -> None:
    prompt, network = prompt_of(400, seed=4), reference_of(model)
    whole = list(prompt)
    kept_at_last = list(range(len(prompt)))
    async with EmbeddedStack(model, cache_gb=0.1) as stack, stack.connect() as context:
        stream = lms.create_request(context, stack.post_completion, prompt)
        salts = set()
        for _ in range(10):
            # The tail that was decoded is offloaded by the pass that prefills it.
            await stream.generate({**GREEDY, "max_tokens": 1})
            kv = await stream.retrieve_kv()
            before = list(stream.tokens)
            await stream.modify_kv(make(ratio=0.25, window=16))
            report = stream.edits[-1]
            assert report.kept_indices is not None
            answer_from = len(stream.output_tokens())
            await stream.generate({**GREEDY, "max_tokens": 24})
            answer = stream.output_tokens()[answer_from:]
            whole = [*prompt, *stream.output_tokens()]
            salts.add(stream.cache_salt)
            # The reference edits the KV that was retrieved, at the places that the report names.
            places = {origin: place for place, origin in enumerate(kept_at_last)}
            fresh = len(before) - len(kept_at_last)
            for origin in range(len(whole) - len(answer) - fresh, len(whole) - len(answer)):
                places[origin] = len(places)
            rows = [places[origin] for origin in report.kept_indices]
            edited = reference.dropped(network, kv, rows)
            rest = before[kv.shape[2] :]
            assert answer == reference.decoded(network, edited, rest, 24)
            assert [whole[origin] for origin in report.kept_indices] == list(stream.tokens[: len(rows)])
            kept_at_last = [*report.kept_indices, *range(len(whole) - len(answer) - len(rest), len(whole))]
    assert len(salts) == 10
    assert len(stream.edits) == 10
    assert len(stream.output_tokens()) == 10 * 25


async def test_queries_of_what_follows_the_whole_chunks(model: CausalModel) -> None:
    prompt, network = prompt_of(LENGTH + 20, seed=3), reference_of(model)
    queries = HFQueries(network, window=32)
    async with EmbeddedStack(model, cache_gb=0.05) as stack, stack.connect() as context:
        stream = lms.create_request(context, stack.post_completion, prompt)
        await stream.generate({**GREEDY, "max_tokens": 3})
        kv = await stream.retrieve_kv()
        await stream.modify_kv(SnapKV(ratio=0.5), queries=queries)
    whole = [*prompt, *stream.output_tokens()]
    behind = whole[LENGTH:]
    made = queries(kv, prompt[:LENGTH], behind)
    wanted = layer_0_queries(model, whole)[-32:]
    torch.testing.assert_close(made[0], wanted, rtol=1e-4, atol=1e-4)
    prefix = CachedPrefix.of(
        kv, prompt[:LENGTH], num_kv_heads=kv.shape[3] // 16, queries=made, num_behind=len(behind)
    )
    kept = SnapKV(ratio=0.5).kept_indices(prefix, 32)
    assert stream.edits[-1].kept_indices == tuple(kept.tolist())
    # Those of the chunks alone choose otherwise, and of a long end the chunks' are not among them.
    alone = CachedPrefix.of(
        kv, prompt[:LENGTH], num_kv_heads=kv.shape[3] // 16, queries=queries(kv, prompt[:LENGTH])
    )
    assert not torch.equal(kept, SnapKV(ratio=0.5).kept_indices(alone, 32))
    longer = prompt_of(LENGTH + 100, seed=3)
    made = queries(kv, longer[:LENGTH], longer[LENGTH:])
    torch.testing.assert_close(made[0], layer_0_queries(model, longer)[-32:], rtol=1e-4, atol=1e-4)


async def test_a_callers_function_can_ask_for_what_follows_the_whole_chunks(model: CausalModel) -> None:
    prompt, made_by = prompt_of(LENGTH + 20, seed=3), HFQueries(reference_of(model), window=32)
    seen: list[int] = []

    def plain(kv: torch.Tensor, tokens: list[int], *, behind: Sequence[int]) -> torch.Tensor:
        seen.extend([len(tokens), *behind])
        return made_by(kv, tokens, behind)

    async def awaited(kv: torch.Tensor, tokens: list[int], behind: Sequence[int]) -> torch.Tensor:
        return await asyncio.to_thread(plain, kv, tokens, behind=behind)

    class Made:
        async def __call__(self, kv: torch.Tensor, tokens: list[int], behind: Sequence[int]) -> torch.Tensor:
            return await awaited(kv, tokens, behind)

    async with EmbeddedStack(model, cache_gb=0.05) as stack, stack.connect() as context:
        kept = []
        for queries in (made_by, plain, awaited, Made()):
            seen.clear()
            stream = lms.create_request(context, stack.post_completion, prompt)
            await stream.generate({**GREEDY, "max_tokens": 1})
            await stream.modify_kv(SnapKV(ratio=0.5), queries=queries)
            assert seen == (
                [] if queries is made_by else [LENGTH, *prompt[LENGTH:], stream.output_tokens()[0]]
            )
            kept.append(stream.edits[-1].kept_indices)
    assert len(set(kept)) == 1


async def test_queries_of_a_hugging_face_model(model: CausalModel, tmp_path: Path) -> None:
    network = reference_of(model)
    async with EmbeddedStack(model, cache_gb=0.05) as stack, stack.connect() as context:
        kept = []
        for source in (network, model.name):
            stream = lms.create_request(context, stack.post_completion, prompt_of(LENGTH))
            await stream.generate({**GREEDY, "max_tokens": 1})
            kv = await stream.retrieve_kv()
            queries = HFQueries(source, window=32)
            made = queries(kv, prompt_of(LENGTH))
            assert made.shape == (3, 32, 64)
            wanted = layer_0_queries(model, prompt_of(LENGTH))[-32:]
            torch.testing.assert_close(made[0], wanted, rtol=1e-4, atol=1e-4)
            await stream.modify_kv(SnapKV(ratio=0.5), queries=queries)
            kept.append(stream.edits[-1].kept_indices)
            await stream.generate({**GREEDY, "max_tokens": 4})
        assert kept[0] == kept[1]
        other = await asyncio.to_thread(write_tiny_llama, tmp_path / "other", seed=1)
        stream = lms.create_request(context, stack.post_completion, prompt_of(LENGTH))
        await stream.generate({**GREEDY, "max_tokens": 1})
        with pytest.raises(lms.InvalidRequestError, match="not the model that the engine serves"):
            await stream.modify_kv(SnapKV(ratio=0.5), queries=HFQueries(str(other)))
        fewer = await asyncio.to_thread(write_tiny_llama, tmp_path / "fewer", num_hidden_layers=2)
        with pytest.raises(lms.InvalidRequestError, match="2 layers"):
            await stream.modify_kv(SnapKV(ratio=0.5), queries=HFQueries(str(fewer)))
        assert stream.edits == ()


def test_a_window_longer_than_the_prefix(model: CausalModel) -> None:
    prompt, network = prompt_of(20), reference_of(model)
    kv = reference.kv_of(network, prompt, 20)
    made = HFQueries(network, window=64)(kv, prompt)
    torch.testing.assert_close(made[0], layer_0_queries(model, prompt), rtol=1e-4, atol=1e-4)
    with pytest.raises(lms.InvalidRequestError, match="window=0"):
        HFQueries(network, window=0)


def test_a_model_for_queries_that_cannot_be_loaded_is_an_error_of_the_library(tmp_path: Path) -> None:
    with pytest.raises(lms.InvalidRequestError, match="HFQueries: transformers cannot load the model"):
        HFQueries(str(tmp_path))(torch.zeros(2, 3, 32, 32), range(32))
