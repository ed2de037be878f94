"""The report against a table computed by hand."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lmcache_stream as lms
from lmcache_stream.batch.tables import Table, as_html, write_table

from .conftest import BYTES, MakeStream, batch_of, first_half, prompt_of

# Arrivals in seconds after the request of four streams, the last of which fails after two tokens:
#
#            tokens at          TTFT   gaps (ITL)      TPOT          E2E
# stream 0   1 2 4              1      1 2             3/2 = 1.5     4
# stream 1   2 3 3 3 8          2      1 5             6/4 = 1.5     8
# stream 2   6                  6      -               -             6
# stream 3   9 90, then error   in no statistic
ARRIVALS = [[1.0, 2.0, 4.0], [2.0, 3.0, 3.0, 3.0, 8.0], [6.0], [9.0, 90.0]]
START = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the request of every pass begin at ``START``, and every event say when it came."""
    monkeypatch.setattr("lmcache_stream.generation.time.perf_counter", lambda: START)


async def scripted(context: lms.AsyncLMCacheContext) -> lms.BatchReport:
    def engine_of(number: int) -> Any:
        async def engine(*_: Any) -> AsyncIterator[lms.TokenEvent | lms.FinishEvent]:
            for arrived in ARRIVALS[number]:
                yield lms.TokenEvent(7, "x", START + arrived)
            if number == 3:
                raise lms.TruncatedStreamError("cut", token_ids=[7, 7])
            yield lms.FinishEvent("length", cached_tokens=None if number == 1 else 8 * number)

        return engine

    streams = [lms.create_request(context, engine_of(n), prompt_of(n)) for n in range(4)]
    return await batch_of(streams).decode({"max_tokens": 9})


def spread(count: int, mean: float, p50: float, p90: float, p99: float) -> Any:
    return pytest.approx({"count": count, "mean": mean, "p50": p50, "p90": p90, "p99": p99})


@pytest.mark.usefixtures("clock")
async def test_latencies_equal_a_table_computed_by_hand(context: lms.AsyncLMCacheContext) -> None:
    report = await scripted(context)
    figures = report.to_dict()
    # TTFT of 1, 2, 6: at rank 0.9 x 2 = 1.8 lies 2 + 0.8 x 4, at rank 1.98 2 + 0.98 x 4.
    assert figures["ttft"] == spread(3, 3.0, 2.0, 5.2, 5.92)
    # Gaps 1, 1, 2, 5 of all streams together: ranks 1.5, 2.7 and 2.97.
    assert figures["itl"] == spread(4, 2.25, 1.5, 4.1, 4.91)
    assert figures["tpot"] == spread(2, 1.5, 1.5, 1.5, 1.5)
    # E2E latencies 4, 6, 8.
    assert figures["e2e_latency"] == spread(3, 6.0, 6.0, 7.6, 7.96)
    assert (report.streams, report.completed, report.failed) == (4, 3, 1)
    assert report.failures == {"TruncatedStreamError": 1}
    # The failed stream's two tokens and its prompt are not among them.
    assert (report.input_tokens, report.output_tokens, report.cached_tokens) == (54, 9, 16)
    assert report.outcomes[3].token_ids == (7, 7)


async def test_throughputs_are_over_the_time_of_the_call(make: MakeStream) -> None:
    batch = batch_of([make([1, 0.1, 2, "length"]) for _ in range(3)])
    report = await batch.decode({"max_tokens": 2})
    assert report.duration >= 0.1
    assert report.output_tput == 6 / report.duration
    assert report.input_tput == 54 / report.duration
    assert report.edit_gb_per_s is None
    assert report.kv_bytes_before == 0


def outcome(
    began: float, seconds: float, *, edit_seconds: float, error: Exception | None = None
) -> lms.StreamOutcome:
    """Return what an edit came to that began so many seconds after the call, and waited before it edited."""
    edit = lms.EditReport(
        tokens_before=16,
        tokens_after=8,
        recomputed_tokens=0,
        bytes_before=3 * 10**9,
        bytes_after=10**9,
        cache_salt="~",
        seconds=edit_seconds,
    )
    phase = lms.PhaseOutcome(name="edit", began=began, seconds=seconds, attempts=1, edit=edit)
    return lms.StreamOutcome(
        stream_id=str(began),
        token_ids=(),
        text="",
        error=error,
        phases=(phase,),
        queue_time=began,
        seconds=seconds,
    )


