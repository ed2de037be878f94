"""What the token-dropping examples print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kept import kept_text, takes_colour

import lmcache_stream as lms
from lmcache_stream.figures import Strip

__all__ = ["answer", "tell_edit"]


async def answer(stream: lms.AsyncLMCacheStream, max_tokens: int) -> None:
    """Print what the stream has said so far, and the rest of its answer as it comes."""
    print(stream.output_text(), end="", flush=True)
    more = max_tokens - stream.decoded_tokens()
    if more > 0 and not stream.is_done():
        async with stream.open_generation({"max_tokens": more, "temperature": 0}) as generation:
            async for event in generation:
                print(event.text, end="", flush=True)
    print("\n")


def tell_edit(tokenizer: Any, token_ids: Sequence[int], strip: Strip) -> None:
    """Print how much an edit kept, and the text with what it dropped struck out."""
    colour = takes_colour()
    legend = "struck out: dropped" if colour else "[n]: n tokens dropped"
    print(f"--- {strip} ({legend})")
    print(kept_text(tokenizer, token_ids, strip, colour=colour), "\n", sep="")
