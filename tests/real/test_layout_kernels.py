"""The layouts of vLLM's CPU engine, against the kernel with which that engine fills its cache."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from .install_stack import default_folder, is_installed, python_of

pytestmark = pytest.mark.real

# Runs in the stack's own environment, because vLLM is not in that of the tests.
SCRIPT = """
import json
import sys

import torch
from vllm import _custom_ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from lmcache_stream.cache import layouts
from lmcache_stream.cache.geometry import KVGeometry

HEADS, BLOCKS, UNUSED = 3, 5, 2


def same(a, b):
    bits = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def compare(isa, layout, dtype, block_size, head_size):
    torch.manual_seed(block_size * head_size)
    tokens = BLOCKS * block_size
    keys = torch.randn(tokens, HEADS, head_size).to(dtype)
    values = torch.randn(tokens, HEADS, head_size).to(dtype)
    cache = torch.zeros(BLOCKS + UNUSED, HEADS, block_size, 2 * head_size, dtype=dtype)
    # As vLLM's CPU attention takes its cache apart before it calls the kernel.
    halves = cache.view(BLOCKS + UNUSED, HEADS, 2 * block_size, head_size).chunk(2, dim=2)
    block_ids = torch.randperm(BLOCKS + UNUSED)[:BLOCKS]
    slots = block_ids[:, None] * block_size + torch.arange(block_size)
    _custom_ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots.flatten(), isa)
    # As LMCache gathers a chunk: row s of a block is token s, its heads side by side.
    chunk = cache[block_ids].transpose(1, 2).reshape(1, tokens, -1)

    geometry = KVGeometry(num_layers=1, num_kv_heads=HEADS, head_size=head_size, dtype=dtype,
                          layout=layout, block_size=block_size)
    codec = layouts.get(layout)
    kv = torch.empty(geometry.kv_shape(tokens), dtype=dtype)
    codec.decode(chunk, kv, geometry)
    decoded = same(kv[0, 0], keys.flatten(1)) and same(kv[1, 0], values.flatten(1))
    again = torch.empty_like(chunk)
    codec.encode(kv, again, geometry)
    return {
        "case": f"{isa} {dtype} block {block_size} head {head_size}",
        "decoded": decoded,
        "encoded": same(again, chunk),
        "chosen": _get_attn_isa(dtype, block_size, head_size),
    }


results = []
for block_size in (32, 64, 128):
    for head_size in (64, 128):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            results.append(compare("vec", "cpu-vec", dtype, block_size, head_size))
        if torch.cpu._is_amx_tile_supported():
            results.append(compare("amx", "cpu-amx", torch.bfloat16, block_size, head_size))
    results.append(compare("vec16", "cpu-vec", torch.bfloat16, block_size, 80))
json.dump(results, sys.stdout)
"""


def test_codecs_equal_the_engines_kernel() -> None:
    if not is_installed(default_folder()):
        pytest.skip("the real stack is not installed: python tests/real/install_stack.py")
    checkout = Path(__file__).parents[2]
    answer = subprocess.run(
        [python_of(default_folder()), "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(checkout), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    results = json.loads(answer.stdout[answer.stdout.index("[{") :])
    assert len(results) >= 21
    assert [r["case"] for r in results if not r["decoded"]] == []
    assert [r["case"] for r in results if not r["encoded"]] == []
    # Another kernel that vLLM would choose on this machine might have a layout of its own.
    assert {r["chosen"] for r in results} <= {"amx", "vec", "vec16"}
