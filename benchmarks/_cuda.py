"""Time kernels on a CUDA device, with more cases and more columns than on a CPU.

A call is timed in two ways, each with a pair of events. *Queued*: the stream sleeps while the host launches
the call, so the time between the events is that of the device's work alone. *Idle*: the stream is empty when
the call begins, so the time includes the host's part.

Calls rotate over several sets of operands, which together are several times as large as the L2 cache. Each
contestant begins at a different set, so that it does not find another contestant's operands in the cache.
"""

from __future__ import annotations

import gc
import platform
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from kernels.accumulate import accumulate_case, cast_case
from kernels.case import Build, Run, Sizes, Slots
from kernels.chain import chain_case
from kernels.measure import OPS, in_turn, percentile
from kernels.pack import pack_case, unpack_case
from kernels.unscale_norm import case as unscale_case

from pyengine.ops import native

OURS, LISTS, COPY = "pyengine", "raw lists", "copy_ of as many bytes"
F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

# A set of a thousand small tensors takes long to allocate, so there are at most 96 sets. Together they exceed
# the L2 cache of any device.
_L2_MULTIPLE, _MOST_SETS = 4, 96
_MIN_ROUNDS = 10
# 2^25 cycles are about 20 ms. That is enough to queue a thousand launches, the most that the driver accepts.
_FIRST_SLEEP, _LONGEST_SLEEP = 2**17, 2**25


# ---- cases ----


def cases(op: str, sizes: Sizes) -> list[Build]:
    """Return the cases of an op; on CUDA, including larger cases, fp16, and a bucket like the engine's."""
    return OPS[op](sizes) + (_more_cases(op, sizes) if sizes.is_cuda else [])


def huge(sizes: Sizes) -> tuple[Slots, str]:
    """Return 8 slots, four times as large as those of a large case, and the name of their total size."""
    return sizes.slots(4 * sizes.large, 8), f"{4 * sizes.megabytes} MiB"


def bucket(sizes: Sizes) -> Slots:
    """Return 25 slots, each with 1 MiB of float32."""
    return sizes.slots(25 * 2**18, 25)


