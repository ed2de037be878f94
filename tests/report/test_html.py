"""The page as text: what its script is given, and that no text of a row becomes markup."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_stream.report import build_page, compare
from lmcache_stream.report.data import page_data
from lmcache_stream.report.html import embedded_json
from lmcache_stream.report.rows import Broken

from .making import failed_row, row
from .test_runs import job

HOSTILE = "</script><script>alert(1)</script><!--<script>]]>&lt;\u2028$title ${x}"


class Elements(HTMLParser):
    """The elements of a page, and the text of its scripts, as a browser takes them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._is_inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.append("")

        self._is_inside = True

    def handle_endtag(self, tag: str) -> None:
        self._is_inside = False

    def handle_data(self, data: str) -> None:
        if self._is_inside:
            self.texts[-1] += data

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        both = zip(self.elements, self.texts, strict=True)
        return [(attributes, text) for (name, attributes), text in both if name == tag]


def elements(page: str) -> Elements:
    parser = Elements()
    parser.feed(page)
    parser.close()
    return parser


def hostile_page() -> tuple[Elements, dict[str, Any]]:
    bad = row(
        HOSTILE,
        policy=HOSTILE,
        model=HOSTILE,
        text=HOSTILE,
        pieces=[[HOSTILE, True], [HOSTILE, False]],
        baseline={"text": HOSTILE},
        extra={HOSTILE: HOSTILE, "number": 2**60, "list": [HOSTILE]},
    )
    failed = failed_row(
        "e", error={"type": HOSTILE, "message": HOSTILE, "phase": HOSTILE}, policy=HOSTILE, model=HOSTILE
    )
    page = elements(build_page(compare([job(f"{HOSTILE.replace('/', '')}.jsonl", bad, failed)])))
    data, _ = page.of("script")
    return page, json.loads(data[1])


def test_hostile_text_stays_text() -> None:
    page, data = hostile_page()
    assert [attributes.get("id") for attributes, _ in page.of("script")] == ["data", None]
    assert [text for _, text in page.of("title")] == [HOSTILE]
    assert data["runs"][0]["label"] == HOSTILE
    first, second = (entry["rows"][0] for entry in data["entries"])
    assert (first["text"], first["baseline"]["text"]) == (HOSTILE, HOSTILE)
    assert data["texts"] == [HOSTILE * 2]
    assert first["extra"] == [
        [HOSTILE, HOSTILE],
        ["number", str(2**60)],
        ["list", json.dumps([HOSTILE], ensure_ascii=False)],
    ]
    assert second["error"] == {"type": HOSTILE, "message": HOSTILE, "phase": HOSTILE}


@given(st.text())
def test_any_text_comes_through_a_script_element(text: str) -> None:
    embedded = embedded_json({text: [text]})
    assert not re.search("[<>&\u2028\u2029]", embedded)
    assert json.loads(embedded) == {text: [text]}


def test_what_could_end_the_element_of_the_data_is_escaped() -> None:
    assert embedded_json("<>&\u2028\u2029/") == '"\\u003c\\u003e\\u0026\\u2028\\u2029/"'
    # What no JSON has would stop the page's script.
    with pytest.raises(ValueError, match="JSON"):
        embedded_json(float("nan"))


def test_the_page_allows_itself_its_own_script_and_style_and_nothing_else() -> None:
    page, _ = hostile_page()
    (policy,) = [
        attributes["content"] or ""
        for attributes, _ in page.of("meta")
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        digest = hashlib.sha256(page.of(tag)[-1][1].encode()).digest()
        assert allowed[name] == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert allowed["default-src"] == "'none'"
    assert "connect-src" not in allowed


def test_nothing_is_fetched_from_anywhere() -> None:
    page, _ = hostile_page()
    addresses = [
        value
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "data", "action")
    ]
    assert addresses == ["data:,", "#rows"]
    assert "@import" not in page.of("style")[0][1]
    assert "url(" not in page.of("style")[0][1]


def test_the_script_makes_no_markup_of_text() -> None:
    for file in resources.files("lmcache_stream.report").joinpath("page").iterdir():
        if file.name.endswith(".js"):
            source = file.read_text(encoding="utf-8")
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", source
            )


def test_a_prompt_that_runs_share_is_in_the_page_once() -> None:
    pieces = [["One 🙂 ", True], ["", True], ["two", False]]
    other = [["One ", False], ["🙂 two", True]]
    found = compare([job("a", row("x", pieces=pieces)), job("b", row("x", policy="P()", pieces=other))])
    data = page_data(found)
    assert data["texts"] == ["One 🙂 two"]
    first, second = data["entries"][0]["rows"]
    # A browser counts the smile as two.
    assert (first["prompt"], first["pieces"]) == (0, [[7, 1], [3, 0]])
    assert (second["prompt"], second["pieces"]) == (0, [[4, 0], [6, 1]])


def test_an_unknown_prompt_is_not_an_empty_one() -> None:
    (entry,) = page_data(compare([job("a", row("x", pieces=None))]))["entries"]
    assert "prompt" not in entry["rows"][0]
    (entry,) = page_data(compare([job("a", row("x", pieces=[]))]))["entries"]
    assert (entry["rows"][0]["prompt"], entry["rows"][0]["pieces"]) == (0, [])


def test_gaps_are_in_the_page_as_what_is_shown_of_them() -> None:
    gaps = [0.01 * number for number in range(1, 102)]
    (entry,) = page_data(compare([job("a", row("x", metrics={"itl": gaps, "ttft": None}))]))["entries"]
    assert entry["rows"][0]["metrics"] == {"itl": pytest.approx([0.51, 0.51, 0.91, 1.0])}


def test_of_many_lines_that_were_not_read_the_first_are_named() -> None:
    broken = tuple(Broken(line, "no JSON") for line in range(1, 31))
    (file,) = page_data(compare([replace(job("a", row("x")), broken=broken)]))["files"]
    assert (file["rows"], file["broken"]) == (1, 30)
    assert [each["line"] for each in file["broken_lines"]] == list(range(1, 21))


def test_rows_know_their_order_and_runs_what_was_lost() -> None:
    (file,) = [job("a", failed_row("x"), row("y"), row("x"))]
    data = page_data(compare([file]))
    assert [(entry["id"], entry["rows"][0]["order"]) for entry in data["entries"]] == [("y", 1), ("x", 2)]
    assert data["runs"][0]["replaced"] == 1


def test_the_title_names_the_run_or_says_how_many() -> None:
    one, two = job("a", row("x", policy="P(<1>)")), job("b", row("x", policy="Q()"))
    assert elements(build_page(compare([one]))).of("title")[0][1] == "P(<1>)"
    page = build_page(compare([one, two]))
    assert html.escape("P(<1>), compared with 1 more") in page
