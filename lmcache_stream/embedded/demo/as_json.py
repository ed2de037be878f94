"""What the demo found, as plain data for JSON."""

from __future__ import annotations

from typing import Any

from .recall_run import Recall, RecallAnswer
from .run import Answer, Comparison

__all__ = ["comparison_data", "recall_data"]


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """Return what one comparison found; times in seconds, sizes in bytes, ``dropped`` as [start, stop)."""
    edit = comparison.edit
    return {
        "title": comparison.document.title,
        "question": comparison.document.question,
        "prompt_token_ids": list(comparison.prompt_token_ids),
        "prompt_tokens": len(comparison.prompt_token_ids),
        "kept_tokens": comparison.kept_tokens,
        "dropped": [comparison.dropped.start, comparison.dropped.stop],
        "kv_tokens_before": edit.tokens_before,
        "kv_tokens_after": edit.tokens_after,
        "recomputed_tokens": edit.recomputed_tokens,
        "kv_bytes_before": edit.bytes_before,
        "kv_bytes_after": edit.bytes_after,
        "edit_seconds": edit.seconds,
        "whole": _answer_data(comparison.whole),
        "edited": _answer_data(comparison.edited),
    }


def recall_data(recall: Recall) -> dict[str, Any]:
    """Return the answers to one recall task; ``fact`` is [start, stop) in the prompt, ``kept`` indices."""
    return {
        "seed": recall.seed,
        "question": recall.task.question,
        "answer_start": recall.task.answer_start,
        "code": recall.task.code,
        "prompt_token_ids": list(recall.prompt.token_ids),
        "fact": [recall.prompt.fact.start, recall.prompt.fact.stop],
        "prefill_seconds": recall.prefill_seconds,
        "answers": [_recall_answer_data(answer) for answer in recall.answers],
    }


def _recall_answer_data(answer: RecallAnswer) -> dict[str, Any]:
    return {
        "policy": answer.policy,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "is_right": answer.is_right,
        "kept": list(answer.kept_indices),
        "fact_kept": answer.fact_kept,
        "edit_seconds": answer.edit and answer.edit.seconds,
        "ttft_seconds": answer.ttft,
        "cached_tokens": answer.cached_tokens,
    }


def _answer_data(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "prefill_seconds": answer.prefill_seconds,
        "ttft_seconds": answer.ttft,
        "tokens_per_second": answer.tokens_per_second,
        "cached_tokens": answer.cached_tokens,
        "finish_reason": answer.finish_reason,
    }