def _more_cases(op: str, sizes: Sizes) -> list[Build]:
    (large, size), one, few, many, tiny = huge(sizes), bucket(sizes), sizes.few, sizes.many, sizes.tiny
    odd = Slots(400, sizes.large // 400 // 2 * 2 - 1, sizes.device)
    norm = partial(partial, unscale_case)
    return {
        "pack": [
            partial(pack_case, f"pack fp32 -> fp32, 8 tensors, {size}", large, F32, F32, 1.0),
            partial(pack_case, f"pack fp32 -> bf16 x scale, 8 tensors, {size}", large, F32, BF16, 0.125),
            partial(unpack_case, f"unpack bf16 -> fp32, 8 tensors, {size}", large, BF16, F32, 1.0),
            partial(pack_case, "pack fp32 -> bf16 x scale, one 25 MiB bucket", one, F32, BF16, 0.125),
            partial(pack_case, "pack fp32 -> bf16 x scale, 400 odd tensors", odd, F32, BF16, 0.125),
        ],
        "accumulate": [
            partial(accumulate_case, f"acc += s*bf16, 8 tensors, {size}", large, BF16, False),
            partial(accumulate_case, f"acc = s*bf16 (first), 8 tensors, {size}", large, BF16, True),
            partial(cast_case, f"bf16 wire = (acc + bf16) * s, 8 tensors, {size}", large, BF16, BF16),
            partial(cast_case, "fp16 wire = (acc + fp16) * s, 8 tensors", few, FP16, FP16),
            partial(accumulate_case, "acc += s*bf16, one 25 MiB bucket", one, BF16, False),
            partial(accumulate_case, "acc += s*fp32, 1000 of 1 KB", tiny, F32, False),
        ],
        "unscale_norm": [
            norm(f"unscale+check+norm fp32 in place, 8 tensors, {size}", large, F32, True),
            norm(f"check+norm fp32 read only, 8 tensors, {size}", large, F32, False),
            norm(f"check+norm bf16 read only, 8 tensors, {size}", large, BF16, False),
            norm("unscale+check+norm fp16 in place, 8 tensors", few, FP16, True),
            norm("check+norm fp32 read only, 400 tensors", many, F32, False),
            norm("check+norm fp32 read only, one 25 MiB bucket", one, F32, False),
        ],
        "chain": [
            partial(chain_case, f"window of 4 x bf16, 8 tensors, {size}", large),
            partial(chain_case, "window of 4 x bf16, one 25 MiB bucket", one),
        ],
    }.get(op, [])


# ---- results ----


@dataclass(frozen=True)
class Yardstick:
    """Copy rate and launch times with which the other times of the same run are compared."""

    copy_gb_per_s: float
    floor_queued_us: float
    floor_idle_us: float


def measure_yardstick(megabytes: int, seconds: float) -> Yardstick:
    """Measure the copy rate of large buffers, and the time of the smallest launch: a fill of one element."""
    num_bytes = 8 * megabytes * 2**20
    copies, one = [copier(num_bytes) for _ in range(2)], torch.zeros(1, device="cuda")
    copy = measure([Queued(rotate([{COPY: run} for run in copies])[COPY])], seconds)
    fill = partial(one.fill_, 1.0)
    queued, idle = (
        statistics.median(times) * 1e6 for times in measure([Queued(fill), Idle(fill)], seconds / 2)
    )
    return Yardstick(num_bytes / statistics.median(copy[0]) / 1e9, queued, idle)


def measure_case(build: Build, yardstick: Yardstick, seconds: float) -> dict[str, Any]:
    """Measure a case; return its row of a result file.

    Raises:
        RuntimeError: the contestants compute different values.
    """
    first = build()
    made = [first, *(build() for _ in range(num_sets(first.num_bytes) - 1))]
    sets = []
    for case in made:
        lists = {LISTS: case.run_lists} if case.run_lists else {}
        sets.append({OURS: case.run, "torch": case.torch_run, **lists, COPY: copier(case.num_bytes)})
    return row(first.name, first.num_bytes, compete(sets, seconds), yardstick)


def compete(sets: Sequence[Mapping[str, Run]], seconds: float) -> dict[str, dict[str, float | bool]]:
    """Time contestants in turn over rotating sets, queued and from an idle stream."""
    runs = rotate(sets)
    for _ in sets:
        for run in runs.values():
            run()
    queued = {name: Queued(run) for name, run in runs.items()}
    device = measure(list(queued.values()), 0.7 * seconds)
    idle = measure([Idle(run) for run in runs.values()], 0.3 * seconds)
    return {
        name: {
            "min_us": min(alone) * 1e6,
            "p50_us": statistics.median(alone) * 1e6,
            "p99_us": percentile(alone, 0.99) * 1e6,
            "idle_p50_us": statistics.median(with_host) * 1e6,
            "rounds": len(alone),
            "is_host_bound": queued[name].is_host_bound,
        }
        for name, alone, with_host in zip(runs, device, idle, strict=True)
    }


def row(
    name: str, num_bytes: int, times: dict[str, dict[str, float | bool]], yardstick: Yardstick
) -> dict[str, Any]:
    """Return a case's row of a result file, with the rate at which each contestant moves `num_bytes`."""
    for taken in times.values():
        taken["gb_per_s"] = num_bytes / taken["p50_us"] / 1e3
        taken["share_of_copy"] = taken["gb_per_s"] / yardstick.copy_gb_per_s
        taken["above_floor_us"] = taken["p50_us"] - yardstick.floor_queued_us
        taken["idle_above_floor_us"] = taken["idle_p50_us"] - yardstick.floor_idle_us
    return {"case": name, "num_bytes": num_bytes, "contestants": times}


# ---- timing ----


def machine_card() -> dict[str, str | int | float]:
    """Describe the device without naming the machine."""
    device, core = torch.cuda.get_device_properties(0), native.core()
    return {
        "gpu": device.name,
        "capability": f"{device.major}.{device.minor}",
        "multiprocessors": device.multi_processor_count,
        "l2_mib": round(device.L2_cache_size / 2**20, 1),
        "memory_gib": round(device.total_memory / 2**30, 1),
        "driver": _driver(),
        "kernels": "native" if getattr(core, "has_cuda", False) else "reference",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none",
        "python": platform.python_version(),
    }


def _driver() -> str:
    """Return the driver's version, or "unknown" if nvidia-smi does not report it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, check=False, capture_output=True, text=True, timeout=30).stdout.split()
    return found[0] if found else "unknown"


def num_sets(num_bytes: int) -> int:
    """Return how many sets of `num_bytes` each are several times as large as L2; at least two."""
    wanted = _L2_MULTIPLE * torch.cuda.get_device_properties(0).L2_cache_size
    return min(_MOST_SETS, max(2, -(-wanted // max(num_bytes, 1))))


def rotate(sets: Sequence[Mapping[str, Run]]) -> dict[str, Run]:
    """Return a function for each contestant, which cycles through the sets from a different first set."""
    names = list(sets[0])
    step = max(1, len(sets) // len(names))
    return {name: _Rotation([runs[name] for runs in sets], step * i) for i, name in enumerate(names)}


class _Rotation:
    def __init__(self, runs: list[Run], start: int) -> None:
        self._runs, self._next = runs, start

    def __call__(self) -> object:
        run = self._runs[self._next % len(self._runs)]
        self._next += 1
        return run()


class Queued:
    """Times a call on the device alone; the host launches the call before the device begins."""

    def __init__(self, run: Run) -> None:
        self._run, self._sleep = run, _FIRST_SLEEP
        self._calls = self._late = 0

    @property
    def is_host_bound(self) -> bool:
        """Whether the host was too slow for the longest sleep in more than a tenth of the calls."""
        return 10 * self._late > self._calls

    def __call__(self) -> float:
        """Return the time of a call in seconds; if the host was too slow, sleep longer and try again."""
        while True:
            start, end = _event(), _event()
            torch.cuda._sleep(self._sleep)  # noqa: SLF001 - as in torch's own benchmarks
            start.record()
            self._run()
            end.record()
            host_was_ahead = not start.query()
            end.synchronize()
            if host_was_ahead or self._sleep >= _LONGEST_SLEEP:
                self._calls += 1
                self._late += not host_was_ahead
                return float(start.elapsed_time(end)) / 1e3
            self._sleep *= 2


class Idle:
    """Times a call on an empty stream, so that the time includes the host's part."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self) -> float:
        """Return the time of a call in seconds."""
        start, end = _event(), _event()
        torch.cuda.synchronize()
        start.record()
        self._run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def measure(timers: Sequence[Queued | Idle], seconds: float) -> list[list[float]]:
    """Time calls in turn until the budget is spent, at least ten rounds; return the times in seconds."""
    gc.collect()
    gc.disable()  # collecting thousands of tensors takes long
    try:
        return in_turn(timers, seconds, least=_MIN_ROUNDS)  # the first round finds the length of the sleep
    finally:
        gc.enable()


def copier(num_bytes: int) -> Run:
    """Return a device-to-device copy that reads and writes `num_bytes` in total."""
    src = torch.randn(max(1, num_bytes // 8), device="cuda")
    dst = torch.empty_like(src)
    return lambda: dst.copy_(src)
