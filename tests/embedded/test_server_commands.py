"""The example servers as processes: what they say, and how they end."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from document_service.command import command

from lmcache_stream.embedded.engine import CausalModel

from .answer_client import ask, asking
from .served import MODULES, document

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ("server.py", "fastapi_server.py")

both = pytest.mark.parametrize("script", SCRIPTS)

QUESTION = {"document": document(1), "question": "When?", "policy": "keydiff"}


@dataclass
class Running:
    """A server process; ``said`` is what it printed when it listened."""

    process: asyncio.subprocess.Process
    said: str
    url: str

    async def end(self) -> tuple[int, str]:
        """Return exit status and stderr once it has ended."""
        async with asyncio.timeout(60):
            _, errors = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()


@asynccontextmanager
async def started(script: str, model: CausalModel, *arguments: str) -> AsyncIterator[Running]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(EXAMPLES / script), "--model", model.name, "--port", "0", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        said = (await process.stdout.readuntil(b"/metrics\n")).decode()
        found = re.match(r"http://127\.0\.0\.1:\d+", said)
        assert found
        yield Running(process, said, found[0])
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@both
async def test_what_it_prints_can_be_tried_and_sigterm_lets_answers_end(
    script: str, model: CausalModel
) -> None:
    async with started(script, model) as running:
        found = re.search(r"curl -N (\S+)/v1/answers -d '(.*?)'", running.said, re.DOTALL)
        assert found
        reply = await ask(found[1], json.loads(found[2]))
        assert reply.data("done")["text"] == reply.text
        async with asking(running.url, {**QUESTION, "max_tokens": 200}) as reply:
            events = reply.read()
            assert await anext(events)
            running.process.send_signal(signal.SIGTERM)
            async for _ in events:
                pass
        assert reply.data("done")["text"] == reply.text
        assert await running.end() == (0, "")


@both
async def test_sigterm_ends_answers_after_their_grace(script: str, endless: CausalModel) -> None:
    async with started(script, endless, "--grace", "0.2") as running:
        async with asking(running.url, {**QUESTION, "max_tokens": 3000}) as reply:
            events = reply.read()
            while ("edit" not in dict(reply.events)) or len(reply.events) < 5:
                assert await anext(events)
            running.process.send_signal(signal.SIGTERM)
            async for _ in events:
                pass
        assert reply.events[-1][0] == "error"
        assert reply.data("error")["type"] == "ServerStoppingError"
        assert await running.end() == (0, "")


@both
async def test_a_second_signal_is_impatient(script: str, endless: CausalModel) -> None:
    async with started(script, endless, "--grace", "600") as running:
        async with asking(running.url, {**QUESTION, "max_tokens": 3000}) as reply:
            events = reply.read()
            assert await anext(events)
            for _ in range(2):
                running.process.send_signal(signal.SIGINT)
                await asyncio.sleep(0.2)
            async for _ in events:
                pass
        assert reply.data("error")["type"] == "ServerStoppingError"
        assert await running.end() == (0, "")


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str | int | None:
    """Run it in this process, which is faster, and return what it ends with."""
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *arguments])
    with pytest.raises(SystemExit) as end:
        command(module.__doc__, module.listening)
    return end.value.code


@pytest.mark.parametrize("module", MODULES)
def test_a_port_in_use_is_one_line(
    module: ModuleType, model: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = run(module, monkeypatch, "--model", model.name, "--port", str(taken.getsockname()[1]))
    assert isinstance(line, str)
    assert line.startswith("OSError: ")
    assert "address already in use" in line.lower()
    assert "\n" not in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--port", "65536"), "'65536' is not a port"),
        (("--running", "0"), "'0' is not a whole number from 1"),
        (("--grace", "-1"), "'-1' is not a number of seconds"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(MODULES[0], monkeypatch, *arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("module", MODULES)
def test_help_says_what_it_serves(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(module, monkeypatch, "--help") == 0
    said = capsys.readouterr().out
    own = f"python examples/{module.__name__}.py"
    for words in (own, "/v1/answers", "--host", "(8900)", "--engine-url", "--grace"):
        assert words in said
