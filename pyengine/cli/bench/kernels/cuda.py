"""Timing on a CUDA device, what `timing.py` is on the processor.

A call has two times, both between a pair of events. *Queued*: the stream sleeps while the host queues the
call, so the events see the device alone. *Idle*: the stream is empty when the call begins, so the host's part
counts too.

Operands rotate over sets that together are several times the L2 cache, and every contestant stands somewhere
else in the rotation: nobody reads what another has just left in L2.
"""

from __future__ import annotations

import gc
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from pyengine.cli.bench.timing import Run, in_turn
from pyengine.ops import native
from pyengine.ops.plan import BucketPlan
from pyengine.ops.pointers import Pointers

# Sets of a thousand small tensors take long to make, and 96 with everybody's buffers are beyond any L2.
_L2_MULTIPLE, _MOST_SETS = 4, 96
_MIN_ROUNDS = 10
# 2^25 cycles are about 20 ms: enough to queue a thousand launches, more than which the driver does not take
# anyway.
_FIRST_SLEEP, _LONGEST_SLEEP = 2**17, 2**25

# Kernels of the multi-tensor-apply kind take their addresses as launch arguments, which hold so many.
_TENSORS_A_LAUNCH, _CHUNKS_A_LAUNCH, _CHUNK_ELEMENTS = 110, 320, 65536


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
    """Return the version of the driver, as far as its tool tells."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, check=False, capture_output=True, text=True, timeout=30).stdout.split()
    return found[0] if found else "unknown"


def num_sets(num_bytes: int) -> int:
    """Return how many sets of operands go beyond L2 when a call moves `num_bytes`; at least two."""
    wanted = _L2_MULTIPLE * torch.cuda.get_device_properties(0).L2_cache_size
    return min(_MOST_SETS, max(2, -(-wanted // max(num_bytes, 1))))


def rotate(sets: Sequence[Mapping[str, Run]]) -> dict[str, Run]:
    """Return one call a contestant that goes through the sets, everybody at another place."""
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
    """Times a call on the device alone: the host is done with it before the device begins."""

    def __init__(self, run: Run) -> None:
        self._run, self._sleep = run, _FIRST_SLEEP
        self._calls = self._late = 0

    @property
    def is_host_bound(self) -> bool:
        """Whether the host was too slow, however long the stream slept, more often than now and then."""
        return 10 * self._late > self._calls

    def __call__(self) -> float:
        """Return seconds; sleep longer and try again when the host was too slow."""
        while True:
            start, end = _event(), _event()
            torch.cuda._sleep(self._sleep)  # noqa: SLF001 - as torch's own benchmarks
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
    """Times a call that finds the stream empty: host and device."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self) -> float:
        """Return seconds."""
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
    """Time calls in turn until the budget is spent, at least ten rounds; seconds of each call."""
    gc.collect()
    gc.disable()  # thousands of tensors make a collection long
    try:
        return in_turn(timers, seconds, least=_MIN_ROUNDS)  # the first round finds the length of the sleep
    finally:
        gc.enable()


def copier(num_bytes: int) -> Run:
    """Return a plain device-to-device copy that reads and writes `num_bytes` together."""
    src = torch.randn(max(1, num_bytes // 8), device="cuda")
    dst = torch.empty_like(src)
    return lambda: dst.copy_(src)


def filler() -> Run:
    """Return the smallest launch there is: one element."""
    one = torch.zeros(1, device="cuda")
    return lambda: one.fill_(1.0)


def launches(tensors: Sequence[torch.Tensor], plan: BucketPlan) -> list[tuple[BucketPlan, Pointers]]:
    """Cut a plan into the launches of a multi-tensor-apply kernel:
    at most 110 tensors and 320 chunks of 65536. On the processor there are none.
    """
    if not tensors[0].is_cuda:
        return []
    flat = [tensor.view(-1) for tensor in tensors]
    return [
        (piece, piece.pointers([flat[slot][begin : begin + count] for slot, begin, count in group]))
        for group in _launch_groups(plan.numels)
        for piece in [
            BucketPlan([plan.offsets[slot] + begin for slot, begin, _ in group], [n for *_, n in group])
        ]
    ]


def _launch_groups(numels: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Return (slot, first element, elements) of every launch; a slot longer than a launch is cut."""
    groups: list[list[tuple[int, int, int]]] = []
    group: list[tuple[int, int, int]] = []
    chunks = 0
    for slot, numel in enumerate(numels):
        begin = 0
        while begin < numel:
            count = min(numel - begin, (_CHUNKS_A_LAUNCH - chunks) * _CHUNK_ELEMENTS)
            group.append((slot, begin, count))
            chunks += -(-count // _CHUNK_ELEMENTS)
            begin += count
            if len(group) == _TENSORS_A_LAUNCH or chunks == _CHUNKS_A_LAUNCH:
                groups.append(group)
                group, chunks = [], 0
    return [*groups, group] if group else groups
