"""Threads for tensor work: in each torch computes alone, and nowhere else does that change anything."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own, because the number of torch's threads is the whole process's.
SCRIPT = """
import asyncio, threading
import torch
from lmcache_stream.cache.threads import tensor_workers

torch.set_num_threads(3)

def count():
    torch.ones(100_000).sum()
    return torch.get_num_threads()

def beside():
    counts.append(count())

async def main():
    workers = tensor_workers("lmcache-stream test")
    counts.append(await workers.run(count))
    counts.append(await workers.run(count))
    other = threading.Thread(target=beside)
    other.start()
    other.join()
    counts.append(count())
    workers.close()

counts = []
asyncio.run(main())
print(*counts)
"""


def test_torch_is_single_threaded_in_the_workers_alone() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "1", "3", "3"]
