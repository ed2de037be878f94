"""``connect(queries=True)``: policies on the queries that the engine offloads beside its KV."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

import lmcache_stream as lms
from lmcache_stream.cache.model_config import ModelConfig
from lmcache_stream.cache.server_queries import discover_queries
from lmcache_stream.dropping import RKV, TOVA, AlwaysKeep, Chain, HFQueries, KeyDiff, Policy, SnapKV
from lmcache_stream.embedded import EmbeddedStack
from lmcache_stream.embedded.engine import CausalModel

from .engine.test_answers import GREEDY, reference_of


@pytest.fixture(scope="module")
def recorder(tiny_folder: Path) -> CausalModel:
    return CausalModel.load(str(tiny_folder), records_queries=True)


# Few words, so that many repeat.
PROMPT = [random.Random(4).randrange(3, 60) for _ in range(360)]
PREFIX = PROMPT[:352]
HEADS = "num_attention_heads"
RAW = {HEADS: 4, "num_key_value_heads": 2, "hidden_size": 64, "num_hidden_layers": 3}
CONFIG = ModelConfig.from_dict(RAW)

POLICIES: list[Policy] = [
    SnapKV(ratio=0.5),
    TOVA(ratio=0.5),
    RKV(ratio=0.5, window=40),
    AlwaysKeep(SnapKV(ratio=0.5, window=20), [(10, 20)]),
    Chain([KeyDiff(ratio=0.25), SnapKV(ratio=0.5)]),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
async def test_they_choose_as_the_models_own_queries_do(
    model: CausalModel, recorder: CausalModel, policy: Policy
) -> None:
    window = policy.query_window
    async with (
        EmbeddedStack(recorder, cache_gb=0.05, offload_queries=True) as stack,
        stack.connect(queries=True) as context,
    ):
        streams = [lms.create_request(context, stack.post_completion, PROMPT) for _ in range(2)]
        await streams[0].generate({**GREEDY, "max_tokens": 1})
        await streams[0].retrieve_kv()
        assert context.queries is not None
        found = await context.queries.last(PREFIX, "", window, context.rope)
        made = HFQueries(reference_of(model), window=window)
        kv = await context.retrieve(PREFIX)
        assert kv is not None
        wanted = made(kv, PREFIX)
        assert found.shape == wanted.shape
        assert float((found - wanted).norm() / wanted.norm()) < 1e-4
        await streams[0].modify_kv(policy)
        await streams[1].generate({**GREEDY, "max_tokens": 1})
        # As a function of the caller's it is not told what follows the prefix, of which no server keeps any.
        await streams[1].modify_kv(policy, queries=lambda kv, tokens: made(kv, tokens))
    assert streams[0].edits[0].kept_indices == streams[1].edits[0].kept_indices


async def test_where_they_are_not_the_error_says_what_else_there_is(model: CausalModel) -> None:
    async with EmbeddedStack(model, cache_gb=0.05) as stack, stack.connect(queries=True) as context:
        stream = lms.create_request(context, stack.post_completion, PROMPT)
        await stream.generate({**GREEDY, "max_tokens": 1})
        with pytest.raises(
            lms.InvalidRequestError, match=r"the queries of 0 of the prefix's 352 tokens .*HFQueries"
        ):
            await stream.modify_kv(SnapKV(ratio=0.5))
        # Policies that need none do not look for any.
        await stream.modify_kv(KeyDiff(ratio=0.5))
    assert len(stream.edits) == 1


async def test_rows_of_other_tokens_are_refused(model: CausalModel) -> None:
    async with EmbeddedStack(model, cache_gb=0.05) as stack, stack.connect() as context:
        stream = lms.create_request(context, stack.post_completion, PROMPT)
        await stream.generate({**GREEDY, "max_tokens": 1})
        kv = await stream.retrieve_kv()
        right = HFQueries(reference_of(model), window=64)(kv, PREFIX)
        await stream.modify_kv(SnapKV(ratio=0.5, window=64), queries=right)
        other = lms.create_request(context, stack.post_completion, PROMPT)
        for wrong in (right.roll(1, dims=1), right.flip(1), torch.randn_like(right)):
            with pytest.raises(lms.InvalidRequestError, match="not those of the prefix's tokens"):
                await other.modify_kv(SnapKV(ratio=0.5, window=64), queries=wrong)
        assert other.edits == ()


async def test_without_them_the_error_names_three_ways(model: CausalModel) -> None:
    async with EmbeddedStack(model, cache_gb=0.05) as stack, stack.connect() as context:
        stream = lms.create_request(context, stack.post_completion, PROMPT)
        await stream.generate({**GREEDY, "max_tokens": 1})
        with pytest.raises(lms.InvalidRequestError) as raised:
            await stream.modify_kv(SnapKV(ratio=0.5))
    for way in ("HFQueries(model)", "of your own", "queries=True to connect()", "KeyDiff"):
        assert way in str(raised.value)


def test_without_a_number_of_heads_they_cannot_be_opened(model: CausalModel) -> None:
    for config in (
        None,
        dataclasses.replace(CONFIG, raw={}),
        dataclasses.replace(CONFIG, raw={**RAW, HEADS: 0}),
    ):
        with pytest.raises(lms.GeometryError, match=r"queries=True: the attention heads .* model_config="):
            discover_queries("model", model.geometry, config)
    found = discover_queries("model", model.geometry, CONFIG).geometry
    assert (found.num_kv_heads, found.layout) == (RAW[HEADS], "queries")


async def test_an_error_while_they_are_opened_leaves_nothing_open(
    model: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise lms.GeometryError("no heads")

    monkeypatch.setattr("lmcache_stream.cache.connect.discover_queries", refuse)
    async with EmbeddedStack(model, cache_gb=0.05) as stack:
        with pytest.raises(lms.GeometryError, match="no heads"):
            await stack.connect(queries=True)
