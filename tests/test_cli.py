"""The command line: help, usage errors, one line an error, signals, and stdout that holds JSON alone."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import types
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import torch

import lmcache_stream as lms
from lmcache_stream import cli

from .embedded.demo.conftest import FakeStack
from .fakes.lmcache import FakeLMCache

TEXT = "0123456789abcdefghijklmnopqrstuvwxyz"

SERVING = """
import signal, sys
# A test run in the background has SIGINT ignored, and its children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
from lmcache_stream.cli import main
sys.exit(main(["serve-cache", "--port", "0", "--http-port", "0", "--size-gb", "0.01", *sys.argv[1:]]))
"""


class FakeEmbeddedStack:
    """Stands in for ``EmbeddedStack``; ``last`` is the one that was made last."""

    last: FakeEmbeddedStack
    scripts: tuple[list[Any], ...] = ()
    max_model_len = 500

    def __init__(self, *, model: str) -> None:
        self.model = model
        self.is_open = False
        self._server = FakeLMCache()
        type(self).last = self

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        stack = FakeStack(self._server)
        stack.post_completion.scripts = [list(script) for script in self.scripts]
        self.post_completion, self.connect = stack.post_completion, stack.connect
        self._tokenizer = stack.tokenizer
        self.is_open = True
        return self

    @property
    def tokenizer(self) -> Any:
        sys.stdout.write("a library says something\n")
        return self._tokenizer

    async def __aexit__(self, *_: object) -> None:
        self.is_open = False
        await self._server.__aexit__()


@pytest.fixture
def fake_stack(monkeypatch: pytest.MonkeyPatch) -> type[FakeEmbeddedStack]:
    from lmcache_stream import embedded

    monkeypatch.setattr(embedded, "EmbeddedStack", FakeEmbeddedStack)
    monkeypatch.setattr(FakeEmbeddedStack, "scripts", ())
    return FakeEmbeddedStack


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "digits.txt"
    path.write_text(TEXT)
    return path


def test_help_of_every_command_comes_without_the_heavy_packages() -> None:
    program = """
import sys
from lmcache_stream.cli import main
for command in ([], ["demo"], ["run"], ["report"], ["doctor"], ["serve-cache"], ["serve-engine"]):
    try:
        main([*command, "--help"])
    except SystemExit as end:
        assert end.code == 0
loaded = {"rich", "transformers", "gguf", "tokenizers", "matplotlib"} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    commands = ("demo", "run", "report", "doctor", "serve-cache", "serve-engine")
    options = ("--workers", "--model-path", "--retry-failed", "snapkv")
    for words in (*commands, "(default: 0.5)", "(default: 5555)", *options):
        assert words in done.stdout


