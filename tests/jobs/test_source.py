"""Sources: each id once, rows that are done passed over, and input that comes slowly."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import lmcache_stream as lms
from lmcache_stream.jobs.prompts import PromptRow
from lmcache_stream.jobs.source import BadRow, Seen, SeenIds, Source


def line_of(row_id: str | int) -> str:
    return json.dumps({"id": row_id, "prompt": "x"}) + "\n"


def every(source: Source) -> Iterator[PromptRow | BadRow]:
    while (found := source.read()) is not None:
        yield from found


def test_ids_are_seen_once() -> None:
    ids = SeenIds()
    ids.mark_done(["done", 1, "done"])
    assert [ids.see(one) for one in ("new", "new", "done", "done")] == [
        Seen.NEW,
        Seen.REPEATED,
        Seen.DONE,
        Seen.REPEATED,
    ]
    # A string and an integer are two ids.
    assert [ids.see("1"), ids.see(1), ids.see(2**70)] == [Seen.NEW, Seen.DONE, Seen.NEW]
    ids.close()


def test_ids_for_which_there_is_no_room_are_an_error_that_says_so() -> None:
    ids = SeenIds()
    ids._database.execute("PRAGMA max_page_count = 4")
    with pytest.raises(OSError, match=r"temporary file of ids .* full; SQLITE_TMPDIR names"):
        ids.mark_done(f"{number}" * 20 for number in range(5000))
    with pytest.raises(OSError, match="temporary file of ids"):
        for number in range(5000):
            ids.see(f"new {number}" * 20)
    ids.close()


def test_rows_come_in_order_with_what_is_wrong_between_them(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line_of("a") + "\n" + line_of("done") + "no\n" + line_of("a") + line_of("b").rstrip())
    source = Source(str(path), lambda: ["done"])
    source.open()
    assert source.size is not None
    assert source.size == path.stat().st_size
    found = list(every(source))
    assert [row.row_id for row in found if isinstance(row, PromptRow)] == ["a", "b"]
    bad = [(row.line, row.reason) for row in found if isinstance(row, BadRow)]
    assert bad[0][0] == 4
    assert bad[0][1].startswith("no JSON")
    assert bad[1] == (5, "id 'a' was there before")
    assert source.passed_over == 1
    # With the end that the last line lacks.
    rows = sum(row.size for row in found if isinstance(row, PromptRow))
    assert rows + source.passed_bytes == source.size + 1
    source.close()
    source.close()


def test_a_row_that_is_longer_than_a_read_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    text = "ü三" * 100_000
    path.write_text(
        json.dumps({"id": 1, "prompt": text}, ensure_ascii=False) + "\n" + line_of(2), encoding="utf-8"
    )
    source = Source(str(path))
    source.open()
    first, second = every(source)
    source.close()
    assert isinstance(first, PromptRow)
    assert first.prompt == text
    assert isinstance(second, PromptRow)
    assert second.row_id == 2


def test_standard_input_is_read_as_it_comes() -> None:
    reader, writer = os.pipe()
    saved = os.dup(0)
    os.dup2(reader, 0)
    source = Source("-")
    try:
        source.open()
        assert source.size is None
        for row_id in ("a", "b"):
            os.write(writer, line_of(row_id).encode())
            (row,) = source.read() or []
            assert isinstance(row, PromptRow)
            assert row.row_id == row_id
        os.close(writer)
        assert list(every(source)) == []
        source.close()
        # It is the process's, and stays open.
        assert os.fstat(0) == os.fstat(reader)
    finally:
        source.close()
        os.dup2(saved, 0)
        for file in (saved, reader):
            os.close(file)


@pytest.mark.parametrize(("name", "words"), [("nowhere", "No such file"), ("", "it is a folder")])
def test_what_cannot_be_read_is_told(tmp_path: Path, name: str, words: str) -> None:
    source = Source(str(tmp_path / name))
    with pytest.raises(lms.InvalidRequestError, match=words):
        source.open()
    source.close()
