"""The examples, run as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import RealStack

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    pytest.mark.parametrize("script", ["token_dropping.py", "sync_token_dropping.py"]),
]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("stack", ["bfloat16-shared-memory"], indirect=True)
def test_the_example_answers_from_the_edited_kv(stack: RealStack, script: str) -> None:
    done = run(
        script,
        *("--engine-url", stack.engine.url, "--model", stack.engine.model, "--max-tokens", "24"),
        *("--cache-url", stack.cache.url, "--http-url", stack.cache.http_url),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = {line[:24].strip(): line[24:].split() for line in lines[-7:]}
    prompt, edited = map(int, rows["prompt tokens"])
    assert edited < 0.6 * prompt
    # Both answers are decoded from cached KV, so that their times can be compared.
    for length, cached in zip((prompt, edited), map(int, rows["tokens from the cache"]), strict=True):
        assert 0 <= length - cached < 64
    whole, _, cut, _ = rows["KV in the cache"]
    assert 0.4 < float(cut) / float(whole) < 0.6
    start = next(number for number, line in enumerate(lines) if "tokens of KV cut to" in line)
    answer = "".join(lines[start + 1 : -7])
    assert len(answer) > 20


def test_a_wrong_address_is_one_line(script: str) -> None:
    done = run(script, "--engine-url", "http://127.0.0.1:1", "--model", "m", "--model-path", "/nowhere")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_help_says_what_is_needed(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0
    assert "--cache-url" in done.stdout
