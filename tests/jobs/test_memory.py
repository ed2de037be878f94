"""The memory of a job does not grow with its rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, gc, json, resource, sys
from pathlib import Path
import lmcache_stream as lms
from lmcache_stream.jobs import Job, Output, Plan, Servers, Source

ANSWER = "an answer of some words " * 8

async def engine(prompt, params, salt):
    yield lms.TokenEvent(prompt[0], ANSWER)
    yield lms.TokenEvent(7, "")
    yield lms.FinishEvent("stop", cached_tokens=3)

def nothing():
    raise lms.InvalidRequestError("no tokenizer is wanted")

async def main(prompts, output):
    # In two parts, the second of which finds the ids of the first.
    for path, resume in ((prompts, False), (prompts, True)):
        peaks = {}

        def moved():
            through = job.counts.done // 10_000 * 10_000
            if through not in peaks:
                peaks[through] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        servers = Servers(context=None, engine=engine, model="m", load_tokenizer=nothing)
        plan = Plan(policy=None, sampling_params={"max_tokens": 2})
        out = Output(Path(output), resume=resume)
        out.open()
        job = Job(servers, plan, Source(path, out.done_ids), out)
        await job.run(moved=moved)
        out.close()
        report = job.report()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        counts = [job.counts.done, job.counts.skipped]
        print(json.dumps([counts, peaks, peak, report.completed, report.outcomes]), flush=True)

asyncio.run(main(*sys.argv[1:]))
"""
# KiB. A hundred bytes a row would be 8,800; the answers alone are 17,000.
_MOST_GROWTH = 8_000
_ROWS = 100_000


@pytest.mark.timeout(300)
def test_peak_memory_is_that_of_a_tenth_of_the_rows(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    with prompts.open("w") as file:
        for number in range(_ROWS):
            file.write(json.dumps({"id": f"row-{number}", "prompt_token_ids": [number % 1000, 2, 3]}) + "\n")
    command = [sys.executable, "-c", PROGRAM, str(prompts), str(tmp_path / "out.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, again = map(json.loads, done.stdout.splitlines())
    counts, peaks, peak, completed, outcomes = first
    assert (counts, completed, outcomes) == ([_ROWS, 0], _ROWS, [])
    assert peaks[str(_ROWS)] - peaks["10000"] < _MOST_GROWTH
    # Nor do the ids of an output that is gone on with.
    counts, _, peak_again, _, _ = again
    assert counts == [0, _ROWS]
    assert peak_again - peak < _MOST_GROWTH
    with (tmp_path / "out.jsonl").open("rb") as output:
        assert sum(1 for _ in output) == _ROWS
