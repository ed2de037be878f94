"""Threads for short tensor work, side by side."""

from __future__ import annotations

import torch

from .._workers import Workers

__all__ = ["tensor_workers"]


def tensor_workers(name: str) -> Workers:
    """Return workers in each of which torch computes by itself.

    torch splits every operation of more than 32,768 elements among its own threads and waits for them.
    Where other processes or other workers want the cores as well, that wait is longer than the work: an
    edit of bfloat16 KV was nine times slower so.
    """
    # Imported here, so that layouts and policies can be used in an environment without it, such as an
    # engine's, and so that its absence is an error of whoever wants threads.
    import threadpoolctl

    def compute_alone() -> None:
        # torch takes its number of threads over from the process at its first use in a thread; asked
        # before, it does not undo what follows. Its own setter would change the whole process.
        torch.get_num_threads()
        # The number is the thread's own, as OpenMP has it.
        threadpoolctl.threadpool_limits(1, user_api="openmp")

    return Workers(name, on_start=compute_alone)
