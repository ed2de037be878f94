"""Progress bars: on a terminal alone, by rich alone, and of a batch's calls."""

from __future__ import annotations

import io
import subprocess
import sys
import types
from typing import Any

import pytest
from rich.console import Console

import lmcache_stream as lms
from lmcache_stream import progress
from lmcache_stream.progress import Bars, check_progress, counting


def console(*, is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=100, color_system=None)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("stays", [True, False])
def test_bars_are_drawn_on_a_terminal(stays: bool) -> None:
    on = console(is_terminal=True)
    with Bars(on, stays=stays) as bars:
        bars.show(1, "[b]first", 1, 4, "a quarter")
        bars.say("a [b]line[/b] between")
        bars.show(2, "second", 1, None)
        bars.show(2, "second", 4, 8, "known now")
        bars.show(1, "[b]first", 4, 4, "all")
        assert [task.total for task in bars._progress.tasks] == [4, 8]
    text = written(on)
    # rich leaves a hidden cursor to whoever forgets to stop it.
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    last = text[text.rindex("[b]first") :]
    assert "all" in last
    assert "known now" in last
    # The end of the escape that erases a line.
    assert ("[2K" in last) is not stays
    assert "a [b]line[/b] between\n" in text.replace("\r", "")


def test_nothing_but_lines_elsewhere() -> None:
    off = console(is_terminal=False)
    with Bars(off) as bars:
        bars.show(1, "first", 1, 4)
        bars.say("a line")
    assert written(off).split() == ["a", "line"]


def test_stderr_is_where_bars_go(capsys: pytest.CaptureFixture[str]) -> None:
    with Bars() as bars:
        bars.show(1, "first", 1, 4)
        bars.say("a line")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.split("\n")[0] == "a line"


def test_things_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    on = console(is_terminal=True)
    monkeypatch.setattr(progress, "Bars", lambda *, stays: Bars(on, stays=stays))
    with counting("decode", 3, is_wanted=True) as count:
        for is_ok in (True, False, True):
            count(is_ok)
    assert "decode" in written(on)
    assert "3 of 3, 1 failed" in written(on)
    with counting("decode", 3, is_wanted=False) as count:
        count(True)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_progress()
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    wanted = r"progress bars need {}: pip install 'lmcache-stream\[jobs\]'"
    with pytest.raises(lms.InvalidRequestError, match=wanted.format("ipywidgets")):
        check_progress()
    monkeypatch.setitem(sys.modules, "rich", None)
    for make in (lms.AsyncLMCacheBatchedStream, lms.LMCacheBatchedStream):
        with pytest.raises(lms.InvalidRequestError, match=wanted.format("rich")):
            make(progress=True)
        make()


def test_the_core_does_not_import_rich() -> None:
    program = """
import sys
import lmcache_stream, lmcache_stream.progress, lmcache_stream.jobs, lmcache_stream.cli.job
from lmcache_stream.progress import counting
with counting("x", 1, is_wanted=False):
    pass
assert "rich" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


async def _batch(batch: Any) -> None:
    stream = lms.create_request(None, _engine, [1, 2, 3])  # type: ignore[arg-type]
    batch.add(stream)
    await batch.run_streams({"max_tokens": 2})


async def _engine(*_: Any) -> Any:
    yield lms.TokenEvent(1, "x")
    yield lms.FinishEvent("stop")


async def test_a_batch_draws_a_bar_where_that_was_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    on = console(is_terminal=True)
    monkeypatch.setattr(progress, "Bars", lambda *, stays: Bars(on, stays=stays))
    await _batch(lms.AsyncLMCacheBatchedStream())
    assert written(on) == ""
    await _batch(lms.AsyncLMCacheBatchedStream(progress=True))
    assert "1 of 1" in written(on)
    assert "decode" in written(on)
