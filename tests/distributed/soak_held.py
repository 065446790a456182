"""The resources of a process, in which a soak test looks for leaks."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Held:
    """The resources of a process.

    Attributes:
        threads, tasks: number of Python's threads, and of all threads of the process.
        descriptors: number of open files.
        groups: number of process groups.
        objects: number of objects of pyengine's types.
        tensors: number of tensors that Python's garbage collector knows.
        rss: resident bytes.
    """

    threads: int
    tasks: int
    descriptors: int
    groups: int
    objects: int
    tensors: int
    rss: int

    @classmethod
    def now(cls) -> Held:
        """Measure the resources of this process."""
        for _ in range(3):  # objects that garbage referenced may be garbage, too
            gc.collect()
        kinds = Counter(type(each) for each in gc.get_objects())
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            threads=threading.active_count(),
            tasks=_tasks(),
            descriptors=len(os.listdir("/proc/self/fd")),
            groups=len(dist.distributed_c10d._world.pg_map),
            objects=sum(n for kind, n in kinds.items() if str(kind.__module__).startswith("pyengine.")),
            tensors=sum(n for kind, n in kinds.items() if issubclass(kind, Tensor)),
            rss=pages * os.sysconf("SC_PAGE_SIZE"),
        )


def _tasks() -> int:
    """Return the number of threads of the process.

    A thread that has ended needs the interpreter once more, and is listed until then.
    """
    looks = []
    for _ in range(10):
        looks.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return min(looks)
