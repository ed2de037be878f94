"""``lmcache-stream doctor``: exit codes, JSON alone on stdout, Ctrl-C, the embedded stack."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from lmcache_stream import cli
from lmcache_stream.doctor import Deadlines, Result, Status, Targets
from lmcache_stream.doctor.checks import CHECKS

from ..tiny_model import write_tiny_llama
from .conftest import http_server

COMMAND = """
import signal, sys
# A test run in the background has SIGINT ignored, and its children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
from lmcache_stream.cli import main
sys.exit(main(["doctor", *sys.argv[1:]]))
"""
NOWHERE = [
    *("--engine-url", "http://127.0.0.1:9", "--cache-url", "tcp://127.0.0.1:9"),
    *("--http-url", "http://127.0.0.1:9"),
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``examine`` is asked; ``results`` are what it finds."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    found: dict[str, Any] = {"results": [Result("engine", "reachable", Status.OK, "there")]}

    async def examine(targets: Targets, *, deadlines: Deadlines, report: Any) -> list[Result]:
        found.update(targets=targets, deadlines=deadlines)
        sys.stdout.write("a library says something\n")
        for result in found["results"]:
            report(result)
        return list(found["results"])

    monkeypatch.setattr("lmcache_stream.doctor.examine", examine)
    return found


def test_the_defaults_are_those_of_the_readme(asked: dict[str, Any]) -> None:
    assert cli.main(["doctor"]) == 0
    assert asked["targets"] == Targets(
        engine_url="http://localhost:8000",
        cache_url="tcp://localhost:5555",
        http_url="http://localhost:8080",
    )
    assert asked["targets"].model is None
    assert asked["deadlines"] == Deadlines()


def test_options_are_handed_on(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of the environment")
    arguments = [*NOWHERE, "--model", "tiny", "--model-path", "/models/tiny", "--timeout", "7"]
    assert cli.main(["doctor", *arguments]) == 0
    assert asked["targets"].api_key == "of the environment"
    assert cli.main(["doctor", *arguments, "--api-key", "given"]) == 0
    assert asked["targets"] == Targets(
        engine_url="http://127.0.0.1:9",
        cache_url="tcp://127.0.0.1:9",
        http_url="http://127.0.0.1:9",
        model="tiny",
        model_path="/models/tiny",
        api_key="given",
    )
    assert asked["deadlines"] == Deadlines(total=7)


@pytest.mark.parametrize(
    ("status", "code"),
    [(Status.OK, 0), (Status.WARNING, 0), (Status.FAILED, 1), (Status.NOT_CHECKED, 1)],
)
def test_the_exit_code_says_whether_something_failed(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str], status: Status, code: int
) -> None:
    asked["results"].append(Result("model", "RoPE", status, "seen", "advice"))
    assert cli.main(["doctor"]) == code
    out, err = capsys.readouterr()
    assert "engine\n  ok           reachable      there\n" in out
    assert err == ""
    assert cli.main(["doctor", "--json"]) == code
    out, err = capsys.readouterr()
    assert [one["status"] for one in json.loads(out)] == ["ok", str(status)]
    assert "a library says something" in err
    assert "reachable      there" in err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--cache-url", "localhost:5555"],
            "cache_url='localhost:5555' does not have the form tcp://HOST:PORT",
        ),
        (["--embedded", "--http-url", "http://localhost:1"], "--embedded checks a stack of its own"),
    ],
)
def test_an_error_of_usage_is_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert line in err
    assert len(err.splitlines()) == 1


def test_where_nothing_is_three_checks_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json", *NOWHERE]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(one["group"], one["name"]) for one in found] == [(check.group, check.name) for check in CHECKS]
    failed = [one for one in found if one["status"] == "failed"]
    assert [(one["group"], one["name"]) for one in failed] == [
        ("engine", "reachable"),
        ("cache HTTP", "reachable"),
        ("cache ZeroMQ", "reachable"),
    ]
    assert {one["status"] for one in found} == {"failed", "not checked"}


@contextmanager
def hanging_engine() -> Iterator[tuple[str, threading.Event]]:
    """An engine that takes requests and does not answer them, in a thread; and when it has got one."""
    got, ready, stop = threading.Event(), threading.Event(), threading.Event()
    addresses: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "tiny"}]})
        if request.path == "/v1/completions":
            got.set()
            await asyncio.sleep(60)
        return web.Response(status=404)

    async def main() -> None:
        async with http_server(answer) as address:
            addresses.append(address)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield addresses[0], got
    finally:
        stop.set()
        thread.join(10)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_what_it_had_found(number: signal.Signals, code: int) -> None:
    with hanging_engine() as (url, got):
        command = [sys.executable, "-c", COMMAND, *NOWHERE, "--engine-url", url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert got.wait(30)
            process.send_signal(number)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == code
    assert out.splitlines()[-1].split() == ["ok", "model", "serves", "'tiny',", "path", "'tiny'"]
    assert "Traceback" not in err


def test_the_embedded_stack_is_healthy(tmp_path: Path) -> None:
    """As a process of its own, with nothing of it left in shared memory."""
    folder = write_tiny_llama(tmp_path)
    command = [sys.executable, "-c", COMMAND, "--embedded", "--json", "--model", str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=90)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) == len(CHECKS)
    assert {one["status"] for one in results} <= {"ok", "warning"}
    # On a machine with little room in /dev/shm, and only there, KV is sent as pickles.
    assert [one["name"] for one in results if one["status"] == "warning"] in ([], ["data plane"])
    assert re.search(rf"^{len(CHECKS)} ok$|^{len(CHECKS) - 1} ok, 1 warning$", done.stderr, re.MULTILINE)
    (plane,) = (one["seen"] for one in results if one["name"] == "data plane")
    pool = re.search(r"/dev/shm/\S+", plane)
    assert pool is None or not Path(pool[0]).exists()
    assert (pool is None) == ("pickles" in plane)
