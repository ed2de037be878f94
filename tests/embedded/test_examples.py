"""The token-dropping examples, run as a user runs them, with a tiny model."""

from __future__ import annotations

import asyncio
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from prompts import build_prompt

from lmcache_stream.embedded import EmbeddedStack
from lmcache_stream.embedded.engine import CausalModel

from .engine.test_answers import generated

EXAMPLES = Path(__file__).parents[2] / "examples"
CHUNK = 32
TOKENS = 12

# Of each script the shares that it drops.
RATIOS = {
    "random_drop.py": (0.25, 0.5, 0.75),
    "streaming_llm.py": (0.3, 0.6),
    "snapkv.py": (0.5, 0.7),
    "rkv.py": (0.5, 0.7),
}
SCRIPTS = [*RATIOS, "decode_time_dropping.py"]


def run(script: str, *arguments: object) -> tuple[int, str, str]:
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, timeout=100, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def sections(output: str) -> list[tuple[str, str]]:
    """Split at the lines that begin with ``--- ``: each with what follows it."""
    _, *pieces = re.split(r"^--- ", output, flags=re.MULTILINE)
    return [(head, body) for head, _, body in (piece.partition("\n") for piece in pieces)]


def counts(head: str) -> tuple[int, int]:
    found = re.search(r": (\d+) of (\d+) tokens kept \(\[n\]", head)
    assert found, head
    return int(found[1]), int(found[2])


def dropped(text: str) -> int:
    """Add up the marks of dropped tokens."""
    return sum(map(int, re.findall(r"\[(\d+)\]", text)))


def check_picture(path: Path) -> None:
    png = path.read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width == 1600
    assert 300 < height < 1000
    assert 5_000 < len(png) < 200_000


@pytest.mark.parametrize("script", RATIOS)
def test_what_is_kept_adds_up_and_is_answered_from(script: str, model: CausalModel, tmp_path: Path) -> None:
    picture = tmp_path / "kept.png"
    code, output, errors = run(script, "--model", model.name, "--max-tokens", TOKENS, "--picture", picture)
    assert (code, errors) == (0, "")
    (_, whole), *edits = sections(output)
    prompt = build_prompt(model.tokenizer, CHUNK)
    length = len(prompt.token_ids)
    assert length % CHUNK == 0
    answer = model.tokenizer.decode(generated(model, prompt.token_ids, TOKENS))
    # Half a character at the end is not given out.
    assert whole.rstrip("\n") == answer.rstrip("\ufffd\n")
    assert len(edits) == len(RATIOS[script])
    for ratio, (head, body) in zip(RATIOS[script], edits, strict=True):
        kept = round(length * (1 - ratio) / CHUNK) * CHUNK
        assert counts(head) == (kept, length)
        text, border, said = body.partition("Question: What is the password of the harbour gate?\nAnswer:\n")
        assert border
        assert dropped(text) == length - kept
        assert said.strip()
    check_picture(picture)


def test_decoded_tokens_are_dropped_as_well(model: CausalModel, tmp_path: Path) -> None:
    picture = tmp_path / "kept.png"
    arguments = ("--model", model.name, "--rounds", 4, "--picture", picture)
    code, output, errors = run("decode_time_dropping.py", *arguments)
    assert (code, errors) == (0, "")
    rounds = re.findall(r"^edit (\d): (\d+) tokens of KV, (\d+) kept$", output, re.MULTILINE)
    assert [int(number) for number, _, _ in rounds] == [1, 2, 3, 4]
    before, after = ([int(row[column]) for row in rounds] for column in (1, 2))
    assert all(count <= 2 * CHUNK for count in after)
    (decoded, story), (head, body) = sections(output)
    assert decoded == f"{5 * CHUNK} tokens decoded"
    assert story.strip()
    # Every edit saw what the one before it had left, and what was decoded since.
    fresh = [found - left for found, left in zip(before, [0, *after], strict=False)]
    kept, length = counts(head)
    assert (kept, length) == (after[-1], sum(fresh))
    assert dropped(body) == length - kept
    check_picture(picture)


async def test_the_same_script_runs_against_servers(model: CausalModel) -> None:
    async with EmbeddedStack(model, cache_gb=0.2) as stack:
        code, output, errors = await asyncio.to_thread(
            run,
            "snapkv.py",
            *("--engine-url", stack.engine_url, "--cache-url", stack.url, "--http-url", stack.http_url),
            *("--model", model.name, "--ratio", 0.5, "--max-tokens", TOKENS),
        )
    assert (code, errors) == (0, "")
    (_, whole), (head, _) = sections(output)
    assert whole.strip()
    kept, length = counts(head)
    assert kept == round(length / 2 / CHUNK) * CHUNK


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--engine-url", "http://127.0.0.1:1", "--model", "m"), 1, "is vLLM running there?"),
        (("--engine-url", "http://127.0.0.1:1"), 1, "--engine-url needs --model"),
        (("--model", "/nowhere"), 1, "cannot load the model '/nowhere'"),
        (("--ratio", "1.5"), 2, "'1.5' is not a share between 0 and 1"),
        (("--text", "/nowhere.txt"), 2, "/nowhere.txt"),
        (("--picture", "/nowhere/kept.png"), 2, "is not a .png file in a folder that exists"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], code: int, words: str) -> None:
    ended, output, errors = run("random_drop.py", *arguments)
    assert ended == code
    assert output == ""
    last = errors.splitlines()[-1]
    assert words in last
    assert "Traceback" not in errors
    assert len(errors.splitlines()) == 1 or errors.startswith("usage: ")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_begins_with_what_it_is(script: str) -> None:
    code, output, _ = run(script, "--help")
    assert code == 0
    assert f"python examples/{script} --picture" in output
    assert "--engine-url" in output


def test_ctrl_c_ends_it_quietly(model: CausalModel) -> None:
    command = [
        sys.executable,
        str(EXAMPLES / "random_drop.py"),
        "--model",
        model.name,
        "--max-tokens",
        "2000",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        while b"--- from the whole KV" not in running.stdout.readline():
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert errors == b""
