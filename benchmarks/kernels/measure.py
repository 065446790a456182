"""Time the kernels of every op on one thread, and compare them with torch and with the memory bandwidth."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from kernels import accumulate, chain, codec, exact, pack, unscale_norm
from kernels.case import Build, Run, Sizes
from pyengine.ops import native

# The cases of each op, by the stem of its module.
OPS: Mapping[str, Callable[[Sizes], list[Build]]] = {
    "pack": pack.cases,
    "accumulate": accumulate.cases,
    "unscale_norm": unscale_norm.cases,
    "exact": exact.cases,
    "codec": codec.cases,
    "chain": chain.cases,
}


def measure(build: Build, roofs: Mapping[str, float], seconds: float) -> dict[str, Any]:
    """Time a case and the torch expression that does the same work; return the row of a result file."""
    case = build()
    ours, torchs = time_in_turn([case.run, case.torch_run], seconds)
    best = min(ours)
    return {
        "case": case.name,
        "min_ms": best * 1e3,
        "p50_ms": statistics.median(ours) * 1e3,
        "p99_ms": percentile(ours, 0.99) * 1e3,
        "torch_min_ms": min(torchs) * 1e3,
        "torch_p50_ms": statistics.median(torchs) * 1e3,
        "gb_per_s": case.num_bytes / best / 1e9,
        "roof": case.roof,
        "times_roof": best / case.roof_seconds(roofs),
        "times_torch": min(torchs) / best,
        "rounds": len(ours),
    }


def measure_roofs(megabytes: int, seconds: float) -> dict[str, float]:
    """Return GB/s of reading, updating in place and copying.

    Raises:
        RuntimeError: there is no native core, whose loops measure the roofs of a CPU.
    """
    core = native.core()
    if core is None:
        raise RuntimeError(
            "this installation has no native core, so its kernels are torch's own and there is nothing to "
            "compare: build it (see python -m pyengine doctor)"
        )
    src, dst = torch.ones(megabytes * 2**18), torch.ones(megabytes * 2**18)
    a, b, n = src.data_ptr(), dst.data_ptr(), src.numel()
    runs: list[Run] = [
        lambda: core.roof_read(a, n),
        lambda: core.roof_update(b, n),
        lambda: core.roof_stream_copy(b, a, n),
        lambda: ctypes.memmove(b, a, 4 * n),
    ]
    read, update, stream, memmove = (4 * n / min(taken) / 1e9 for taken in time_in_turn(runs, seconds))
    return {"read": read, "update": 2 * update, "copy": 2 * max(stream, memmove), "memcpy": 2 * memmove}


def time_in_turn(runs: Sequence[Run], seconds: float) -> list[list[float]]:
    """Time the runs in turn until the budget is spent; return the time of each call in seconds."""
    return in_turn([partial(_time_on_host, run) for run in runs], seconds, least=5)


def in_turn(timers: Sequence[Callable[[], float]], seconds: float, *, least: int) -> list[list[float]]:
    """Call the timers in turn until the budget is spent, for at least `least` rounds after a warm-up round.

    Returns:
        The results of each timer.
    """
    times: list[list[float]] = [[] for _ in timers]
    for timer in timers:
        timer()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < least:
        for timer, taken in zip(timers, times, strict=True):
            taken.append(timer())
    return times


def _time_on_host(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def percentile(times: Sequence[float], share: float) -> float:
    """Return the time that a fraction `share` of all calls does not exceed."""
    return sorted(times)[int(share * (len(times) - 1))]
