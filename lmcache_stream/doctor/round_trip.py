"""A made-up prompt from the engine through the cache and back, under salts of its own."""

from __future__ import annotations

import asyncio
import random

import anyio

from ..cache.connect import connect
from ..cache.stores import equal_chunks
from ..cache.timeouts import Timeouts
from ..errors import EngineError, GeometryError, LayoutError
from .chart import Chart, known
from .engine import DETAILS, advice_for, one_pass
from .model import connector
from .results import Finding, failed, ok, warning

__all__ = ["decode", "isolation", "layout", "made_up", "offload", "prefill", "retrieve", "same", "store"]

# At 512 tokens every scaling of RoPE that is known shows in the keys of tokens that are far apart.
_LEAST_TOKENS = 512
_LEAST_CHUNKS = 3
_KINDS = 61
_USUAL_VOCABULARY = 4096
_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 0.5


def made_up(chunk_size: int, *, max_model_len: int | None, vocab_size: int | None) -> list[int]:
    """Return token ids that make whole chunks, and one more; empty where the engine takes no chunk.

    Few kinds of tokens, so that each is there many times, and from the middle of the vocabulary, because
    special tokens are at its ends.
    """
    chunks = max(_LEAST_CHUNKS, -(-_LEAST_TOKENS // chunk_size))
    if max_model_len is not None:
        # Room for the one more and for one that is decoded.
        chunks = min(chunks, (max_model_len - 2) // chunk_size)
    if chunks < 1:
        return []
    vocabulary = vocab_size or _USUAL_VOCABULARY
    first = vocabulary // 4
    draw = random.Random(0)
    return [first + draw.randrange(min(_KINDS, vocabulary // 2)) for _ in range(chunks * chunk_size + 1)]


async def prefill(chart: Chart) -> Finding:
    """The engine computes the prompt."""
    served, config = known(chart.served_model), chart.model_config
    chart.prompt = prompt = made_up(
        chart.chunk_size,
        max_model_len=served.max_model_len,
        vocab_size=None if config is None else config.vocab_size,
    )
    if not prompt:
        return failed(
            f"a chunk of {chart.chunk_size} tokens is more than vLLM takes ({served.max_model_len})",
            "start `lmcache server` with a smaller --chunk-size, or vLLM with a larger --max-model-len",
        )
    try:
        await one_pass(known(chart.engine), prompt, chart.salts[0])
    except EngineError as error:
        return failed(str(error), advice_for(error))
    return ok(f"{len(prompt)} made-up tokens")


async def offload(chart: Chart) -> Finding:
    """The prompt's KV appears in this cache."""
    limits, targets = chart.deadlines, chart.targets
    chart.cache = cache = await connect(
        targets.cache_url,
        targets.http_url,
        known(chart.cache_name),
        model_config=targets.model_path,
        max_model_len=known(chart.served_model).max_model_len,
        timeouts=Timeouts(
            connect=limits.answer, lookup=2 * limits.answer, retrieve=limits.transfer, store=limits.transfer
        ),
    )
    chart.possessions.push_async_callback(cache.aclose)
    wanted, found, pause = len(chart.whole), 0, _FIRST_PAUSE
    began = anyio.current_time()
    with anyio.move_on_after(limits.offload):
        while (found := await cache.lookup(chart.whole, chart.salts[0])) < wanted:
            await anyio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
    if found == wanted:
        return ok(f"KV of {wanted} tokens is in LMCache {anyio.current_time() - began:.1f} s after the pass")
    after = f"{limits.offload:g} s after the pass"
    if found:
        return failed(
            f"KV of {found} of {wanted} tokens is in LMCache {after}",
            "L1 may be too small or full of KV in use: give `lmcache server` a larger --l1-size-gb",
        )
    return failed(
        f"vLLM answered, but nothing of the prompt is in LMCache {after}: it is not connected to it",
        connector(chart),
    )


async def retrieve(chart: Chart) -> Finding:
    """The KV can be taken out, and has the shape that the configuration says."""
    cache = known(chart.cache)
    try:
        kv = await cache.retrieve(chart.whole, chart.salts[0])
    except LayoutError as error:
        # Shape and dtype are right, or this would not have been looked at.
        chart.layout_problem = str(error)
        return ok(f"KV of {len(chart.whole)} tokens, shape and dtype as the configuration says")
    except GeometryError as error:
        return failed(str(error), "give --model-path the configuration of the model that vLLM serves")
    if kv is None or kv.shape[2] != len(chart.whole):
        return failed(
            f"of {len(chart.whole)} tokens {0 if kv is None else kv.shape[2]} were left when they were read",
            "LMCache evicted them at once: give `lmcache server` a larger --l1-size-gb",
        )
    chart.kv = kv
    return ok(f"{list(kv.shape)} {str(kv.dtype).removeprefix('torch.')}, {kv.nbytes / 2**20:.1f} MiB")


async def layout(chart: Chart) -> Finding:
    """Layer 0's keys are what layout and RoPE make of equal tokens."""
    if chart.layout_problem:
        return failed(
            chart.layout_problem,
            "give --model-path the configuration of the model that vLLM serves; if it has been given, try "
            "connect(layout='auto')",
        )
    spread, shape = known(chart.cache).layout_spread, known(chart.cache).geometry
    if spread is None:
        return warning(
            f"layout {shape.layout} could not be checked: the model's RoPE is not known",
            "without the check an edit may be silently wrong: give --model-path",
        )
    return ok(f"layout {shape.layout}, keys of equal tokens differ by {spread:.4f}")


async def store(chart: Chart) -> Finding:
    """KV can be put in, under another salt."""
    kept = await known(chart.cache).store(known(chart.kv), chart.whole, chart.salts[1])
    if not kept:
        total = kept.stored + kept.existing + kept.refused
        return failed(
            f"LMCache took {kept.stored} of {total} chunks",
            "L1 is too small or full of KV in use: give `lmcache server` a larger --l1-size-gb",
        )
    return ok(f"{kept.stored} chunks under a second salt")


async def same(chart: Chart) -> Finding:
    """What was put in comes out bit for bit."""
    cache, kv = known(chart.cache), known(chart.kv)
    back = await cache.retrieve(chart.whole, chart.salts[1])
    found = 0 if back is None else back.shape[2]
    if back is None or found != len(chart.whole):
        return failed(
            f"of {len(chart.whole)} stored tokens {found} are there",
            "LMCache evicted them at once: give `lmcache server` a larger --l1-size-gb",
        )
    equal = await asyncio.to_thread(equal_chunks, kv, back, chart.chunk_size)
    chunks = len(chart.whole) // chart.chunk_size
    if len(equal) != chunks:
        return failed(
            f"only {len(equal)} of {chunks} chunks are as they were stored",
            "LMCache gives other bytes than it was given: report it, with its log and version",
        )
    return ok(f"{chunks} of {chunks} chunks are bit for bit as they were stored")


async def isolation(chart: Chart) -> Finding:
    """Under a salt that nobody stored under there is nothing."""
    found = await known(chart.cache).lookup(chart.whole, chart.salts[2])
    if found:
        return failed(
            f"{found} tokens are found under a salt that nothing was stored under",
            "this LMCache ignores salts, so that edits would be served to others: use another version",
        )
    return ok("nothing under a third salt")


async def decode(chart: Chart) -> Finding:
    """The engine decodes from the KV that was stored."""
    try:
        tokens, end = await one_pass(known(chart.engine), chart.prompt, chart.salts[1])
    except EngineError as error:
        return failed(str(error), advice_for(error))
    if end.cached_tokens is None:
        return warning(
            "vLLM decoded, but does not say from what: it reports no cached tokens",
            f"start vLLM with {DETAILS}",
        )
    of = f"{end.cached_tokens} of {len(chart.whole)} stored tokens"
    if end.cached_tokens < len(chart.whole):
        return failed(
            f"vLLM took {of} from LMCache and computed the rest anew: edits would be lost",
            f"see vLLM's log for the connector; kv_role must be kv_both: {connector(chart)}",
        )
    return ok(f"vLLM took {of} from LMCache and decoded token {tokens[0].token_id if tokens else '-'}")
