"""What people read: aligned, in colour on a terminal alone; and what programs read."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

from lmcache_stream.doctor import Result, Status
from lmcache_stream.doctor.render import Printer, as_json
from lmcache_stream.doctor.results import failed, ok, one_line, warning

RESULTS = [
    Result("engine", "reachable", Status.OK, "http://localhost:8000 answers over HTTP"),
    Result("engine", "cached tokens", Status.WARNING, "not reported [bold]ä[/bold]", "start vLLM with --x"),
    Result("cache HTTP", "reachable", Status.FAILED, "nothing listens", "start LMCache"),
    Result("cache HTTP", "status", Status.NOT_CHECKED, "because of cache HTTP: reachable"),
]
TEXT = """\
engine
  ok           reachable      http://localhost:8000 answers over HTTP
  warning      cached tokens  not reported [bold]ä[/bold]
                              -> start vLLM with --x
cache HTTP
  failed       reachable      nothing listens
                              -> start LMCache
  not checked  status         because of cache HTTP: reachable
1 ok, 1 warning, 1 failed, 1 not checked
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(out: io.StringIO) -> str:
    printer = Printer(out)
    for result in RESULTS:
        printer.show(result)
    printer.sum_up(RESULTS)
    return out.getvalue()


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    # Narrower than the lines, which must not be wrapped: people look for words in them.
    monkeypatch.setenv("COLUMNS", "40")


def test_what_is_no_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(io.StringIO()) == TEXT
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert printed(io.StringIO()) == TEXT


def test_a_terminal_gets_the_same_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = printed(Terminal())
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == TEXT
    for colour, status in (("32", "ok"), ("33", "warning"), ("1;31", "failed"), ("2", "not checked")):
        assert f"\x1b[{colour}m{status}" in coloured
    monkeypatch.setenv("NO_COLOR", "")
    assert printed(Terminal()) == coloured


def test_nobody_who_objects_to_colour_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(Terminal()) == TEXT


def test_without_rich_a_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert printed(Terminal()) == TEXT


def test_the_sum_names_only_what_there_is() -> None:
    out = io.StringIO()
    Printer(out).sum_up([Result("g", "a", Status.FAILED, "x"), Result("g", "b", Status.OK, "x")] * 2)
    assert out.getvalue() == "2 ok, 2 failed\n"


def test_each_line_is_there_at_once() -> None:
    flushed: list[str] = []

    class Watched(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue())

    out = Watched()
    Printer(out).show(RESULTS[0])
    assert flushed[-1] == "".join(TEXT.splitlines(keepends=True)[:2])


def test_json_has_every_field() -> None:
    found = json.loads(as_json(RESULTS))
    assert [Result(**{**one, "status": Status(one["status"])}) for one in found] == RESULTS
    assert set(found[0]) == {"group", "name", "status", "seen", "advice"}
    assert json.loads(as_json([])) == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\nb\r\n  c\t d", "a b c d"),
        ("a\x1b[31mb\x07", "a?[31mb?"),
        ("ä\u2028b", "ä b"),
        ("", ""),
    ],
)
def test_what_others_say_stays_in_its_line(text: str, line: str) -> None:
    assert one_line(text) == line
    assert ok(text).seen == warning(text, "x").seen == failed("x", text).advice == line