def test_edits_per_second_are_over_the_time_in_which_something_was_edited() -> None:
    # Edits ran from 1 to 3, from 2 to 4 and from 9 to 10; a failed one counts for nothing.
    report = lms.BatchReport.of(
        [
            outcome(0.0, 3.0, edit_seconds=2.0),
            outcome(2.0, 2.0, edit_seconds=2.0),
            outcome(8.0, 2.0, edit_seconds=1.0),
            outcome(5.0, 2.0, edit_seconds=2.0, error=ValueError()),
        ],
        mode="modify",
        duration=10.0,
    )
    assert (report.kv_bytes_before, report.kv_bytes_after) == (9 * 10**9, 3 * 10**9)
    assert report.edit_gb_per_s == pytest.approx(9 / 4)
    assert report.to_dict()["edit_time"] == spread(3, 5 / 3, 2.0, 2.0, 2.0)
    assert report.to_dict()["queue_time"] == spread(3, 10 / 3, 2.0, 6.8, 7.88)
    assert report.failures == {"ValueError": 1}
    assert report.ttft is None


def test_retries_of_streams_that_failed_are_counted_too() -> None:
    one = outcome(0.0, 1.0, edit_seconds=1.0)
    tried = replace(one, phases=(replace(one.phases[0], attempts=3),))
    report = lms.BatchReport.of([one, tried, replace(tried, error=ValueError())], mode="modify")
    assert report.retries == 4


@pytest.mark.parametrize(
    ("mode", "seconds"), [("prefill", 1.0), ("modify", 4.0), ("decode", 2.0), ("run", 7.0)]
)
def test_without_a_duration_it_is_the_time_in_the_phases_of_the_mode(mode: Any, seconds: float) -> None:
    # A prefill from 1 to 2, behind a pause, an edit from 2 to 6, and decoding from 7 to 9.
    def passed(name: str, began: float, took: float, duration: float) -> lms.PhaseOutcome:
        metrics = lms.StreamPerfMetrics.from_arrivals(
            started=0.0,
            ended=duration,
            arrivals=[duration],
            input_tokens=14,
            cached_tokens=None,
            finish_reason="stop",
        )
        return lms.PhaseOutcome(name=name, began=began, seconds=took, attempts=2, metrics=metrics)

    edited = outcome(2.0, 4.0, edit_seconds=4.0)
    phases = (passed("prefill", 0.0, 2.0, 1.0), *edited.phases, passed("decode", 7.0, 2.0, 2.0))
    report = lms.BatchReport.of([replace(edited, phases=phases)], mode=mode)
    assert report.duration == seconds
    passes = {"prefill": 1, "modify": 0, "decode": 1, "run": 2}[mode]
    assert (report.input_tput, report.output_tput) == (14 * passes / seconds, passes / seconds)


async def test_a_run_counts_both_passes_and_shows_the_latencies_of_decoding(make: MakeStream) -> None:
    batch = batch_of([make([1, "length"], [7, 0.02, 8, "stop"]) for _ in range(2)])
    with pytest.raises(lms.InvalidRequestError, match="nothing to report"):
        batch.get_perf_metrics("run")
    await batch.run(first_half, {"max_tokens": 5})
    report = batch.get_perf_metrics("run")
    assert (report.input_tokens, report.output_tokens, report.cached_tokens) == (2 * (18 + 11), 6, 16)
    assert (report.kv_bytes_before, report.kv_bytes_after) == (2 * BYTES, BYTES)
    for name, count in (("ttft", 2), ("itl", 2), ("tpot", 2), ("prefill_ttft", 2), ("edit_time", 2)):
        assert getattr(report, name).count == count
    assert report.itl is not None
    assert report.itl.mean >= 0.02
    assert report.job_time is not None
    assert report.job_time.mean <= report.duration
    # The parts of it: the time of a part is less than that of the whole.
    prefill, edits, decode = (batch.get_perf_metrics(mode) for mode in ("prefill", "modify", "decode"))
    assert (prefill.output_tokens, decode.output_tokens) == (2, 4)
    assert edits.kv_bytes_before == 2 * BYTES
    assert prefill.tpot is edits.ttft is edits.job_time is decode.edit_time is None
    assert 0.02 <= decode.duration < report.duration
    assert prefill.duration < report.duration


