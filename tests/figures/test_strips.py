"""Which tokens each strip of an edit has."""

from __future__ import annotations

import pytest

import lmcache_stream as lms
from lmcache_stream.figures import Strip, strips_of


def report(before: int, kept: tuple[int, ...] | None) -> lms.EditReport:
    return lms.EditReport(
        tokens_before=before,
        tokens_after=2 if kept is None else len(kept),
        recomputed_tokens=0,
        bytes_before=0,
        bytes_after=0,
        cache_salt="salt",
        seconds=0.1,
        kept_indices=kept,
    )


def test_one_edit_is_one_strip() -> None:
    (strip,) = strips_of([report(4, (0, 3))], "KNorm")
    assert strip == Strip("KNorm", 4, (0, 1, 2, 3), (0, 3))
    assert str(strip) == "KNorm: 2 of 4 tokens kept"


def test_later_edits_find_what_was_left_and_what_came_since() -> None:
    # Of 6 tokens 4 are kept, then come 3 more, and then 2.
    edits = [report(6, (0, 1, 4, 5)), report(7, (0, 5, 6, 8)), report(6, (0, 8, 9, 10))]
    assert strips_of(edits, "edit") == [
        Strip("edit 1", 6, (0, 1, 2, 3, 4, 5), (0, 1, 4, 5)),
        Strip("edit 2", 9, (0, 1, 4, 5, 6, 7, 8), (0, 5, 6, 8)),
        Strip("edit 3", 11, (0, 5, 6, 8, 9, 10), (0, 8, 9, 10)),
    ]


def test_the_edit_of_a_function_cannot_be_shown() -> None:
    with pytest.raises(ValueError, match="edit 2 was made by a function"):
        strips_of([report(4, (0, 3)), report(4, None)], "edit")
