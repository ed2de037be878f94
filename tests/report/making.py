"""Outputs of jobs for the tests: rows as `lmcache-stream run` writes them."""

from __future__ import annotations

import json
import pydoc_data.topics
import random
from pathlib import Path
from typing import Any

__all__ = ["SNAPKV", "failed_row", "night", "row", "write_job"]

SNAPKV = "SnapKV(ratio=0.5, sinks=4, window=32)"
_QUESTIONS = (
    "What does the assert statement do?",
    "Which names does a try statement bind?",
    "When is a context manager's exit called?",
)
_ANSWERS = (
    "It raises AssertionError if its condition is false, unless Python runs with -O.",
    "The name behind `as` is bound to the exception, and is unbound at the end of the clause.",
    "Its exit method is called at the end of the block, also where the block was left by an exception.",
)
_BYTES_A_TOKEN = 30 * 2 * 192 * 4


def row(id_: str | int, **changes: Any) -> dict[str, Any]:
    """A small row that came to its end, with ``changes``."""
    return {
        "id": id_,
        "line": 1,
        "policy": SNAPKV,
        "model": "qwen3",
        "prompt_tokens": 40,
        "text": "an answer",
        "token_ids": [1, 2, 3],
        "finish_reason": "stop",
        "error": None,
        "kv": {
            "tokens_before": 32, "tokens_after": 16, "bytes_before": 3200, "bytes_after": 1600,
            "seconds": 0.05, "recomputed_tokens": 3,
        },
        "pieces": [["kept text ", True], ["dropped text ", False], ["kept again", True]],
        "metrics": {
            "ttft": 0.1, "tpot": 0.01, "e2e_latency": 0.12, "itl": [0.01, 0.01], "input_tokens": 24,
            "output_tokens": 3, "cached_tokens": 16, "prefill_ttft": 1.0, "edit_time": 0.05,
            "queue_time": 0.0, "seconds": 1.5, "attempts": 3,
        },
        "baseline": {"text": "an answer", "token_ids": [1, 2, 3], "finish_reason": "stop", "ttft": 0.2},
        **changes,
    }  # fmt: skip


def failed_row(id_: str | int, phase: str = "decode", **changes: Any) -> dict[str, Any]:
    """A row that failed in ``phase``, with what is known of it."""
    error = {"type": "EngineStatusError", "message": "the engine answered 503: overloaded", "phase": phase}
    metrics = {"attempts": {"prefill": 1, "edit": 2, "decode": 3}[phase], "queue_time": 0.0}
    known: dict[str, Any] = {"text": "", "token_ids": [], "finish_reason": None, "kv": None, "pieces": None}
    return row(id_) | known | {"metrics": metrics, "baseline": None, "error": error} | changes


def write_job(path: Path, rows: list[Any]) -> Path:
    """Write rows as lines of JSON; text as it is."""
    lines = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def night(
    count: int, *, policy: str | None = SNAPKV, kept: float = 0.5, seed: int = 0, words: int = 640
) -> list[dict[str, Any]]:
    """What a night's job might write: prompts of some 1,000 tokens, slow hours, failures and retries."""
    random_ = random.Random(seed)
    text = " ".join(
        " ".join(pydoc_data.topics.topics[name].split()) for name in ("assert", "with", "try", "for")
    )
    source = text.split(" ")
    rows = [
        _night_row(number, source, words, policy, kept, random_, number / count) for number in range(count)
    ]
    # Rows come to their end nearly, but not quite, in the order of the prompts' file.
    rows.sort(key=lambda each: each["line"] + random_.uniform(0, 8))
    return rows


def _night_row(
    number: int,
    source: list[str],
    words: int,
    policy: str | None,
    kept: float,
    random_: random.Random,
    hour: float,
) -> dict[str, Any]:
    # The prompt is the same in each policy's job.
    of_prompt = random.Random(number)
    start = of_prompt.randrange(len(source) - words)
    question = number % len(_QUESTIONS)
    body = [f"{word} " for word in source[start : start + words]] + [
        f"\n\nQuestion: {_QUESTIONS[question]}\nAnswer:"
    ]
    tokens = round(1.5 * words) + of_prompt.randrange(40)
    load = 1 + (1.2 if 0.55 < hour < 0.7 else 0) + random_.random() ** 4
    ttft = 0.11 * load * random_.lognormvariate(0, 0.18) * (0.5 + kept)
    gaps = [0.011 * load * random_.lognormvariate(0, 0.25) for _ in range(random_.randrange(18, 60))]
    is_same = policy is None or random_.random() < 0.25 + 0.6 * kept
    answer = _ANSWERS[question]
    said = answer if is_same else answer[: random_.randrange(8, 40)] + " … as the text above says."
    before = tokens // 16 * 16
    after = round(before * kept / 16) * 16
    retries = int(random_.random() < 0.04)
    made = row(
        f"doc-{number}",
        line=number + 1,
        policy=policy,
        prompt_tokens=tokens,
        text=said,
        token_ids=list(range(len(gaps) + 1)),
        kv=None if policy is None else {
            "tokens_before": before, "tokens_after": after, "bytes_before": before * _BYTES_A_TOKEN,
            "bytes_after": after * _BYTES_A_TOKEN, "seconds": 0.05 * load,
            "recomputed_tokens": tokens - before,
        },
        pieces=_pieces(body, 1.0 if policy is None else kept, random_),
        metrics={
            "ttft": ttft, "tpot": sum(gaps) / len(gaps), "e2e_latency": ttft + sum(gaps), "itl": gaps,
            "input_tokens": tokens - before + after, "output_tokens": len(gaps) + 1, "cached_tokens": after,
            "prefill_ttft": 0.9 * load * random_.lognormvariate(0, 0.1), "queue_time": 0.2 * random_.random(),
            "edit_time": None if policy is None else 0.05 * load, "seconds": ttft + sum(gaps) + 1.1 * load,
            "attempts": (2 if policy is None else 3) + retries,
        },
        baseline=None if policy is None else {
            "text": answer, "token_ids": list(range(20)), "finish_reason": "stop",
            "ttft": 0.17 * load * random_.lognormvariate(0, 0.15),
        },
        extra={"expected": answer, "source": "python/topics"},
    )  # fmt: skip
    if (0.6 < hour < 0.68 and random_.random() < 0.15) or random_.random() < 0.004:
        made |= failed_row(made["id"], random_.choice(["prefill", "edit", "decode"]))
        made |= {"line": number + 1, "policy": policy, "prompt_tokens": tokens}
    return made


def _pieces(body: list[str], kept: float, random_: random.Random) -> list[list[Any]]:
    """Alternating runs, the first and the last words always kept."""
    pieces: list[list[Any]] = []
    is_kept = True
    for place, word in enumerate(body):
        if place < 4 or place > len(body) - 24:
            is_kept = True
        elif random_.random() < 0.3:
            is_kept = random_.random() < kept
        if pieces and pieces[-1][1] == is_kept:
            pieces[-1][0] += word
        else:
            pieces.append([word, is_kept])
    return pieces
