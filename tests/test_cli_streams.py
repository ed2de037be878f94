"""A command whose standard streams are closed, full, left by their reader, or of few characters."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_stream import cli
from lmcache_stream.cli.streams import say

from .report.making import row, write_job


class Left(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(text)


def test_what_cannot_be_told_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    left = Left()
    monkeypatch.setattr(sys, "stderr", left)
    say("a row is bad")
    # Another is there, which does not fail at Python's end.
    found = sys.stderr
    assert found is not left
    say("another")
    found.close()


def test_an_error_that_cannot_be_told_is_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Left())
    assert cli.main(["report", str(tmp_path / "nothing.jsonl")]) == 1
    sys.stderr.close()


def test_an_output_of_few_characters_shows_the_others_as_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write_job(tmp_path / f"{name}.jsonl", [row("x", policy=name)]) for name in ("ü", "三")]
    written = io.BytesIO()
    with io.TextIOWrapper(written, encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert cli.main(["report", *map(str, paths), "--html", str(tmp_path / "ü.html")]) == 0
        out.flush()
        told = written.getvalue().decode("ascii")
    assert "2 runs: " in told
    assert told.splitlines()[0].endswith("/\\xfc.html")


@pytest.mark.parametrize("closed", [(0, 1, 2), (1,), (2,)])
def test_streams_that_are_closed_are_opened_on_nothing(tmp_path: Path, closed: tuple[int, ...]) -> None:
    """No file of the command's own may come to be one of them."""
    output, page = write_job(tmp_path / "out.jsonl", [row("x")]), tmp_path / "report.html"
    script = (
        "import os, sys, lmcache_stream.cli as cli\n"
        f"code = cli.main(['report', {str(output)!r}, '--html', {str(page)!r}])\n"
        "held = [os.readlink(f'/proc/self/fd/{number}') for number in range(3)]\n"
        f"open({str(tmp_path / 'held')!r}, 'w').write(repr(held)); sys.exit(code)"
    )
    shell = f'exec {sys.executable} -c "$SCRIPT" {" ".join(f"{number}>&-" for number in closed)}'
    done = subprocess.run(
        ["bash", "-c", shell], env={**os.environ, "SCRIPT": script}, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    held = json.loads((tmp_path / "held").read_text().replace("'", '"'))
    assert [held[number] for number in closed] == ["/dev/null"] * len(closed)
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
