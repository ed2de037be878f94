"""Which tokens of a prompt the demo drops; pure arithmetic."""

from __future__ import annotations

from ...errors import InvalidRequestError

__all__ = ["check_length", "kept_indices", "plan_drop"]


def plan_drop(*, prompt_tokens: int, question_start: int, chunk_size: int, ratio: float) -> range:
    """Return the indices to drop: one gap in the middle of the prompt, in front of the question.

    The gap covers whole chunks where that is possible, so that what is kept is whole chunks as well and
    the engine computes none of it anew; else it has the exact length.

    Args:
        prompt_tokens: length of the prompt.
        question_start: index of the first token that must stay together with all after it.
        chunk_size: tokens of a chunk; KV is cached for the prompt's whole chunks only.
        ratio: the share of the prompt to drop.

    Raises:
        InvalidRequestError: ``ratio`` is not between 0 and 1, or the prompt is too short for it.
    """
    if not 0 < ratio < 1:
        raise InvalidRequestError(f"the share to drop is {ratio}, but it must lie between 0 and 1")
    cached = prompt_tokens // chunk_size * chunk_size
    gap = round(prompt_tokens * ratio)
    # A gap of whole chunks leaves the first one alone, as the beginning of the text.
    chunks = round(gap / chunk_size)
    border = min(cached, question_start)
    last_start = border // chunk_size - chunks
    if chunks and last_start >= 1:
        start = min(max(1, (cached // chunk_size - chunks) // 2), last_start)
        return range(start * chunk_size, (start + chunks) * chunk_size)
    start = min((cached - gap) // 2, border - gap)
    if gap and start >= 1 and cached - gap >= chunk_size:
        return range(start, start + gap)
    raise InvalidRequestError(
        f"the text is too short: {gap} of {prompt_tokens} prompt tokens are to be dropped, but the "
        f"question keeps {prompt_tokens - question_start} and at least a chunk of {chunk_size} must be "
        "left of the cached KV; take a longer text or another share"
    )


def kept_indices(dropped: range, cached_tokens: int) -> list[int]:
    """Return the indices below ``cached_tokens`` that are not in the gap, in order."""
    return [*range(dropped.start), *range(dropped.stop, cached_tokens)]


def check_length(*, prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    """Raise where the prompt and the answer do not fit into the model.

    Raises:
        InvalidRequestError: they do not; the message has both numbers.
    """
    if prompt_tokens + max_tokens > max_model_len:
        raise InvalidRequestError(
            f"the text is too long: {prompt_tokens} prompt tokens and {max_tokens} of the answer are more "
            f"than the {max_model_len} that the model takes; take a shorter text"
        )
