"""Looking at all bits: every single one counts, whatever the strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmcache_stream.cache.prints import fingerprint, is_finite, is_finite_kv, plane_print

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def bits(plane: Tensor) -> Tensor:
    return plane.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[plane.dtype.itemsize])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 4, 8, 64])
def test_one_changed_bit_anywhere_changes_the_print_of_its_chunk_alone(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    kv = torch.randn(2, 3, 12, 2 * size).to(dtype)
    before = fingerprint(kv, 4, size)
    assert before.shape == (3, 2)
    for plane, layer, token, element in [
        (0, 0, 0, 0),
        (1, 2, 11, 2 * size - 1),
        (0, 1, 5, 1),
        (1, 0, 4, size),
    ]:
        changed = kv.clone()
        bits(changed)[plane, layer, token, element] ^= 1
        differs = fingerprint(changed, 4, size) != before
        assert differs.nonzero().tolist() == [[token // 4, plane]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", ["one", "several"])
def test_strides_and_offsets_change_nothing(
    dtype: torch.dtype, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 if threads == "one" else 2)
    plane = torch.randn(5000, 2, 8).to(dtype)
    beside = torch.randn(5000, 2, 16).to(dtype)
    beside[..., 8:] = plane
    shifted = torch.empty(plane.numel() + 1, dtype=dtype)[1:].view(plane.shape)
    shifted.copy_(plane)
    turned = plane.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    wanted = plane_print(plane)
    for other in (beside[..., 8:], shifted, turned):
        assert plane_print(other) == wanted
        assert is_finite(other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype, value: float) -> None:
    kv = torch.randn(2, 3, 5000, 16).to(dtype)
    assert is_finite_kv(kv)
    kv[1, 2, 4999, 15] = value
    assert not is_finite_kv(kv)
    assert not is_finite(kv[1, 2].view(5000, 2, 8))
    assert is_finite(kv[1, 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_numbers_are_finite_though_their_sum_is_not(dtype: torch.dtype) -> None:
    assert is_finite(torch.full((4000, 2, 8), torch.finfo(dtype).max, dtype=dtype))


def test_a_plane_of_no_tokens_is_finite() -> None:
    assert is_finite(torch.empty(0, 2, 8))