async def test_the_configuration_is_reported_in_short(make: MakeStream) -> None:
    batch = batch_of([make(), make()], max_edit_bytes=10**6, max_attempts=2)
    report = await batch.modify(lms.keep(range(10_000)), timeout=0.01)
    assert report.failures == {"KVNotReadyError": 2}
    shown = dict(report.configuration)
    edit = shown.pop("edit")
    assert edit.startswith("Keep(indices=(0, 1, 2")
    assert len(edit) < 90
    assert shown == {"streams": 2, "max_concurrency": 2, "max_edit_bytes": 10**6, "max_attempts": 2}


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5678, "1,234.568"), (0.01234, "0.0123"), (0.0, "0"), (None, "-")]
)
def test_small_figures_keep_their_digits(value: float | None, text: str) -> None:
    assert Table.of_figures("", {"x": value}).rows == (("x", text),)


@pytest.mark.usefixtures("clock")
async def test_the_forms_of_a_report_say_the_same(
    context: lms.AsyncLMCacheContext, capsys: pytest.CaptureFixture[str]
) -> None:
    report = await scripted(context)
    figures = report.to_dict()
    assert json.loads(report.to_json()) == figures
    rows = list(csv.reader(io.StringIO(report.to_csv())))
    assert rows[0] == ["figure", "statistic", "value"]
    assert ["ttft", "p90", "5.2"] in rows
    assert ["failures", "TruncatedStreamError", "1"] in rows
    assert ["edit_gb_per_s", "", ""] in rows
    assert len(rows) == 1 + sum(len(one) if isinstance(one, dict) else 1 for one in figures.values())
    report.emit()
    printed = capsys.readouterr().out
    assert printed == f"{report}\n"
    lines = {line.split("  ")[0]: line.split() for line in printed.splitlines()}
    assert lines["TTFT"][1:] == ["3", "3,000.00", "2,000.00", "5,200.00", "5,920.00"]
    assert lines["ITL"][1:] == ["4", "2,250.00", "1,500.00", "4,100.00", "4,910.00"]
    assert lines["TruncatedStreamError"][1:] == ["1"]
    assert lines["max_attempts"][1:] == ["4"]
    assert "edits (GB/s)" not in printed
    html = report._repr_html_()
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", html)
    assert cells[cells.index("TTFT") :][:6] == ["TTFT", "3", "3,000.00", "2,000.00", "5,200.00", "5,920.00"]


def test_a_configuration_of_any_values_is_json() -> None:
    report = lms.BatchReport.of([], mode="decode", configuration={"folder": Path("/a")})
    assert json.loads(report.to_json())["configuration"] == {"folder": "/a"}
    # A table without rows is none.
    assert "Failures" not in str(report)


@pytest.mark.parametrize("form", ["html", "rich"])
def test_no_part_of_a_table_is_markup(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    title, *others = (f"<i>[bold]{name}&" for name in ("title", "table", "column", "row", "cell"))
    tables = [Table(others[0], (others[1],), ((others[2], others[3]),))]
    if form == "html":
        html = as_html(title, tables)
        assert [f"&lt;i&gt;{text[3:-1]}&amp;" in html for text in (title, *others)] == [True] * 5
        return
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    write_table(title, tables, terminal)
    assert [text in terminal.getvalue() for text in (title, *others)] == [True] * 5


def test_text_of_the_caller_s_is_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    report = lms.BatchReport.of([], mode="decode", configuration={"edit": "<lambda> [bold]& co"})
    assert "&lt;lambda&gt; [bold]&amp; co" in report._repr_html_()
    assert "<lambda> [bold]& co" in str(report)
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    report.emit()
    drawn = terminal.getvalue()
    assert "<lambda> [bold]& co" in drawn
    assert "│" in drawn
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    terminal.truncate(0)
    report.emit()
    assert "│" not in terminal.getvalue()
    assert "<lambda> [bold]& co" in terminal.getvalue()
