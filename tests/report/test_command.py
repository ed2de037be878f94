"""``lmcache-stream report``: what it says, what it writes, and what it leaves alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmcache_stream import cli
from lmcache_stream.report import write_report

from .making import failed_row, row, write_job


def test_it_writes_a_page_and_says_what_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path / "a.jsonl", [row("x"), failed_row("y"), row("x"), '{"id": "z", "half'])
    assert cli.main(["report", "a.jsonl"]) == 0
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == "2 ids, 1 run: report.html"
    figures = {line.split("  ")[0]: line.split() for line in lines}
    totals = figures["SnapKV(ratio=0.5, sinks=4, window=32)"]
    assert totals[-8:] == ["2", "1", "0", "1", "of", "1", "50.0%", "3"]
    assert figures["Time to first token (TTFT)"][-5:] == ["1", "100.00", "100.00", "100.00", "100.00"]
    assert lines[-2].startswith("a.jsonl: 1 line could not be read, line 4: ")
    assert lines[-1] == "1 row was replaced by a later one with the same id"


def test_several_files_are_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        write_job(tmp_path / "a.jsonl", [row("x"), row("y")]),
        write_job(tmp_path / "b.jsonl", [row("y", policy=None, kv=None, baseline=None)]),
    ]
    page = tmp_path / "both.html"
    assert cli.main(["report", *map(str, paths), "--html", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"2 ids, 2 runs: {page}"
    assert page.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "out.jsonl: No such file"), ("hello\n", "out.jsonl is not the output of `lmcache-stream run`")],
)
def test_what_is_no_output_is_an_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, told: str
) -> None:
    output, page = tmp_path / "out.jsonl", tmp_path / "report.html"
    if content is not None:
        output.write_text(content)
    page.write_text("yesterday's")
    assert cli.main(["report", str(output), "--html", str(page)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.count("\n") == 1
    assert page.read_text() == "yesterday's"


def test_a_page_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = write_job(tmp_path / "a.jsonl", [row("x")])
    assert cli.main(["report", str(output), "--html", str(tmp_path / "none" / "report.html")]) == 1
    assert "No such file or directory" in capsys.readouterr().err


def test_the_page_never_takes_the_place_of_an_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = write_job(tmp_path / "a.jsonl", [row("x")])
    before = output.read_bytes()
    (tmp_path / "link.html").symlink_to(output)
    for page in (output, tmp_path / "link.html"):
        assert cli.main(["report", str(output), "--html", str(page)]) == 1
        assert "would replace a job's output" in capsys.readouterr().err
    assert output.read_bytes() == before


def test_the_page_is_replaced_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = write_job(tmp_path / "a.jsonl", [row("x")])
    page = tmp_path / "report.html"
    page.write_text("yesterday's")
    seen: list[str] = []

    def interrupted(self: Path, target: Path) -> Path:
        seen.append(page.read_text())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_report([output], page)
    assert seen == ["yesterday's"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "report.html"]
    write_report([output], page)
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "report.html"]


def test_a_link_to_a_page_stays_one(tmp_path: Path) -> None:
    output = write_job(tmp_path / "a.jsonl", [row("x")])
    target, page = tmp_path / "target.html", tmp_path / "report.html"
    target.write_text("yesterday's")
    page.symlink_to(target)
    write_report([output], page)
    assert page.is_symlink()
    assert target.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_page_takes_the_place_of_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    output, page = write_job(tmp_path / "out.jsonl", [row("x")]), tmp_path / "report.html"
    page.symlink_to(page)
    assert cli.main(["report", str(output), "--html", str(page)]) == 0
    assert not page.is_symlink()


def test_a_file_s_name_can_be_any_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python has bytes that are no UTF-8 as lone surrogates, which a page cannot hold."""
    monkeypatch.chdir(tmp_path)
    for name in (b"a\xff.jsonl", b"b\xff.jsonl"):
        write_job(Path(os.fsdecode(name)), [row("x")])
    assert cli.main(["report", os.fsdecode(b"a\xff.jsonl"), os.fsdecode(b"b\xff.jsonl")]) == 0
    page = Path("report.html").read_text(encoding="utf-8")
    assert '"name":"a?.jsonl"' in page
    assert "2 runs: report.html" in capsys.readouterr().out


@pytest.mark.parametrize("value", [1e308, -1e308, 5e-324, 10**4000])
def test_figures_that_no_job_has_are_no_traceback(tmp_path: Path, value: float) -> None:
    odd = {"ttft": value, "e2e_latency": value, "itl": [value], "output_tokens": 10**9, "attempts": 3}
    rows = [row("x"), row("y", metrics=odd), row("z", metrics={"output_tokens": value, "e2e_latency": 1.0})]
    output = write_job(tmp_path / "out.jsonl", rows)
    told = str(write_report([output], tmp_path / "report.html"))
    lost = 2 if value != 5e-324 else 1
    assert f"out.jsonl: {'1 line' if lost == 1 else '2 lines'} could not be read" in told
