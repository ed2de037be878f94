"""Sampling parameters, each against what it must do to a distribution of four tokens."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lmcache_stream.embedded.engine.params import CompletionParams
from lmcache_stream.embedded.engine.sampler import Sampler

LOGITS = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4]))
PLAIN = CompletionParams(
    prompt=[0],
    unknown_token=None,
    max_tokens=10,
    min_tokens=0,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias={},
    allowed_token_ids=None,
    seed=1,
    stop=[],
    stop_token_ids=frozenset(),
    include_stop_str_in_output=False,
    ignore_eos=False,
    skip_special_tokens=True,
    cache_salt="",
)


def shares(decoded: Sequence[int] = (), ending: Sequence[int] = (), **changes: Any) -> list[float]:
    """Return how often each of the four tokens is chosen."""
    sampler = Sampler(dataclasses.replace(PLAIN, **changes), frozenset(ending))
    count = 4000
    counts = Counter(sampler.choose(LOGITS, decoded) for _ in range(count))
    return [counts[token] / count for token in range(4)]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, [0.1, 0.2, 0.3, 0.4]),
        ({"temperature": 0.0}, [0, 0, 0, 1]),
        ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        ({"top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_k": 1}, [0, 0, 0, 1]),
        ({"top_p": 0.5}, [0, 0, 3 / 7, 4 / 7]),
        ({"min_p": 0.6}, [0, 0, 3 / 7, 4 / 7]),
        ({"allowed_token_ids": [0, 1]}, [1 / 3, 2 / 3, 0, 0]),
        ({"logit_bias": {0: 100.0}}, [1, 0, 0, 0]),
        ({"min_tokens": 1, "ending": [3, 2]}, [1 / 3, 2 / 3, 0, 0]),
        ({"min_tokens": 1, "ending": [3, 2], "decoded": [1]}, [0.1, 0.2, 0.3, 0.4]),
        ({"presence_penalty": 2.0, "temperature": 0.0, "decoded": [3]}, [0, 0, 1, 0]),
        # 0.4 / e^0.5 is still above 0.3 / e^0.25; 0.4 / e and 0.3 / e^0.5 are both below 0.2.
        ({"frequency_penalty": 0.25, "temperature": 0.0, "decoded": [3, 3, 2]}, [0, 0, 0, 1]),
        ({"frequency_penalty": 0.5, "temperature": 0.0, "decoded": [3, 3, 2]}, [0, 1, 0, 0]),
        # Of the prompt's token 0, too: log 0.1 grows to twice its size.
        ({"repetition_penalty": 2.0, "decoded": [3]}, [0.01, 0.2, 0.3, 0.16]),
    ],
)
def test_the_shares(changes: dict[str, Any], wanted: list[float]) -> None:
    total = sum(wanted)
    for found, share in zip(shares(**changes), wanted, strict=True):
        assert found == pytest.approx(share / total, abs=0.03)


def test_without_a_seed_no_two_are_alike() -> None:
    free = dataclasses.replace(PLAIN, seed=None)
    draws = []
    for _ in range(2):
        sampler = Sampler(free, frozenset())
        draws.append([sampler.choose(LOGITS, ()) for _ in range(60)])
    assert draws[0] != draws[1]
