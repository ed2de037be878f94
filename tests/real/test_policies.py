"""Policies on real vLLM and LMCache: what they keep is decoded as transformers does."""

from __future__ import annotations

import secrets

import pytest
import torch

import lmcache_stream as lms
from lmcache_stream.dropping import (
    RKV,
    TOVA,
    HFQueries,
    KeyDiff,
    KNorm,
    Policy,
    RandomDrop,
    SnapKV,
    StreamingLLM,
    ValueDiff,
)

from .. import reference
from .conftest import RealStack, long_prompt
from .reference import model

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    # In float32, so that rounding does not choose between tokens that are nearly as likely.
    pytest.mark.parametrize("stack", ["float32-shared-memory"], indirect=True),
]

POLICIES: list[Policy] = [
    RandomDrop(ratio=0.5),
    StreamingLLM(ratio=0.5),
    KNorm(ratio=0.25),
    KeyDiff(ratio=0.5),
    ValueDiff(ratio=0.5),
    TOVA(ratio=0.5),
    SnapKV(ratio=0.75),
    RKV(budget=480),
]


@pytest.mark.parametrize("policy", POLICIES, ids=[type(one).__name__ for one in POLICIES])
async def test_an_edit_by_a_policy_decodes_as_the_reference(stack: RealStack, policy: Policy) -> None:
    prompt, network = long_prompt(4000), model(torch.float32)
    async with (
        lms.connect(stack.cache.url, stack.cache.http_url, stack.model_name) as context,
        lms.VLLMCompletions(stack.engine.url, stack.engine.model) as engine,
    ):
        stream = lms.create_request(context, engine, prompt, f"policy-{secrets.token_hex(4)}")
        await stream.generate({"max_tokens": 1, "temperature": 0})
        kv = await stream.retrieve_kv()
        queries = HFQueries(network) if policy.needs_queries else None
        await stream.modify_kv(policy, queries=queries)
        await stream.generate({"max_tokens": 40, "temperature": 0, "ignore_eos": True})
    (report,) = stream.edits
    assert report.kept_indices is not None
    length = kv.shape[2]
    assert 0 < len(report.kept_indices) < length
    assert report.recomputed_tokens == 0
    edited = reference.dropped(network, kv, list(report.kept_indices))
    first, *answer = stream.output_tokens()
    wanted = reference.decoded(network, edited, [*prompt[length:], first], 40)
    same = sum(one == other for one, other in zip(answer, wanted, strict=True))
    assert same == 40, f"{same} of 40 tokens are equal"
