"""A comparison as plain data for JSON."""

from __future__ import annotations

from typing import Any

from .run import Answer, Comparison

__all__ = ["comparison_data"]


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
