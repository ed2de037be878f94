"""``lmcache-stream demo`` with the real default model: the reference's answers, not merely some."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmcache_stream.embedded.demo.plan import kept_indices

from .. import reference
from .install_stack import model_of
from .reference import model

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def test_the_demo_s_answers_are_those_of_transformers(installed: Path) -> None:
    command = [sys.executable, "-m", "lmcache_stream", "demo", "--json", "--model", str(model_of(installed))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    network = model(torch.float32)
    result = json.loads(done.stdout)
    assert len(result["recall"]) == 3
    for asked in result["recall"]:
        assert [answer["policy"] for answer in asked["answers"]][:2] == [None, "RandomDrop"]
        for answer in asked["answers"]:
            prompt, count = asked["prompt_token_ids"], len(answer["token_ids"])
            wanted = reference.recalled(network, prompt, answer["kept"], 32, count)
            assert answer["token_ids"] == wanted, answer["policy"]
    comparisons = result["documents"]
    assert len(comparisons) == 1
    for found in comparisons:
        prompt = found["prompt_token_ids"]
        length = len(prompt) // 32 * 32
        whole = reference.kv_of(network, prompt, length)
        kept = kept_indices(range(*found["dropped"]), length)
        edited = reference.dropped(network, whole, kept)
        for name, kv in (("whole", whole), ("edited", edited)):
            first, *answer = found[name]["token_ids"]
            assert len(answer) > 5
            wanted = reference.decoded(network, kv, [*prompt[length:], first], len(answer))
            assert answer == wanted, name
