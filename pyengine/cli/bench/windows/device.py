"""Where windows run: all that differs between the processor and a CUDA device in timing and counting them."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from pyengine.cli.bench.kernels import cuda
from pyengine.comm.default_group import destroy_default_group

Run = Callable[[], object]


class Processor:
    """The host itself: it works while it waits.

    Attributes:
        runs_ahead: whether the host queues a window before it has run, so that its time is one of its own.
        activities: what the profiler listens to when calls are counted; none: they are not.
    """

    runs_ahead = False
    activities: tuple[ProfilerActivity, ...] = ()
    device = torch.device("cpu")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be ready to run windows on this rank, on one thread of the host."""
        _on_one_thread()
        yield

    def now(self) -> Any:
        """Return a mark: when all that was begun before is done."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks, after `synchronize`."""
        return float(end - begin)

    def synchronize(self) -> None:
        """Wait until everything that was begun is done."""

    def allocated(self) -> int:
        """Return the bytes of tensors; 0 where nobody counts them."""
        return 0

    def reset_peak(self) -> None:
        """Count the peak from here."""

    def peak(self) -> int:
        """Return the largest `allocated` since `reset_peak`."""
        return 0

    @contextmanager
    def for_capture(self) -> Iterator[None]:
        """Run what is to be captured later: a graph takes no work of another stream than its own."""
        yield

    def capture(self, run: Run) -> Run:
        """Run it once into a graph; return what replays it.

        Raises:
            RuntimeError: this device has no graphs, or there is something in `run` that none can hold.
        """
        raise RuntimeError("a CUDA graph needs a CUDA device")


class Cuda(Processor):
    """One CUDA device a rank, which meet over NCCL; what is on the processor goes over gloo."""

    runs_ahead = True
    activities = (ProfilerActivity.CUDA,)  # and with it the calls of its runtime; torch's own only cost time

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Take this rank's device, and a group of NCCL in place of gloo's."""
        _on_one_thread()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        folder = [tempfile.mkdtemp(prefix="pyengine-") if rank == 0 else ""]
        dist.broadcast_object_list(folder)
        destroy_default_group()
        store = dist.FileStore(str(Path(folder[0]) / "store"), world_size)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=world_size)
        try:
            yield
        finally:
            shutil.rmtree(folder[0], ignore_errors=True)

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    @contextmanager
    def for_capture(self) -> Iterator[None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def capture(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        # "thread_local": NCCL's watchdog asks for events from a thread of its own meanwhile.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            run()
        return graph.replay


def _on_one_thread() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "OMP_NUM_THREADS")  # Accelerate's


# By the name that arguments have for it.
DEVICES: dict[str, Callable[[], Processor]] = {"cpu": Processor, "cuda": Cuda}


def card(kind: str) -> Mapping[str, Any]:
    """Describe the device, where it is not the processor."""
    return cuda.machine_card() if kind == "cuda" else {}


def count_calls(run: Run, activities: Iterable[ProfilerActivity]) -> Counter[str]:
    """Run under the profiler; return how often what it listens to was called, by name."""
    with profile(activities=list(activities)) as profiler:
        run()
    return Counter({each.key: each.count for each in profiler.key_averages()})


def launches(calls: Mapping[str, int]) -> dict[str, int]:
    """Return what the host has asked of the device: kernels, copies and fills, and waits for it."""

    def total(pattern: str) -> int:
        return sum(count for name, count in calls.items() if re.match(pattern, name))

    # The profiler itself waits for the whole device, where it begins and ends.
    return {
        "launches": total(r"cu(da)?LaunchKernel"),
        "copies": total(r"cu(da)?(Memcpy|Memset)"),
        "waits": total(r"cu(da)?(Stream|Event)Synchronize"),
    }
