"""Named ranges for profilers: torch.profiler's events while it runs, NVTX ranges on CUDA otherwise."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd.profiler import record_function

_NOTHING = nullcontext()


def span(name: str, index: int | None = None) -> AbstractContextManager[object]:
    """Mark the body as the range `pyengine: <name> <index>` in a running profile.

    Cost: without a profiler no record_function is made, which would cost about 10 µs; the check costs 0.3 µs.
    On CUDA there is no way to check whether an NVTX tool is attached, and an NVTX range costs about 1 µs.
    """
    if torch.autograd._profiler_enabled():  # noqa: SLF001 - torch has no public name for it
        return record_function(_title(name, index))
    if torch.cuda.is_initialized():
        return torch.cuda.nvtx.range(_title(name, index))
    return _NOTHING


def _title(name: str, index: int | None) -> str:
    return f"pyengine: {name}" if index is None else f"pyengine: {name} {index}"
