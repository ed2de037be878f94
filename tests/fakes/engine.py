"""A scripted PostCompletion for tests of the stream: it offloads to the fake server and says what it did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

import lmcache_stream as lms

from .lmcache import FakeLMCache

Event = lms.TokenEvent | lms.FinishEvent


def kv_of(tokens: Sequence[int], shape: tuple[int, ...]) -> torch.Tensor:
    """Return KV that is a function of the tokens: every element of a token's rows is its id."""
    ids = torch.tensor(list(tokens), dtype=torch.float32).view(1, 1, -1, 1)
    return ids.expand(*shape[:2], len(tokens), shape[3]).contiguous()


@dataclass
class ScriptedEngine:
    """Plays one script a pass; each entry is an event, an exception to raise, or seconds to sleep.

    Attributes:
        scripts: what the coming passes yield; ``[7, "length"]`` stands for one token and a reason.
        requests: the prompt, parameters and salt of each pass.
        reports_cached: whether finish events carry cached tokens.
        closed: passes whose generator has ended, in whatever way.
    """

    server: FakeLMCache
    shape: tuple[int, ...]
    scripts: list[list[Any]] = field(default_factory=list)
    requests: list[tuple[list[int], dict[str, Any], str]] = field(default_factory=list)
    reports_cached: bool = True
    offloads: bool = True
    closed: int = 0

    async def __call__(
        self, prompt: Sequence[int], params: Mapping[str, Any], salt: str, /
    ) -> AsyncIterator[Event]:
        self.requests.append((list(prompt), dict(params), salt))
        size = self.server.chunk_size
        cached = 0
        while (
            cached + size <= len(prompt)
            and ("model", salt, tuple(prompt[: cached + size])) in self.server.chunks
        ):
            cached += size
        script = self.scripts.pop(0) if self.scripts else [1, "length"]
        try:
            for entry in script:
                if isinstance(entry, BaseException):
                    raise entry
                if isinstance(entry, float):
                    await asyncio.sleep(entry)
                elif isinstance(entry, int):
                    self._offload(prompt, salt)
                    yield lms.TokenEvent(entry, f"<{entry}>")
                elif isinstance(entry, str):
                    found = min(cached, len(prompt) - 1) if self.reports_cached else None
                    yield lms.FinishEvent(entry, cached_tokens=found)
                else:
                    yield cast(Event, entry)
        finally:
            self.closed += 1

    def _offload(self, prompt: Sequence[int], salt: str) -> None:
        size = self.server.chunk_size
        whole = list(prompt[: len(prompt) // size * size])
        if self.offloads and ("model", salt, tuple(whole)) not in self.server.chunks:
            known = {key for key in self.server.chunks if key[1] == salt}
            kv = kv_of(whole, self.shape)
            missing = [
                end
                for end in range(size, len(whole) + 1, size)
                if ("model", salt, tuple(whole[:end])) not in known
            ]
            for end in missing:
                self.server.put_chunk(whole[:end], kv[:, :, end - size : end], salt=salt)
