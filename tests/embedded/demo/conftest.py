"""A stack of the scripted cache server, the scripted engine and a tokenizer of characters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

import lmcache_stream as lms

from ...cache.conftest import FAST, GEOMETRY
from ...fakes.engine import ScriptedEngine
from ...fakes.lmcache import FakeLMCache

# The scripted engine does not rotate its keys, so that those of equal tokens are equal anywhere.
ROPE = lms.RopeConfig(head_size=8, inv_freq=(0.0, 0.0, 0.0, 0.0), pairing="half")
BOS = 3


@dataclass
class CharacterTokenizer:
    """A token a character; ``BOS`` in front where special tokens are asked for."""

    chat_template: str | None = "<user>{content}</user><assistant>"

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [BOS] * add_special_tokens + [ord(character) for character in text]}

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        assert add_generation_prompt
        assert not tokenize
        assert self.chat_template is not None
        return self.chat_template.replace("{content}", messages[0]["content"])


@dataclass
class FakeStack:
    """What the demo uses of a stack, and what was asked of it."""

    server: FakeLMCache
    tokenizer: Any = field(default_factory=CharacterTokenizer)
    max_model_len: int = 1000

    def __post_init__(self) -> None:
        self.post_completion = ScriptedEngine(self.server, GEOMETRY.kv_shape(1))

    def connect(self) -> lms.connect:
        return lms.connect(
            self.server.url, self.server.http_url, "model", geometry=GEOMETRY, rope=ROPE, timeouts=FAST
        )


@pytest.fixture
async def stack() -> AsyncIterator[FakeStack]:
    async with FakeLMCache() as server:
        yield FakeStack(server)
        assert server.violations == []
        assert server.locked == (0, 0)
