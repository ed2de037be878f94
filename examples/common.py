"""What both examples of ``keep`` share: arguments, text, tokenizer and the table at the end."""

from __future__ import annotations

import argparse
import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmcache_stream as lms
from lmcache_stream import sync

DEFAULT_QUESTION = "What does the assert statement do? Answer in two sentences."


@dataclass(frozen=True)
class Settings:
    engine_url: str
    cache_url: str
    http_url: str
    model: str
    model_path: str | None
    api_key: str | None
    text: str
    question: str
    drop: float
    max_tokens: int

    def kept(self, length: int) -> list[int]:
        """Return the indices of ``length`` tokens without a share ``drop`` in the middle."""
        gap = round(length * self.drop)
        start = (length - gap) // 2
        return [*range(start), *range(start + gap, length)]


def parse_arguments(description: str | None) -> Settings:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine-url", default="http://localhost:8000", help="vLLM (http://localhost:8000)")
    parser.add_argument(
        "--cache-url", default="tcp://localhost:5555", help="LMCache's --port (tcp://localhost:5555)"
    )
    parser.add_argument(
        "--http-url", default="http://localhost:8080", help="LMCache's --http-port (http://localhost:8080)"
    )
    parser.add_argument("--model", required=True, help="the model's name in vLLM's API")
    parser.add_argument("--model-path", help="its name in LMCache; by default vLLM is asked")
    parser.add_argument("--api-key", help="sent to vLLM as a bearer token")
    parser.add_argument("--text", type=Path, help="a text file; by default Python's own documentation")
    parser.add_argument("--question", default=DEFAULT_QUESTION, help="about the text (what assert does)")
    parser.add_argument("--drop", type=float, default=0.5, help="the share to drop (0.5)")
    parser.add_argument("--max-tokens", type=int, default=60, help="tokens of an answer (60)")
    given = parser.parse_args()
    if not 0 < given.drop < 1:
        parser.error("--drop must lie between 0 and 1")
    try:
        text = given.text.read_text() if given.text else default_text()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--text: {error}")
    return Settings(
        engine_url=given.engine_url.rstrip("/"),
        cache_url=given.cache_url,
        http_url=given.http_url,
        model=given.model,
        model_path=given.model_path,
        api_key=given.api_key,
        text=text,
        question=given.question,
        drop=given.drop,
        max_tokens=given.max_tokens,
    )


def default_text() -> str:
    """Return some 9,000 characters of Python's documentation, which every Python carries."""
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in ("assert", "with", "try"))[:9000]


def find_model_path(settings: Settings) -> str:
    """Return the model's path, which is its name in LMCache; without --model-path the engine tells it."""
    if settings.model_path is not None:
        return settings.model_path
    try:
        return sync.find_model(settings.engine_url, settings.model, api_key=settings.api_key).root
    except lms.LMCacheStreamError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a model folder or of a model in the Hugging Face cache."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise SystemExit("this example needs `pip install 'lmcache-stream[examples]'`") from None
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise SystemExit(f"no tokenizer of {name!r} here: {str(error).splitlines()[0]}") from None


def chat_tokens(tokenizer: Any, text: str, question: str) -> list[int]:
    """Return the ids of a chat in which ``question`` is asked behind ``text``."""
    messages = [{"role": "user", "content": f"{text}\n\nQuestion: {question}"}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def table(report: lms.EditReport, base: lms.StreamPerfMetrics, dropped: lms.StreamPerfMetrics) -> str:
    """Return both passes side by side."""
    rows: list[tuple[str, ...]] = [("", "whole text", "edited KV")]
    rows.append(("prompt tokens", str(base.input_tokens), str(dropped.input_tokens)))
    rows.append(("tokens from the cache", str(base.cached_tokens), str(dropped.cached_tokens)))
    before, after = (f"{size / 2**20:.1f} MiB" for size in (report.bytes_before, report.bytes_after))
    rows.append(("KV in the cache", before, after))
    rows.append(("time to first token", *(f"{m.ttft or 0:.3f} s" for m in (base, dropped))))
    rows.append(("decoding", *(f"{1 / m.tpot if m.tpot else 0:.1f} tokens/s" for m in (base, dropped))))
    rows.append(("the edit itself", "", f"{report.seconds:.3f} s"))
    return "\n".join(f"{name:<24}{left:>16}{right:>16}" for name, left, right in rows)