def test_the_package_is_a_program() -> None:
    command = [sys.executable, "-m", "lmcache_stream", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("lmcache-stream 0.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["demo", "--ratio", "1"], "'1' is not a share between 0 and 1"),
        (["demo", "--ratio", "half"], "'half' is not a share"),
        (["demo", "--max-tokens", "1"], "'1' is not a whole number from 2"),
        (["serve-cache", "--port", "65536"], "'65536' is not a port"),
        (["serve-cache", "--chunk-size", "0"], "'0' is not a whole number from 1"),
        (["serve-cache", "--size-gb", "inf"], "'inf' is not a size"),
        (["serve-engine", "m", "n"], "unrecognized arguments: n"),
        (["serve-engine", "m", "--dtype", "int4"], "invalid choice: 'int4'"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert words in capsys.readouterr().err


@contextmanager
def serving(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``serve-cache`` as a process."""
    command = [sys.executable, "-c", SERVING, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_server_ends_on_a_signal_with_everything_closed(number: signal.Signals, code: int) -> None:
    with serving() as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        shown = re.fullmatch(
            r"cache server: tcp://127\.0\.0\.1:(\d+) and (http://127\.0\.0\.1:\d+), shared memory (\S+)\n",
            line,
        )
        assert shown, line
        segment = Path("/dev/shm", shown[3])
        assert segment.exists()
        with urllib.request.urlopen(f"{shown[2]}/status", timeout=5) as answer:
            assert json.load(answer)["is_healthy"]
        assert process.stdout.readline() == "Ctrl-C ends it.\n"
        process.send_signal(number)
        assert process.wait(10) == code
        assert process.stderr.read() == ""
        assert not segment.exists()


def test_a_server_without_shared_memory_says_so() -> None:
    with serving("--no-shared-memory") as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith(", no shared memory\n")


def test_serve_cache_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    async def serve_cache(**options: Any) -> None:
        given.update(options)

    monkeypatch.setattr("lmcache_stream.embedded.serve_cache.serve_cache", serve_cache)
    arguments = ["--host", "0.0.0.0", "--port", "7", "--chunk-size", "16", "--size-gb", "0.5"]
    assert cli.main(["serve-cache", *arguments, "--no-shared-memory"]) == 0
    given.pop("on_ready")
    assert given == {
        "host": "0.0.0.0",
        "port": 7,
        "http_port": 8080,
        "chunk_size": 16,
        "size_gb": 0.5,
        "shared_memory": False,
    }


def test_serve_engine_hands_its_options_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {}

    class EmbeddedEngine:
        def __init__(self, model: str, **options: Any) -> None:
            given.update(options, model=model)

        async def __aenter__(self) -> Self:
            raise lms.EngineConnectError("port 7\nis taken")

        async def __aexit__(self, *_: object) -> None:
            raise AssertionError("it was never entered")

    module = types.ModuleType("lmcache_stream.embedded.engine")
    vars(module)["EmbeddedEngine"] = EmbeddedEngine
    monkeypatch.setitem(sys.modules, module.__name__, module)
    code = cli.main(["serve-engine", "folder", "--port", "7", "--dtype", "bfloat16", "--offload-queries"])
    assert code == 1
    assert capsys.readouterr() == ("", "lmcache-stream: EngineConnectError: port 7 is taken\n")
    assert given == {
        "model": "folder",
        "host": "127.0.0.1",
        "port": 7,
        "served_model_name": None,
        "cache_url": "tcp://127.0.0.1:5555",
        "cache_http_url": "http://127.0.0.1:8080",
        "dtype": torch.bfloat16,
        "max_model_len": None,
        "offload_queries": True,
        "workers": 1,
    }
    monkeypatch.setattr("lmcache_stream.embedded.default_model.default_model", lambda: "the demo's")
    assert cli.main(["serve-engine"]) == 1
    assert given["model"] == "the demo's"


def test_json_is_alone_on_stdout(
    fake_stack: type[FakeEmbeddedStack], text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "folder", "--text", str(text_file), "--question", "Why so?", "--ratio", "0.25"]
    assert cli.main(["demo", "--json", *arguments]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert (result["model"], result["ratio"], result["max_tokens"]) == ("folder", 0.25, 60)
    (document,) = result["documents"]
    assert (document["title"], document["question"]) == ("digits.txt", "Why so?")
    assert document["dropped"] == [24, 44]
    assert "a library says something" in err
    assert "folder" in err
    assert fake_stack.last.model == "folder"
    assert not fake_stack.last.is_open


def test_the_table_has_the_figures_and_both_answers(
    fake_stack: type[FakeEmbeddedStack], text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_stack.scripts = ([7, "length"], [8, "stop"], [7, "length"], [9, "stop"])
    arguments = ["--model", "folder", "--text", str(text_file), "--question", "Why so?", "--ratio", "0.25"]
    assert cli.main(["demo", *arguments]) == 0
    out, err = capsys.readouterr()
    for words in ("digits.txt", "Why so?", "79", "59 kept", "25%", "<7><8>", "<7><9>", " B (", "edited KV"):
        assert words in out
    assert "\x1b" not in out
    assert err == ""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--text", "nowhere.txt"], "InvalidRequestError: --text nowhere.txt: "),
        (["--text", "{text}", "--ratio", "0.9"], "InvalidRequestError: the text is too short: "),
        (["--text", "{text}", "--max-tokens", "450"], "more than the 500 that the model takes"),
    ],
)
def test_an_error_is_one_line(
    fake_stack: type[FakeEmbeddedStack],
    text_file: Path,
    arguments: list[str],
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [argument.format(text=text_file) for argument in arguments]
    assert cli.main(["demo", "--json", "--model", "folder", *filled]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert line in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("lmcache-stream: ")
    assert "Traceback" not in err


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("command", "render"):
        monkeypatch.delitem(sys.modules, f"lmcache_stream.embedded.demo.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main(["demo"]) == 1
    assert "rich is missing: pip install 'lmcache-stream[embedded]'" in capsys.readouterr().err


def test_a_module_that_is_no_extra_is_not_explained_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmcache_stream.embedded.serve_cache", None)
    with pytest.raises(ModuleNotFoundError, match=r"embedded\.serve_cache"):
        cli.main(["serve-cache"])


def test_an_end_during_a_long_computation_has_its_exit_code() -> None:
    script = """
import asyncio, sys, threading, torch
from lmcache_stream import _workers, cli

def interrupted(command):
    command.close()
    raise KeyboardInterrupt

def compute():
    begun.set()
    square = torch.ones(200, 200)
    while True:
        square @ square

begun = threading.Event()
_workers._EXIT_SECONDS = 0.05
_workers.Workers("long", 1).submit(compute)
begun.wait()
asyncio.run = interrupted
sys.exit(cli.main(["report", "nothing"]))
"""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (130, "")
