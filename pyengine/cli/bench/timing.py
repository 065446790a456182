"""Timing on the processor: contestants in turn, percentiles, and what the memory allows."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from pyengine.ops import native

Run = Callable[[], object]

_MIN_ROUNDS = 5


def measure(runs: Sequence[Run], seconds: float) -> list[list[float]]:
    """Time the runs in turn until the budget is spent, at least five rounds; seconds of each call."""
    return in_turn([partial(_time, run) for run in runs], seconds, least=_MIN_ROUNDS)


def in_turn(timers: Sequence[Callable[[], float]], seconds: float, *, least: int) -> list[list[float]]:
    """Let timers take turns until the budget is spent, at least so many rounds; what they return, but for a
    first round.
    """
    times: list[list[float]] = [[] for _ in timers]
    for timer in timers:
        timer()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < least:
        for timer, taken in zip(timers, times, strict=True):
            taken.append(timer())
    return times


def _time(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def percentile(times: Sequence[float], share: float) -> float:
    """Return the time that `share` of all calls stay below."""
    return sorted(times)[int(share * (len(times) - 1))]


def measure_roofs(megabytes: int, seconds: float) -> dict[str, float]:
    """GB/s of one thread: reading, updating in place, and the best of three copies.

    Raises:
        RuntimeError: there is no native core, whose loops the roofs are.
    """
    core = native.core()
    if core is None:
        raise RuntimeError(
            "this installation has no native core, so its kernels are torch's own and there is nothing to "
            "compare: build it (python -m pyengine doctor says how); `bench step` measures whole windows "
            "without it"
        )
    src, dst = torch.ones(megabytes * 2**18), torch.ones(megabytes * 2**18)
    a, b, n = src.data_ptr(), dst.data_ptr(), src.numel()
    runs: list[Run] = [
        lambda: core.roof_read(a, n),
        lambda: core.roof_update(b, n),
        lambda: core.roof_stream_copy(b, a, n),
        lambda: ctypes.memmove(b, a, 4 * n),
    ]
    read, update, stream, memmove = (4 * n / min(taken) / 1e9 for taken in measure(runs, seconds))
    return {"read": read, "update": 2 * update, "copy": 2 * max(stream, memmove), "memcpy": 2 * memmove}
