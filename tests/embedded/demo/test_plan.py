"""The gap that the demo cuts into a prompt: where it lies, and what is refused."""

from __future__ import annotations

import pytest

from lmcache_stream import InvalidRequestError
from lmcache_stream.embedded.demo.plan import check_length, kept_indices, plan_drop


@pytest.mark.parametrize(
    ("prompt", "question", "chunk", "ratio", "dropped"),
    [
        pytest.param(160, 150, 16, 0.5, range(32, 112), id="whole chunks in the middle"),
        pytest.param(167, 160, 16, 0.5, range(32, 112), id="a tail that has no chunk"),
        pytest.param(160, 100, 16, 0.5, range(16, 96), id="moved to the left of the question"),
        pytest.param(160, 159, 16, 0.1, range(64, 80), id="one chunk"),
        pytest.param(160, 159, 16, 0.8, range(16, 144), id="all but the first and the last chunk"),
        pytest.param(160, 159, 16, 0.02, range(78, 81), id="less than half a chunk"),
        pytest.param(160, 96, 16, 0.55, range(8, 96), id="chunks do not fit in front of the question"),
        pytest.param(33, 30, 16, 0.3, range(11, 21), id="two chunks, of which the question needs one"),
        pytest.param(10, 9, 1, 0.5, range(2, 7), id="a chunk is a token"),
    ],
)
def test_the_gap(prompt: int, question: int, chunk: int, ratio: float, dropped: range) -> None:
    assert plan_drop(prompt_tokens=prompt, question_start=question, chunk_size=chunk, ratio=ratio) == dropped


def test_every_plan_keeps_the_beginning_the_question_and_a_chunk() -> None:
    planned = refused = aligned = 0
    for chunk in (1, 4, 7):
        for prompt in range(1, 70):
            for question in range(0, prompt + 1, 3):
                for ratio in (0.01, 0.25, 0.5, 0.75, 0.99):
                    try:
                        gap = plan_drop(
                            prompt_tokens=prompt, question_start=question, chunk_size=chunk, ratio=ratio
                        )
                    except InvalidRequestError:
                        refused += 1
                        continue
                    planned += 1
                    cached = prompt // chunk * chunk
                    kept = kept_indices(gap, cached)
                    assert 1 <= gap.start < gap.stop <= min(question, cached)
                    assert len(kept) >= chunk
                    assert sorted({*kept, *gap}) == list(range(cached))
                    assert len(kept) + len(gap) == cached
                    assert abs(len(gap) - ratio * prompt) <= chunk / 2 + 1
                    aligned += len(kept) % chunk == 0 and gap.start % chunk == 0
    assert min(planned, refused, aligned) > 1000


@pytest.mark.parametrize(
    ("prompt", "question", "ratio", "words"),
    [
        (20, 18, 0.5, "10 of 20 prompt tokens are to be dropped, but the question keeps 2"),
        (10, 8, 0.5, "at least a chunk of 16"),
        (160, 40, 0.5, "the question keeps 120"),
        (160, 159, 0.99, "158 of 160"),
        (160, 159, 0.001, "0 of 160"),
    ],
)
def test_what_is_too_short_is_refused_with_its_numbers(
    prompt: int, question: int, ratio: float, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        plan_drop(prompt_tokens=prompt, question_start=question, chunk_size=16, ratio=ratio)


@pytest.mark.parametrize("ratio", [0, 1, -0.5, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(ratio: float) -> None:
    with pytest.raises(InvalidRequestError, match="between 0 and 1"):
        plan_drop(prompt_tokens=160, question_start=150, chunk_size=16, ratio=ratio)


def test_prompt_and_answer_must_fit_into_the_model() -> None:
    check_length(prompt_tokens=90, max_tokens=10, max_model_len=100)
    with pytest.raises(InvalidRequestError, match=r"91 prompt tokens and 10 .* more than the 100"):
        check_length(prompt_tokens=91, max_tokens=10, max_model_len=100)
