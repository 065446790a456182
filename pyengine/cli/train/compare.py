"""The chosen mode against plain DDP on the same data: what is sent, how long it takes,
and whether it is right.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pyengine.cli.tasks.base import Batch, Task
from pyengine.cli.train import gradient as train_gradient
from pyengine.cli.train import modes as train_modes
from pyengine.cli.train.arguments import Settings
from pyengine.cli.train.modes import Mode

_TIMED_WINDOWS = 5
_WARMUP_WINDOWS = 1


@dataclass(frozen=True)
class Row:
    """One mode, measured in this run.

    Attributes:
        buckets: what its gradients travel in.
        collectives: gradient collectives a window, the engine's header included.
        bytes_sent: bytes this rank sent for them.
        step_s: median seconds of a step.
        full_window: relative difference of a window's gradient from the one-big-batch gradient.
        short_window: the same for a window with fewer micro-batches and unequal counts.
    """

    mode: str
    label: str
    buckets: int
    collectives: int
    bytes_sent: int
    step_s: float
    full_window: float
    short_window: float


def compare(task: Task, settings: Settings) -> list[Row]:
    """Run the mode (for plain DDP: the engine) and plain DDP on the same windows; return one row each.

    Every rank must call it; the differences are rank 0's, whose gradients are every rank's.
    """
    names = ("engine" if settings.mode == "ddp" else settings.mode, "ddp")
    data = _Windows(task, settings)
    right = _right(task, settings, data)
    checked = [_check(train_modes.make(name, task, settings), data, right) for name in names]
    timed = [train_modes.make(name, task, settings, counted=False) for name in names]
    seconds = _median_seconds(timed, data)
    return [
        Row(name, step_s=step_s, **values)
        for name, step_s, values in zip(names, seconds, checked, strict=True)
    ]


class _Windows:
    """The same data for every mode, and another than training's."""

    def __init__(self, task: Task, settings: Settings) -> None:
        self.task, self._settings = task, settings
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    def take(self, num: int) -> list[list[Batch]]:
        """Return this rank's first windows."""
        stream = self._stream(self._rank)
        return [list(itertools.islice(stream, self._settings.accumulate)) for _ in range(num)]

    def full(self) -> list[list[Batch]]:
        """Return one window, by rank."""
        return [self._first(rank) for rank in range(self._world_size)]

    def short(self) -> list[list[Batch]]:
        """Return a window as at the end of a data set, by rank: fewer micro-batches,
        the last one cut unevenly.
        """
        num = -(-self._settings.accumulate // 2)
        windows = [self._first(rank)[:num] for rank in range(self._world_size)]
        return [[*window[:-1], self.task.short(window[-1], rank)] for rank, window in enumerate(windows)]

    def _first(self, rank: int) -> list[Batch]:
        return list(itertools.islice(self._stream(rank), self._settings.accumulate))

    def _stream(self, rank: int) -> Iterator[Batch]:
        size = self._settings.micro_batch[self.task.name]
        seed = self._settings.seed + 1
        return self.task.batches(rank=rank, world_size=self._world_size, micro_batch=size, seed=seed)


def _right(task: Task, settings: Settings, data: _Windows) -> list[Tensor]:
    """Return the one-big-batch gradients of the full and the short window."""
    model = train_modes.build(task, settings)
    joined = [list(itertools.chain.from_iterable(window)) for window in (data.full(), data.short())]
    return [train_gradient.of_one_big_batch(task, model, batches) for batches in joined]


def _check(mode: Mode, data: _Windows, right: list[Tensor]) -> dict[str, Any]:
    """Return how far the gradients of a full and of a short window are off, and what a window sends."""
    mode.model.eval()  # as the big batch's model is
    full, short = (
        train_gradient.difference(mode.gradient(window[dist.get_rank()]), wanted)
        for window, wanted in zip((data.full(), data.short()), right, strict=True)
    )
    mode.model.train()
    (record,) = mode.steps(data.take(1)[0])
    return {
        "label": mode.label,
        "buckets": mode.buckets,
        "collectives": record.collectives,
        "bytes_sent": record.bytes_on_wire,
        "full_window": full,
        "short_window": short,
    }


def _median_seconds(modes: list[Mode], data: _Windows) -> list[float]:
    """Time the modes in turn, window by window, so that what disturbs the machine disturbs all of them."""
    seconds: list[list[float]] = [[] for _ in modes]
    for window in data.take(_WARMUP_WINDOWS + _TIMED_WINDOWS):
        for mode, taken in zip(modes, seconds, strict=True):
            dist.barrier()
            start = time.perf_counter()
            for _ in mode.steps(window):
                pass
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken[_WARMUP_WINDOWS:]) for taken in seconds]
