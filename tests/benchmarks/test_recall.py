"""The recall benchmark's pure parts: its options, its policies and its table."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lmcache_stream.dropping import WholeChunks

PATH = Path(__file__).parents[2] / "benchmarks" / "recall.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_recall", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look their annotations up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


recall = load()


def test_every_policy_keeps_the_same_sinks_and_window() -> None:
    for name in recall.POLICIES:
        made = recall.make_policy(name, 0.75, 7)
        policy = made.policy if isinstance(made, WholeChunks) else made
        assert (policy.ratio, policy.sinks, policy.window) == (0.75, 4, 32)
    assert recall.make_policy("RandomDrop", 0.5, 7).seed == 7
    assert recall.make_policy("SnapKV-max", 0.5, 7).reduce == "max"


def test_the_defaults_are_the_whole_benchmark() -> None:
    options = recall.parsed([])
    assert options.samples == 50
    assert options.policies == list(recall.POLICIES)
    assert options.ratios == [0.5, 0.75]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--samples", "0"], "must be positive"),
        (["--ratios", "0.5", "1"], "--ratios"),
        (["--policies", "Nothing"], "invalid choice: 'Nothing'"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        recall.parsed(arguments)
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_help_says_what_is_measured() -> None:
    done = subprocess.run([sys.executable, str(PATH), "--help"], capture_output=True, text=True, check=True)
    for words in ("secret code", "--samples", "--policies", "--ratios", "--seed", "--output"):
        assert words in done.stdout


def outcome(policy: str | None, ratio: float, *, is_right: bool, fact_kept: float = 1.0) -> object:
    return recall.Outcome(
        seed=0,
        policy=policy,
        ratio=ratio,
        prompt_tokens=100,
        kept_tokens=50,
        code="1234",
        answer=" 1234",
        is_right=is_right,
        fact_kept=fact_kept,
    )


def test_the_table_counts_each_cell_by_itself() -> None:
    outcomes = [
        *(outcome(None, 0.0, is_right=True) for _ in range(4)),
        *(outcome("KeyDiff", 0.5, is_right=place < 3, fact_kept=place / 4) for place in range(4)),
        *(outcome("KeyDiff", 0.75, is_right=False, fact_kept=0.0) for _ in range(4)),
    ]
    shown = recall.table(outcomes, ["KeyDiff", "KNorm"], [0.5, 0.75])
    assert shown.splitlines() == [
        "Nothing dropped: 4/4 (51% to 100%) right",
        "",
        "| dropped | 50%: right | fact kept | 75%: right | fact kept |",
        "|---|---|---|---|---|",
        "| KeyDiff | 3/4 (30% to 95%) | 38% | 0/4 (0% to 49%) | 0% |",
        "| KNorm | - | - | - | - |",
    ]
