"""The device on which windows run: the CPU, or a CUDA device for each rank."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyengine.comm.launching import destroy_default_group


class Processor:
    device = torch.device("cpu")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Prepare this rank for windows, with one host thread."""
        _use_one_thread()
        yield

    def now(self) -> Any:
        """Return a time mark that follows all work launched so far."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks; call `synchronize` first."""
        return float(end - begin)

    def synchronize(self) -> None:
        """Wait until all launched work has finished."""


class Cuda(Processor):
    """A CUDA device for each rank, timed with events; NCCL reduces device tensors, and gloo host tensors."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Select this rank's device, and replace the gloo process group with one that includes NCCL."""
        _use_one_thread()
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


def _use_one_thread() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "OMP_NUM_THREADS")  # Accelerate emits this warning


# Device classes by the value of `--device`.
DEVICES: dict[str, Callable[[], Processor]] = {"cpu": Processor, "cuda": Cuda}
