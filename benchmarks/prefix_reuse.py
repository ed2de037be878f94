"""Time to the first token on the embedded stack: a prompt whose KV is cached beside one that is not.

    python benchmarks/prefix_reuse.py --tokens 2000 --rounds 5

Every round runs a new prompt twice. Ratios come first: seconds are this machine's, ratios travel better.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from typing import Any

import lmcache_stream as lms
from lmcache_stream.embedded import EmbeddedStack

_GREEDY = {"max_tokens": 1, "temperature": 0}


async def measure(model: str | None, tokens: int, rounds: int) -> dict[str, Any]:
    """Return medians in seconds and their ratio."""
    chance = random.Random(0)
    uncached: list[float] = []
    cached: list[float] = []
    async with EmbeddedStack(model) as stack, stack.connect() as context:
        for _ in range(rounds):
            prompt = [chance.randrange(1000, 20000) for _ in range(tokens)]
            for times in (uncached, cached):
                stream = lms.create_request(context, stack.post_completion, prompt)
                metrics = await stream.generate(_GREEDY)
                assert metrics.ttft is not None
                times.append(metrics.ttft)
                # Offloaded before the second run begins.
                await stream.retrieve_kv()
            assert metrics.cached_tokens is not None
            assert metrics.cached_tokens >= tokens // context.chunk_size * context.chunk_size - 1
    first, second = statistics.median(uncached), statistics.median(cached)
    return {
        "ttft_cached_to_uncached": second / first,
        "ttft_uncached_seconds": first,
        "ttft_cached_seconds": second,
        "tokens": tokens,
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or Hub id (default: the embedded stack's)")
    parser.add_argument("--tokens", type=int, default=2000, help="length of the prompts (default: 2000)")
    parser.add_argument("--rounds", type=int, default=5, help="prompts (default: 5)")
    options = parser.parse_args()
    print(json.dumps(asyncio.run(measure(options.model, options.tokens, options.rounds)), indent=2))


if __name__ == "__main__":
    main()
