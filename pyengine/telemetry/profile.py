"""A Chrome trace of a loop, with the engine's own ranges in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile


@contextmanager
def chrome_trace(path: str | os.PathLike[str], *, rank: int = 0) -> Iterator[None]:
    """Profile the body on one rank and write a trace that chrome://tracing and Perfetto show.

    Beside PyTorch's own events it holds `pyengine: backward`, `pyengine: exposed_sync`, `pyengine: step`, and for every
    bucket `pyengine: launch bucket <n>` and `pyengine: land bucket <n>`.

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
    device = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profile(activities=[ProfilerActivity.CPU, *device]) as profiler:
        yield
    profiler.export_chrome_trace(os.fspath(path))
