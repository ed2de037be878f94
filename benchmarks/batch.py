"""A batch on a real vLLM and a real LMCache server: ``run`` beside prefill, modify and decode with barriers.

    python tests/real/install_stack.py  # the real servers, once
    python -m benchmarks.batch --rounds 8

In each round fresh prompts go through both ways, taking turns at being first: each stream on its own from
its prefill to the end of its answer, and all of them phase by phase, each phase waiting for the last of
the one before. ``even``: all streams are alike. ``slow edit``: the score of one stream takes a part (SLOW)
of what a whole batch of even ones takes, as that of a policy with a model of its own would. ``long
prompt``: one prompt is several times as long. It is another stream in each round, as all depends on how
early the engine comes to it: behind the others' edits there is nothing left to do beside it.
Ratios come first, above 1 where ``run`` is the faster; seconds are this machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import lmcache_stream as lms
from lmcache_stream.dropping import Scored
from tests.real.install_stack import default_folder, is_installed
from tests.real.stack import lmcache_server, vllm_server

SCENARIOS = ("even", "slow edit", "long prompt")
# Ids of plain words in the vocabulary of SmolLM2.
_FIRST_ID, _LAST_ID = 1_000, 20_000


class Rounds:
    """Runs fresh prompts in both ways.

    Args:
        cache: the cache.
        engine: the engine.
        given: the command's arguments.
    """

    def __init__(
        self, cache: lms.AsyncLMCacheContext, engine: lms.VLLMCompletions, given: argparse.Namespace
    ) -> None:
        self._cache = cache
        self._engine = engine
        self._given = given
        self._chance = random.Random(given.seed)
        self._slow_seconds = 0.0
        self._params = {"max_tokens": given.max_tokens, "temperature": 0, "ignore_eos": True}

    async def warm_up(self) -> float:
        """Run even batches, measure out the slow score by the seconds of the last, and return its own."""
        await self.measure("even", 1)
        batch_seconds: float = (await self.measure("even", 1))["barriers_seconds"]
        self._slow_seconds = self._given.slow * batch_seconds
        return self._slow_seconds

    async def measure(self, scenario: str, rounds: int) -> dict[str, Any]:
        """Return the medians of a scenario in so many rounds, in seconds, and their ratio."""
        seconds: dict[str, list[float]] = {"barriers": [], "run": []}
        ways = {"barriers": self._with_barriers, "run": self._without}
        for number in range(rounds):
            # Each of them once in as many rounds: it matters how early the engine comes to it.
            special = number % self._given.streams
            for way in list(ways) if number % 2 else list(ways)[::-1]:
                seconds[way].append(await self._timed(ways[way], scenario, special))
        ratios = [left / right for left, right in zip(seconds["barriers"], seconds["run"], strict=True)]
        return {
            "barriers_to_run": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
            **{f"{way}_seconds": round(statistics.median(each), 2) for way, each in seconds.items()},
        }

    async def _timed(
        self,
        way: Callable[[lms.AsyncLMCacheBatchedStream, Scored], Awaitable[None]],
        scenario: str,
        special: int,
    ) -> float:
        given = self._given
        batch = lms.AsyncLMCacheBatchedStream()
        prompts = [self._prompt(given.tokens) for _ in range(given.streams)]
        if scenario == "long prompt":
            prompts[special] = self._prompt(given.long_tokens)
        for prompt in prompts:
            batch.add(lms.create_request(self._cache, self._engine, prompt))
        slow = prompts[special] if scenario == "slow edit" else None
        started = time.perf_counter()
        await way(batch, _edges(slow, self._slow_seconds))
        took = time.perf_counter() - started
        for outcome in batch.get_perf_metrics("decode").outcomes:
            if outcome.decode is None or outcome.decode.output_tokens != given.max_tokens:
                raise SystemExit(f"a stream failed: {outcome.error}\n{outcome.traceback}")
        return took

    def _prompt(self, length: int) -> list[int]:
        return [self._chance.randrange(_FIRST_ID, _LAST_ID) for _ in range(length)]

    async def _with_barriers(self, batch: lms.AsyncLMCacheBatchedStream, edit: Scored) -> None:
        await batch.prefill(self._params)
        await batch.modify(edit)
        await batch.decode(self._params)

    async def _without(self, batch: lms.AsyncLMCacheBatchedStream, edit: Scored) -> None:
        await batch.run(edit, self._params)


def _edges(slow: Sequence[int] | None, seconds: float) -> Scored:
    """Return a policy that keeps both ends of a prompt; for the prompt ``slow`` it takes its time."""
    head = None if slow is None else tuple(slow[:8])

    def score(keys: Any, queries: Any, tokens: Sequence[int]) -> torch.Tensor:
        if tuple(tokens[:8]) == head:
            time.sleep(seconds)
        middle = (len(tokens) - 1) / 2
        return (torch.arange(len(tokens)) - middle).abs()

    return Scored(function=score, ratio=0.5)


async def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Start the servers, warm them up and measure every scenario."""
    folder = default_folder()
    if not is_installed(folder):
        raise SystemExit(f"no real stack in {folder}: run `python tests/real/install_stack.py` first")
    with (
        tempfile.TemporaryDirectory() as logs,
        lmcache_server(folder, Path(logs), size_gb=4) as server,
        vllm_server(folder, Path(logs), server, dtype=given.dtype) as vllm,
    ):
        async with (
            lms.connect(server.url, server.http_url, str(vllm.model_path)) as cache,
            lms.VLLMCompletions(vllm.url, vllm.model) as engine,
        ):
            rounds = Rounds(cache, engine, given)
            slow_seconds = await rounds.warm_up()
            found = {scenario: await rounds.measure(scenario, given.rounds) for scenario in given.scenarios}
    settings = {**vars(given), "slow_seconds": round(slow_seconds, 2), "chunk_size": cache.chunk_size}
    return {"scenarios": found, "settings": settings}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--streams", type=int, default=8, help="streams of a batch (default: 8)")
    add("--tokens", type=int, default=2048, help="tokens of a prompt (default: 2048)")
    add("--max-tokens", type=int, default=16, help="tokens of an answer (default: 16)")
    add("--rounds", type=int, default=8, help="batches a side and scenario (default: 8)")
    add("--slow", type=float, default=0.5, help="slow score's part of an even batch's seconds (default: 0.5)")
    add("--long-tokens", type=int, default=4000, help="tokens of the long prompt (default: 4000)")
    add("--dtype", default="bfloat16", help="of the engine (default: bfloat16)")
    add("--seed", type=int, default=0, help="of the prompts (default: 0)")
    add("--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS, help="by default all")
    given = parser.parse_args()
    if min(given.streams, given.tokens, given.max_tokens, given.rounds) < 1:
        parser.error("--streams, --tokens, --max-tokens and --rounds must be positive")
    try:
        found = asyncio.run(measure(given))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
