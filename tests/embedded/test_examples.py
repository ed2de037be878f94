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
from serving import add_text_arguments, make_parser

from lmcache_stream.embedded import EmbeddedStack
from lmcache_stream.embedded.engine import CausalModel

from ..tiny_model import EOS
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
    ids = generated(model, prompt.token_ids, TOKENS)
    answer = model.tokenizer.decode(ids[: ids.index(EOS)] if EOS in ids else ids)
    # Half a character at the end is not given out.
    assert whole.rstrip("\n\ufffd") == answer.rstrip("\n\ufffd")
    assert len(edits) == len(RATIOS[script])
    for ratio, (head, body) in zip(RATIOS[script], edits, strict=True):
        kept = round(length * (1 - ratio) / CHUNK) * CHUNK
        assert counts(head) == (kept, length)
        text, border, said = body.rpartition("\nAnswer:\n")
        assert border
        assert dropped(text) == length - kept
        assert said.strip()
    check_picture(picture)


def test_decoded_tokens_are_dropped_as_well(endless_folder: Path, tmp_path: Path) -> None:
    picture = tmp_path / "kept.png"
    arguments = ("--model", endless_folder, "--rounds", 4, "--picture", picture)
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
    ("arguments", "words"),
    [
        (("--engine-url", "http://127.0.0.1:1", "--model", "m"), "start the engine (vllm serve)"),
        (("--model", "/nowhere"), "InvalidRequestError: transformers cannot load the model '/nowhere'"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], words: str) -> None:
    code, output, errors = run("random_drop.py", *arguments)
    assert (code, output) == (1, "")
    (line,) = errors.splitlines()
    assert words in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ratio", "0.5", "1.5"), "'1.5' is not a share between 0 and 1"),
        (("--max-tokens", "0"), "'0' is not a whole number from 1"),
        (("--text", "/nowhere.txt"), "/nowhere.txt"),
        (("--picture", "/nowhere/kept.png"), "is not a .png file in a folder that exists"),
        (("--picture", "kept.jpg"), "is not a .png file"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = make_parser("an example")
    add_text_arguments(parser, ratios=(0.5,))
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(arguments)
    assert words in capsys.readouterr().err


def test_help_begins_with_what_it_is() -> None:
    code, output, _ = run("snapkv.py", "--help")
    assert code == 0
    assert "SnapKV: keep what the last tokens of the prompt attend to." in output
    assert "python examples/snapkv.py --picture snapkv.png" in output
    assert "--engine-url" in output


def with_sigint() -> None:
    # A test run in the background has SIGINT ignored, and its children inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_it_quietly(endless_folder: Path) -> None:
    script = str(EXAMPLES / "random_drop.py")
    command = [sys.executable, script, "--model", str(endless_folder), "--max-tokens", "2000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=with_sigint
    ) as running:
        assert running.stdout is not None
        while b"--- from the whole KV" not in running.stdout.readline():
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert errors == b""
