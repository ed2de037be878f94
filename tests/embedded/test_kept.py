"""What the examples show of an edit: which tokens each strip has, as text and as pixels."""

from __future__ import annotations

import io
from typing import Any

import matplotlib.image
import pytest
from kept import Picture, Strip, draw, kept_text, strips_of, takes_colour
from prompts import Part, build_prompt, ferry_log

import lmcache_stream as lms
from lmcache_stream.embedded.engine import CausalModel

KEPT, DROPPED, EARLIER = (0x25, 0x63, 0xEB), (0xF6, 0xB4, 0x8F), (0xE5, 0xE7, 0xEB)


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


class Letters:
    """A tokenizer whose ids are letters."""

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(map(chr, ids))


def test_text_without_colours_counts_what_is_missing() -> None:
    ids = [ord(letter) for letter in "abcd\n\n\n\nefg?"]
    strip = Strip("", 11, tuple(range(11)), (0, 3, 4, 5, 6, 7, 8))
    assert kept_text(Letters(), ids, strip, colour=False) == "a[2]d\n\ne[2]"


def test_text_with_colours_has_all_of_it() -> None:
    ids = [ord(letter) for letter in "ab\ncd"]
    strip = Strip("", 5, tuple(range(5)), (0, 4))
    text = kept_text(Letters(), ids, strip, colour=True)
    assert text == "\x1b[32ma\x1b[0m\x1b[2;9mb\x1b[0m\n\x1b[2;9mc\x1b[0m\x1b[32md\x1b[0m"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("no_color", "colours"), [(None, True), ("", True), ("1", False)])
def test_colours_are_for_terminals_that_may_have_them(
    monkeypatch: pytest.MonkeyPatch, no_color: str | None, colours: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    assert takes_colour(Terminal()) is colours
    assert not takes_colour(io.StringIO())


def pixels(picture: Picture) -> Any:
    """The picture as ``[height, width, 3]`` of bytes."""
    return (matplotlib.image.imread(io.BytesIO(picture.png))[..., :3] * 255).round().astype("uint8")


def test_the_pixels_of_a_strip_are_its_tokens() -> None:
    strips = [
        Strip("edit 1", 60, tuple(range(60)), tuple(range(0, 60, 2))),
        Strip("edit 2", 100, (*range(0, 60, 2), *range(60, 100)), tuple(range(70, 100))),
    ]
    image = pixels(draw(strips, [Part("text", 0, 100)]))
    kept, dropped, earlier = ((image == colour).all(axis=2) for colour in (KEPT, DROPPED, EARLIER))
    coloured = kept | dropped | earlier
    # The strips are where much of a row is coloured; the legend is less.
    rows = [row for row in range(len(image)) if coloured[row].mean() > 0.3]
    upper, lower = rows[len(rows) // 4], rows[3 * len(rows) // 4]
    token = coloured[lower].sum() / 100
    assert kept[upper].sum() == pytest.approx(30 * token, rel=0.15)
    assert dropped[upper].sum() == pytest.approx(30 * token, rel=0.15)
    assert earlier[upper].sum() == 0
    assert kept[lower].sum() == pytest.approx(30 * token, rel=0.05)
    assert dropped[lower].sum() == pytest.approx(40 * token, rel=0.1)
    assert earlier[lower].sum() == pytest.approx(30 * token, rel=0.1)
    # The first of the kept tokens of the second edit is number 70.
    left = coloured[lower].argmax()
    assert kept[lower].argmax() == pytest.approx(left + 70 * token, abs=3)


def test_a_prompt_is_whole_chunks_of_named_parts(model: CausalModel) -> None:
    prompt = build_prompt(model.tokenizer, 32)
    assert len(prompt.token_ids) % 32 == 0
    stops = [0, *(part.stop for part in prompt.parts)]
    assert [part.start for part in prompt.parts] == stops[:-1]
    assert stops[-1] == len(prompt.token_ids)
    texts = {
        part.name: model.tokenizer.decode(prompt.token_ids[part.start : part.stop]) for part in prompt.parts
    }
    assert texts["fact"] == " The password of the harbour gate is marigold."
    assert texts["question"].endswith("Question: What is the password of the harbour gate?\nAnswer:")
    assert set(texts["filler"]) == {"\n"}
    whole = model.tokenizer.decode([*prompt.token_ids])
    assert ferry_log() in whole


@pytest.mark.parametrize(("text", "question"), [("a text", None), ("a text", "why?"), ("a request", "")])
def test_a_text_of_the_users(model: CausalModel, text: str, question: str | None) -> None:
    prompt = build_prompt(model.tokenizer, 1, text, question)
    asked = {None: "a text\n\nQuestion: What is this text about?\nAnswer:", "": "a request\n"}
    decoded = model.tokenizer.decode(prompt.token_ids)
    assert decoded == asked.get(question, "a text\n\nQuestion: why?\nAnswer:")
    assert "fact" not in {part.name for part in prompt.parts}
