"""A Chrome trace of a loop, including the engine's ranges."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.profiler import profile


@contextmanager
def chrome_trace(path: str | os.PathLike[str], *, rank: int = 0) -> Iterator[None]:
    """Profile the body on one rank; write a trace for chrome://tracing and Perfetto.

    Besides PyTorch's own events it has `pyengine: backward`, `pyengine: exposed_sync`, `pyengine: optimizer`,
    and for every bucket `pyengine: launch bucket <n>` and (not under DDP, which waits itself) `pyengine: wait
    for bucket <n>`. The process group adds the collectives, as `gloo:all_reduce` or `nccl:all_reduce`: in the
    order of launches, after the header's.

    Args:
        path: the JSON file to write; compressed if it ends in `.gz`.
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
