"""``lmcache-stream run`` in this process, on an embedded stack's servers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache_stream.cli import main
from lmcache_stream.cli.arguments import API_KEY
from lmcache_stream.completions import VLLMCompletions
from lmcache_stream.embedded.sync import EmbeddedStack
from lmcache_stream.jobs.output import Output
from lmcache_stream.jobs.policies import NO_POLICY, POLICIES, make_policy

from ..tiny_model import VOCAB_SIZE
from .conftest import files, rows_of, where, write_prompts
from .rows import row

TEXT = "the ferry ü came 三 back; " * 4
SHOWN = "WholeChunks(SnapKV(budget=64, sinks=1, window=8), 4)"
SMALL = ["--sinks", "1", "--window", "8", "--max-tokens", "3"]
FIELDS = {
    "id",
    "line",
    "policy",
    "model",
    "prompt_tokens",
    "text",
    "token_ids",
    "finish_reason",
    "error",
    "kv",
    "pieces",
    "metrics",
    "baseline",
}


def command(folder: Path, stack: EmbeddedStack, *more: str, policy: str = "keydiff") -> list[str]:
    chosen = [] if policy == NO_POLICY else ["--ratio", "0.5", *SMALL]
    return ["run", *files(folder), *where(stack), "--policy", policy, *chosen, *more]


@pytest.fixture
def prompts(tmp_path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"id": n, "prompt": f"{n}: {TEXT}"} for n in range(3)]
    rows.append({"id": "ids", "prompt_token_ids": list(f"ids: {TEXT}".encode()), "expected": "ü"})
    write_prompts(tmp_path / "prompts.jsonl", rows)
    return rows


def test_every_policy_gives_whole_rows(
    stack: EmbeddedStack, tmp_path: Path, prompts: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    names = [NO_POLICY, *POLICIES]
    assert names == [
        "none",
        "random",
        "streaming-llm",
        "knorm",
        "keydiff",
        "valuediff",
        "tova",
        "snapkv",
        "rkv",
    ]
    for name in names:
        output = tmp_path / "out.jsonl"
        code = main(command(tmp_path, stack, "--baseline", policy=name))
        told = capsys.readouterr()
        assert (code, told.out) == (0, ""), told.err
        assert "rows: 4 done, 0 failed, 0 skipped, 0 bad; " in told.err
        assert "medians: TTFT " in told.err
        rows = {one["id"]: one for one in rows_of(output)}
        assert set(rows) == {0, 1, 2, "ids"}
        for one in rows.values():
            assert set(one) - {"extra"} == FIELDS
            assert one["error"] is None
            assert len(one["token_ids"]) == one["metrics"]["output_tokens"]
            given = prompts[one["line"] - 1]
            text = given.get("prompt") or bytes(given["prompt_token_ids"]).decode()
            assert "".join(piece for piece, _ in one["pieces"]) == text
            assert one["prompt_tokens"] == len(text.encode())
            if name == NO_POLICY:
                assert one["kv"] is one["policy"] is None
                # Decoded twice from the same KV.
                assert one["baseline"]["token_ids"] == one["token_ids"]
                continue
            made = POLICIES[name].__name__
            assert one["policy"] == f"{made}(ratio=0.5, sinks=1, window=8)"
            kept = sum(len(piece.encode()) for piece, is_kept in one["pieces"] if is_kept)
            behind = one["prompt_tokens"] - one["kv"]["tokens_before"]
            # A character whose bytes were not all kept is on one side alone.
            assert abs(kept - one["kv"]["tokens_after"] - behind) <= 2 * len(one["pieces"])
            assert one["metrics"]["input_tokens"] == one["kv"]["tokens_after"] + behind
        assert rows["ids"]["extra"] == {"expected": "ü"}
        output.unlink()


@pytest.mark.usefixtures("prompts")
def test_the_embedded_stack_comes_with_the_command(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embedded = ["--embedded", "--model", str(tiny), "--policy", "snapkv", "--budget", "64", *SMALL]
    report = tmp_path / "report.json"
    arguments = ["run", *files(tmp_path), *embedded, "--run", "4", "--report", str(report)]
    assert main(arguments) == 0, capsys.readouterr().err
    rows = rows_of(tmp_path / "out.jsonl")
    assert {one["policy"] for one in rows} == {SHOWN}
    assert {one["model"] for one in rows} == {str(tiny)}
    assert all(one["kv"]["tokens_after"] == 64 for one in rows)
    figures = json.loads(report.read_text())
    assert figures["rows"] == {"done": 4, "failed": 0, "skipped": 0, "bad": 0}
    assert (figures["mode"], figures["completed"], figures["ttft"]["count"]) == ("run", 4, 4)
    assert figures["configuration"]["policy"] == SHOWN


def test_rows_that_the_engine_refuses_are_rows_and_the_exit_code_tells(
    stack: EmbeddedStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "good", "prompt": TEXT},
        {"id": "full", "prompt_token_ids": [5] * 4095},
        {"id": "longer", "prompt_token_ids": [5] * 4096},
        {"id": "beyond", "prompt_token_ids": [VOCAB_SIZE]},
    ]
    write_prompts(tmp_path / "prompts.jsonl", rows)
    more = ["--max-tokens", "2"]
    assert main(command(tmp_path, stack, *more, policy=NO_POLICY)) == 3
    told = capsys.readouterr().err
    assert "line 3: the prompt has 4096 tokens: there is no room" in told
    assert f"line 4: token id {VOCAB_SIZE} is beyond the model's vocabulary of {VOCAB_SIZE}" in told
    assert "rows: 1 done, 1 failed, 0 skipped, 2 bad" in told
    assert "failures: 1 EngineStatusError; --retry-failed runs these rows again" in told
    (first,) = [line for line in told.splitlines() if line.startswith("first failure: line 2: ")]
    assert "HTTP 400" in first
    found = {one["id"]: one for one in rows_of(tmp_path / "out.jsonl")}
    assert found["good"]["error"] is None
    assert found["full"]["error"]["type"] == "EngineStatusError"
    assert found["full"]["error"]["phase"] == "decode"
    assert "HTTP 400" in found["full"]["error"]["message"]
    # It is not run again, unless that is wanted.
    assert main(command(tmp_path, stack, *more, "--resume", policy=NO_POLICY)) == 3
    assert "rows: 0 done, 0 failed, 2 skipped, 2 bad" in capsys.readouterr().err
    assert main(command(tmp_path, stack, "--retry-failed", "--max-tokens", "1", policy=NO_POLICY)) == 3
    told = capsys.readouterr().err
    assert "1 rows that had failed are run again" in told
    assert "rows: 1 done, 0 failed, 1 skipped, 2 bad" in told
    assert all(one["error"] is None for one in rows_of(tmp_path / "out.jsonl"))


@pytest.mark.usefixtures("prompts")
@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--engine-url", "http://127.0.0.1:1", "EngineConnectError: GET http://127.0.0.1:1/v1/models: "),
        ("--http-url", "http://127.0.0.1:1", "CacheConnectError: GET http://127.0.0.1:1/status: "),
        ("--model", "other", "serves no model 'other'; it serves: /"),
    ],
)
def test_servers_that_are_not_there_are_told_in_one_line(
    stack: EmbeddedStack,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    option: str,
    value: str,
    words: str,
) -> None:
    arguments = command(tmp_path, stack)
    arguments[arguments.index(option) + 1] = value
    assert main(arguments) == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert words in told
    assert rows_of(tmp_path / "out.jsonl") == []


def test_usage_that_cannot_be_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["run", "--prompts", "p", "--output", str(tmp_path / "o")]
    real = ["--engine-url", "http://localhost:8000", "--model", "m"]
    keydiff = ["--policy", "keydiff", "--ratio", "0.5"]
    cases: Sequence[tuple[list[str], str]] = [
        (["run"], "required: --prompts, --output, --policy"),
        ([*base, "--policy", "none"], "one of the arguments --engine-url --embedded is required"),
        ([*base, *real, "--embedded", "--policy", "none"], "not allowed with argument"),
        ([*base, *real[:2], "--policy", "none"], "--engine-url needs --model"),
        (
            [
                *base,
                "--embedded",
                "--policy",
                "none",
                "--cache-url",
                "tcp://localhost:5555",
                "--api-key",
                "k",
            ],
            "--embedded runs a stack of its own: give it no --cache-url and no --api-key",
        ),
        ([*base, *real, "--policy", "h2o"], "invalid choice: 'h2o'"),
        ([*base, *real, "--policy", "keydiff"], "needs either --ratio or --budget"),
        ([*base, *real, *keydiff, "--budget", "5"], "needs either --ratio or --budget"),
        ([*base, *real, "--policy", "none", "--ratio", "0.5"], "--ratio: --policy none drops nothing"),
        ([*base, *real, "--policy", "snapkv", "--ratio", "0.5", "--window", "0"], "leaves no queries"),
        ([*base, *real, *keydiff, "--ratio", "1"], "'1' is not a share between 0 and 1"),
        ([*base, *real, *keydiff, "--sampling-params", "[1]"], "'[1]' is no JSON object"),
        ([*base, *real, *keydiff, "--sampling-params", "{"], "'{' is no JSON"),
        ([*base, *real, *keydiff, "--sampling-params", '{"n": 2}'], "a stream has one answer"),
        (
            [*base, *real, *keydiff, "--sampling-params", '{"max_tokens": 1}', "--max-tokens", "2"],
            "max_tokens is given twice",
        ),
        ([*base, *real, *keydiff, "--temperature", "-1"], "'-1' is not a number from 0"),
        ([*base, *real, *keydiff, "--queries-model", "q"], "--policy keydiff needs no queries"),
        ([*base, *real, "--policy", "none", "--run", "8"], "--run: --policy none drops nothing"),
    ]
    for arguments, words in cases:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
        assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("output", "more", "words"),
    [
        (row(1), [], "--resume goes on with a job, or name another file with --output"),
        (b"my notes\n", ["--resume"], "is no row of a job's output"),
        (b"", ["--report", "{folder}/nowhere/report.json"], "there is no folder"),
        (b"", ["--report", "{folder}"], "it is a folder"),
        (b"", ["--output", "{folder}/loop"], "Too many levels of symbolic links"),
        (b"", ["--prompts", "{folder}/loop"], "Too many levels of symbolic links"),
        (b"", ["--output", "{folder}/nowhere/out.jsonl"], "/nowhere/out.jsonl: there is no folder /"),
        (b"", ["--output", "{folder}"], ": it is a folder"),
        (b"", ["--output", "-"], "--output -: it is written to a file"),
        (b"", ["--prompts", "{folder}/out.jsonl"], "--prompts and --output are one file"),
        (b"", ["--prompts", "{folder}/nowhere"], "No such file or directory"),
        (row(1), ["--resume"], "are of the model m, this job's would be of"),
        (row(1, failed=True), ["--retry-failed"], "are of the model m, this job's would be of"),
    ],
)
def test_a_job_that_cannot_begin_leaves_everything_as_it_is(
    stack: EmbeddedStack,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    output: bytes,
    more: list[str],
    words: str,
) -> None:
    (tmp_path / "out.jsonl").write_bytes(output)
    (tmp_path / "loop").symlink_to("loop")
    write_prompts(tmp_path / "prompts.jsonl", [{"id": 1, "prompt": TEXT}])
    given = [one.format(folder=tmp_path) for one in more]
    arguments = ["run", *files(tmp_path), *where(stack), "--policy", "keydiff", "--ratio", "0.5", *given]
    assert main(arguments) == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert words in told
    assert (tmp_path / "out.jsonl").read_bytes() == output


@pytest.mark.usefixtures("prompts")
def test_a_second_job_on_the_same_output_is_refused(
    stack: EmbeddedStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = Output(tmp_path / "out.jsonl")
    held.open()
    assert main(command(tmp_path, stack)) == 1
    assert "another job writes to" in capsys.readouterr().err
    held.close()


@pytest.mark.usefixtures("prompts")
def test_the_key_of_the_environment_is_sent_and_never_shown(
    stack: EmbeddedStack, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str | None] = []
    make = VLLMCompletions.__init__

    def seen(self: VLLMCompletions, *given: Any, api_key: str | None = None, **named: Any) -> None:
        keys.append(api_key)
        make(self, *given, api_key=api_key, **named)

    monkeypatch.setattr(VLLMCompletions, "__init__", seen)
    monkeypatch.setenv(API_KEY, "of-the-environment")
    report = tmp_path / "report.json"
    assert main(command(tmp_path, stack, "--report", str(report))) == 0
    (tmp_path / "out.jsonl").unlink()
    assert main(command(tmp_path, stack, "--api-key", "given")) == 0
    assert keys == ["of-the-environment", "given"]
    written = capsys.readouterr().err + report.read_text() + (tmp_path / "out.jsonl").read_text()
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    written += capsys.readouterr().out
    assert API_KEY in written
    assert "of-the-environment" not in written


def test_policies_are_made_with_what_was_given() -> None:
    assert make_policy(NO_POLICY, ratio=None, sinks=None) is None
    for name, kind in POLICIES.items():
        made = make_policy(name, ratio=None, budget=64, sinks=2, window=None)
        assert made == kind(budget=64, sinks=2)
