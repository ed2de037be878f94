"""Moving keys: the definition of it, what stays as it is, and every way to ask for it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmcache_stream.errors import GeometryError, InvalidRequestError
from lmcache_stream.rope import Pairing, RopeConfig, rotate_keys, rotation

ROPE = RopeConfig(head_size=8, inv_freq=(1.0, 0.1, 0.01), pairing="half")


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("shift", [-5000, -1, 1, 5000])
def test_moves_to_both_sides(shift: int) -> None:
    """The definition itself: pair ``i`` is a point that turns by ``shift * inv_freq[i]``."""
    keys = torch.randn(4, 8, dtype=torch.float64)
    found = rotate_keys(keys, range(5000, 5004), [p + shift for p in range(5000, 5004)], ROPE)
    for pair, frequency in enumerate(ROPE.inv_freq):
        turn = torch.polar(torch.tensor(1.0).double(), torch.tensor(shift * frequency).double())
        wanted = torch.complex(keys[:, pair], keys[:, pair + 3]) * turn
        assert torch.allclose(torch.complex(found[:, pair], found[:, pair + 3]), wanted)
    assert torch.equal(found[:, 6:], keys[:, 6:])


def test_there_and_back_again() -> None:
    keys = torch.randn(64, 16)
    there = rotate_keys(keys, range(64), range(1000, 1064), ROPE)
    assert error(rotate_keys(there, range(1000, 1064), range(64), ROPE), keys) < 1e-6


def strange_bits(*shape: int) -> Tensor:
    """Return bfloat16 of any bits: zeros of both signs, infinities, NaNs with a payload."""
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("still", ["all", "head", "tail", "scattered"])
def test_keys_that_do_not_move_are_untouched(pairing: Pairing, in_place: bool, still: str) -> None:
    rope = dataclasses.replace(ROPE, pairing=pairing)
    keys = strange_bits(3, 40, 16)
    before = keys.clone()
    place = torch.arange(40)
    stays = {"all": place >= 0, "head": place < 7, "tail": place > 20, "scattered": place % 3 == 0}
    target = torch.where(stays[still], place, place + 9)
    found = rotate_keys(keys, place, target, rope, out=keys if in_place else None)
    assert same_bits(found[:, stays[still]], before[:, stays[still]])
    if still != "all":
        assert not same_bits(found[:, ~stays[still]], before[:, ~stays[still]])
    if not in_place:
        assert same_bits(keys, before)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_not_rotated_is_untouched(pairing: Pairing, in_place: bool) -> None:
    rope = dataclasses.replace(ROPE, pairing=pairing)
    keys = strange_bits(3, 40, 16)
    before = keys.clone()
    found = rotate_keys(keys, range(40), range(5, 45), rope, out=keys if in_place else None)
    rest = before.view(3, 40, 2, 8)[..., 6:]
    assert same_bits(found.view(3, 40, 2, 8)[..., 6:], rest)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("moves", ["alike", "apart"])
@pytest.mark.parametrize("block", [1, 16, 100, 1000, 10**6])
def test_the_size_of_the_blocks_changes_nothing(
    pairing: Pairing, moves: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = dataclasses.replace(ROPE, pairing=pairing)
    keys = torch.randn(2, 3, 37, 16).bfloat16()
    target = torch.arange(37) + 5 if moves == "alike" else torch.arange(37) * 2
    whole = rotate_keys(keys, range(37), target, rope)
    monkeypatch.setattr(rotation, "_BLOCK", block)
    monkeypatch.setattr(rotation, "_UNSPLIT_BLOCK", block)
    monkeypatch.setattr(rotation, "_SPAN", 11)
    assert same_bits(rotate_keys(keys, range(37), target, rope), whole)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_any_strides_and_leading_axes(pairing: Pairing) -> None:
    rope = dataclasses.replace(ROPE, pairing=pairing)
    plain = torch.randn(2, 3, 37, 16)
    wanted = torch.stack(
        [torch.stack([rotate_keys(k, range(37), range(9, 46), rope) for k in p]) for p in plain]
    )
    strided = plain.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)
    out = torch.empty(37, 3, 16, 2).permute(3, 1, 0, 2)
    assert rotate_keys(strided, range(37), range(9, 46), rope, out=out) is out
    assert torch.equal(out, wanted)
    # K of the fused layout: every second head of a wider row, in place.
    fused = torch.zeros(2, 3, 37, 2, 2, 8)
    fused[..., 0, :] = plain.view(2, 3, 37, 2, 8)
    for head in range(2):
        part = fused[..., head, 0, :]
        rotate_keys(part, range(37), range(9, 46), rope, out=part)
    assert torch.equal(fused[..., 0, :].flatten(-2), wanted)
    assert not fused[..., 1, :].any()


@pytest.mark.parametrize(
    "rows", [[0, 1, 2], [7, 8, 9, 30], [36], [5, 5, 2], [3, 9, 5], list(range(37))], ids=str
)
def test_selected_rows(rows: list[int]) -> None:
    keys = torch.randn(3, 37, 16).bfloat16()
    select = torch.tensor(rows)
    found = rotate_keys(keys, rows, range(len(rows)), ROPE, select=select)
    wanted = rotate_keys(keys[:, select], rows, range(len(rows)), ROPE)
    assert same_bits(found, wanted)


def test_nothing_to_move() -> None:
    assert rotate_keys(torch.randn(2, 0, 16), [], [], ROPE).shape == (2, 0, 16)


@pytest.mark.parametrize(
    ("keys", "old", "new", "kind", "reason"),
    [
        (torch.zeros(4, 12), range(4), range(4), GeometryError, "heads of 8"),
        (torch.zeros(4, 8).long(), range(4), range(4), GeometryError, "int64"),
        (
            torch.zeros(4, 8).to(torch.float8_e4m3fn),
            *(range(4), range(4), GeometryError, "float8_e4m3fn cannot be rotated exactly"),
        ),
        (torch.zeros(8), range(1), range(1), InvalidRequestError, "T, D"),
        (torch.zeros(4, 8), range(3), range(3), InvalidRequestError, "3 positions do not fit"),
        (torch.zeros(4, 8), range(4), range(3), InvalidRequestError, "4 positions cannot move to 3"),
        (torch.zeros(4, 8), range(4), [0.5] * 4, InvalidRequestError, "flat sequence of ints"),
        (torch.zeros(4, 8), range(4), [True] * 4, InvalidRequestError, "flat sequence of ints"),
        (torch.zeros(4, 8), [range(4)], range(4), InvalidRequestError, "flat sequence of ints"),
    ],
)
def test_misfits_are_refused(
    keys: Tensor, old: range, new: range, kind: type[Exception], reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        rotate_keys(keys, old, new, ROPE)


@pytest.mark.parametrize("row", [-1, 4])
def test_rows_outside_are_refused(row: int) -> None:
    with pytest.raises(InvalidRequestError, match="outside of the 4 tokens"):
        rotate_keys(torch.zeros(4, 8), [0], [1], ROPE, select=torch.tensor([row]))


@pytest.mark.parametrize("out", [torch.zeros(3, 8), torch.zeros(4, 8).half()])
def test_an_out_that_does_not_fit_is_refused(out: Tensor) -> None:
    with pytest.raises(InvalidRequestError, match="out must be"):
        rotate_keys(torch.zeros(4, 8), range(4), range(4), ROPE, out=out)


# In a process of its own, where no test before it has raised the peak.
MEASURE = """
import resource
import torch
from lmcache_stream.rope import RopeConfig, rotate_keys

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

keys = torch.ones(4, 32768, 1024, dtype=torch.bfloat16)
for pairing, threads in (("half", 1), ("half", 2), ("interleaved", 2)):
    torch.set_num_threads(threads)
    rope = RopeConfig(head_size=128, inv_freq=tuple(i / 64 for i in range(64)), pairing=pairing)
    rotate_keys(keys[:, :64], range(64), range(1, 65), rope)
    before = peak()
    rotate_keys(keys, range(32768), [2 * p for p in range(32768)], rope, out=keys)
    print(keys.nbytes >> 20, peak() - before)
"""


def test_memory_stays_bounded() -> None:
    checkout = str(Path(__file__).parents[2])
    answer = subprocess.run(
        [sys.executable, "-c", MEASURE], cwd=checkout, capture_output=True, text=True, check=True
    )
    for line in answer.stdout.splitlines():
        size, growth = map(int, line.split())
        assert size == 256
        assert growth < 24
    assert len(answer.stdout.splitlines()) == 3
