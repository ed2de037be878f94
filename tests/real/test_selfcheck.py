"""The layer-0 self-check on KV of a real engine: what is right is accepted, all else is refused."""

from __future__ import annotations

import dataclasses
import json
import secrets
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import lmcache_stream as lms
from lmcache_stream.cache.layout_check import find_layout, verify_layout
from lmcache_stream.cache.selfcheck import MAX_SPREAD, check_layer0, measure_spread
from lmcache_stream.rope import RopeConfig

from ..cache.combinations import applicable, chunk_of, combinations, ropes_of, shaped, splits_of
from .conftest import RealStack, long_prompt, until_unlocked

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.parametrize("stack", ["bfloat16-shared-memory", "float32-shared-memory"], indirect=True),
]


@dataclass(frozen=True)
class Retrieved:
    """Layer 0 of a real prompt's KV, as the library retrieved it."""

    layer0: torch.Tensor
    tokens: list[int]
    prompt: list[int]
    salt: str
    engine: lms.KVGeometry
    config: dict[str, Any]

    @property
    def geometry(self) -> lms.KVGeometry:
        return dataclasses.replace(self.engine, num_layers=1)


def config_of(stack: RealStack) -> dict[str, Any]:
    """Return the model's config, the size of a head written out."""
    read: dict[str, Any] = json.loads((stack.engine.model_path / "config.json").read_text())
    return {**read, "head_dim": read["hidden_size"] // read["num_attention_heads"]}


async def retrieve(stack: RealStack) -> Retrieved:
    prompt, salt = long_prompt(6000), f"selfcheck-{secrets.token_hex(4)}"
    async with (
        lms.connect(stack.cache.url, stack.cache.http_url, stack.model_name) as context,
        lms.VLLMCompletions(stack.engine.url, stack.engine.model) as engine,
    ):
        stream = lms.create_request(context, engine, prompt, salt)
        await stream.generate({"max_tokens": 1, "temperature": 0})
        kv = await stream.retrieve_kv()
        geometry = context.geometry
    tokens = prompt[: kv.shape[2]]
    return Retrieved(kv[:, 0].clone(), tokens, prompt, salt, geometry, config_of(stack))


@pytest.fixture(scope="module")
def cached() -> dict[str, Retrieved]:
    return {}


@pytest.fixture
async def retrieved(stack: RealStack, cached: dict[str, Retrieved]) -> Retrieved:
    """The KV of one prefill in each stack, retrieved by the first test that asks for it."""
    if stack.cache.url not in cached:
        cached[stack.cache.url] = await retrieve(stack)
    return cached[stack.cache.url]


def test_of_all_combinations_the_right_one_alone_is_accepted(retrieved: Retrieved) -> None:
    count, written = len(retrieved.tokens), retrieved.geometry
    chunk = chunk_of(retrieved.layer0, written)
    accepted, refused = [], []
    for found in combinations(chunk, written, retrieved.config, count):
        spread = measure_spread(found.keys, retrieved.tokens, found.rope)
        assert spread is not None
        try:
            check_layer0(found.keys, retrieved.tokens, found.rope, layout=found.geometry.layout)
        except lms.LayoutError:
            refused.append((spread, found.name))
        else:
            accepted.append((spread, found.name, found.is_right))
    assert [right for *_, right in accepted] == [True], accepted
    assert accepted[0][0] < MAX_SPREAD / 3
    assert min(refused)[0] > 10 * MAX_SPREAD, min(refused)
    layouts, splits = applicable(written, count), splits_of(retrieved.config)
    assert len(accepted) + len(refused) == len(layouts) * len(splits) * len(ropes_of(retrieved.config))


def test_the_error_names_the_layout_that_fits(retrieved: Retrieved) -> None:
    count, written = len(retrieved.tokens), retrieved.geometry
    chunk, rope = chunk_of(retrieved.layer0, written), RopeConfig.from_model_config(retrieved.config)
    for layout in applicable(written, count):
        read = dataclasses.replace(written, layout=layout)
        chunks = shaped(chunk, read, count)
        if layout == written.layout:
            assert verify_layout(chunks, retrieved.tokens, read, rope) is not None
            assert find_layout(chunks, retrieved.tokens, read, rope)[0] == layout
            continue
        fits = "nothing else fits" if layout == "two-plane" else f"{written.layout} fits, with 0.00"
        with pytest.raises(lms.LayoutError, match=f"decoded as {layout}, .*; {fits}"):
            verify_layout(chunks, retrieved.tokens, read, rope)


def wrong_connections(retrieved: Retrieved) -> dict[str, dict[str, Any]]:
    """Return what a caller may have got wrong, as arguments of ``connect``."""
    config, engine = retrieved.config, retrieved.engine
    theta = config["rope_parameters"]["rope_theta"]
    halves = {**config, **splits_of(config)["halves"]}
    split = dataclasses.replace(engine, num_kv_heads=2 * engine.num_kv_heads, head_size=engine.head_size // 2)
    return {
        "theta": {
            "model_config": {**config, "rope_parameters": {"rope_type": "default", "rope_theta": theta / 10}}
        },
        "pairing": {"rope": RopeConfig.from_model_config(config, pairing="interleaved")},
        "layout": {"geometry": dataclasses.replace(engine, layout="fused")},
        "head split": {"geometry": split, "model_config": halves},
    }


@pytest.mark.parametrize("wrong", ["theta", "pairing", "layout", "head split"])
async def test_a_context_that_knows_it_wrong_gives_no_kv(
    stack: RealStack, retrieved: Retrieved, wrong: str
) -> None:
    arguments = wrong_connections(retrieved)[wrong]
    async with lms.connect(stack.cache.url, stack.cache.http_url, stack.model_name, **arguments) as context:
        fits = f"{retrieved.engine.layout} fits" if wrong == "layout" else "nothing else fits"
        with pytest.raises(lms.LayoutError, match=rf"layer-0 check: decoded as .*; {fits}"):
            await context.retrieve(retrieved.prompt, retrieved.salt)
        await until_unlocked(stack.cache)
    async with lms.connect(stack.cache.url, stack.cache.http_url, stack.model_name) as context:
        kv = await context.retrieve(retrieved.prompt, retrieved.salt)
    assert kv is not None
    assert torch.equal(kv[:, 0], retrieved.layer0)
