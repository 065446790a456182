"""A Chrome trace of a loop, with the engine's own ranges in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.profiler import profile


@contextmanager
def chrome_trace(path: str | os.PathLike[str], *, rank: int = 0) -> Iterator[None]:
    """Profile the body on one rank and write a trace that chrome://tracing and Perfetto show.

    Beside PyTorch's own events it holds `pyengine: backward`, `pyengine: exposed_sync`, `pyengine:
    optimizer`, and for every bucket `pyengine: launch bucket <n>` and (not under DDP, which waits itself)
    `pyengine: land bucket <n>`. The process group adds what is on the network in between, as
    `gloo:all_reduce` or `nccl:all_reduce`: in the order of launches, after the header's.

    Args:
        path: the JSON file to write; ending in `.gz` it is compressed.
        rank: the rank that is profiled.

    Cost: profiling slows every operation down; a few windows are enough.

    Example:
        >>> with chrome_trace("trace.json"):  # doctest: +SKIP
        ...     train(sync, model, loader)
    """
    if rank != (dist.get_rank() if dist.is_initialized() else 0):
        yield
        return
    with profile() as profiler:
        yield
    profiler.export_chrome_trace(os.fspath(path))
