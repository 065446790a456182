"""Compare a mode with plain DDP on the same data: traffic, time, and the error of the gradient."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyengine.cli.noise import Range
from pyengine.cli.tasks.base import Batch, Task
from pyengine.cli.train import modes as train_modes
from pyengine.cli.train.arguments import Settings
from pyengine.cli.train.modes import Mode, pop_gradient

_TIMED_WINDOWS = 5
_WARMUP_WINDOWS = 1


@dataclass(frozen=True)
class Row:
    """The figures of one mode in this run.

    Attributes:
        buckets: gradient buckets.
        collectives: gradient collectives a window, the engine's header included.
        bytes_sent: bytes that this rank sent in them.
        step_s: seconds of a step, over the timed windows.
        full_window: relative difference of a window's gradient from that of one big batch.
        short_window: the same for a window with fewer micro-batches and unequal counts.
    """

    mode: str
    label: str
    buckets: int
    collectives: int
    bytes_sent: int
    step_s: Range
    full_window: float
    short_window: float


def compare(task: Task, settings: Settings) -> list[Row]:
    """Run the mode (for plain DDP: the engine) and plain DDP on the same windows; return a row for each.

    Collective: every rank must call it. All ranks have the same gradients, so any rank's differences count.
    """
    names = ("engine" if settings.mode == "ddp" else settings.mode, "ddp")
    data = _Windows(task, settings)
    wanted = _big_batch_gradients(task, settings, data)
    checked = [_check(train_modes.make(name, task, settings), data, wanted) for name in names]
    timed = [train_modes.make(name, task, settings, counted=False) for name in names]
    seconds = _time(timed, data)
    return [
        Row(name, step_s=step_s, **values)
        for name, step_s, values in zip(names, seconds, checked, strict=True)
    ]


class _Windows:
    """Windows that are the same for every mode, and not those of training."""

    def __init__(self, task: Task, settings: Settings) -> None:
        self.task, self._settings = task, settings
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    def first(self, num: int) -> list[list[Batch]]:
        stream = self._stream(self._rank)
        return [list(itertools.islice(stream, self._settings.accumulate)) for _ in range(num)]

    def full(self) -> list[list[Batch]]:
        return [self._first(rank) for rank in range(self._world_size)]

    def short(self) -> list[list[Batch]]:
        """Return a window for each rank as at the end of a dataset: fewer micro-batches, the last one
        shorter, by another number on each rank.
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


def _big_batch_gradients(task: Task, settings: Settings, data: _Windows) -> list[Tensor]:
    """Return the gradients of the full and the short window as one big batch each."""
    model = train_modes.build(task, settings)
    joined = [list(itertools.chain.from_iterable(window)) for window in (data.full(), data.short())]
    return [_big_batch_gradient(task, model, batches) for batches in joined]


def _big_batch_gradient(task: Task, model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """Return the gradient of the mean over all items: one backward of a float64 copy of the model.

    The copy is in eval mode: batch statistics depend on the split, and with them no split equals one batch.
    """
    exact = copy.deepcopy(model).double().eval()
    joined = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    loss, count = task.loss(exact, joined)
    (loss / count).backward()
    return pop_gradient(exact)


def _check(mode: Mode, data: _Windows, wanted: list[Tensor]) -> dict[str, Any]:
    """Return the errors of a full and of a short window's gradient, and the traffic of a window."""
    mode.model.eval()  # as the model of the big batch
    full, short = (
        _relative_difference(mode.gradient(window[dist.get_rank()]), gradient)
        for window, gradient in zip((data.full(), data.short()), wanted, strict=True)
    )
    mode.model.train()
    (record,) = mode.steps(data.first(1)[0])
    return {
        "label": mode.label,
        "buckets": mode.buckets,
        "collectives": record.collectives,
        "bytes_sent": record.bytes_on_wire,
        "full_window": full,
        "short_window": short,
    }


def _relative_difference(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def _time(modes: list[Mode], data: _Windows) -> list[Range]:
    """Time the modes in turn, window by window, so that a slow machine slows all of them down."""
    seconds: list[list[float]] = [[] for _ in modes]
    for window in data.first(_WARMUP_WINDOWS + _TIMED_WINDOWS):
        for mode, taken in zip(modes, seconds, strict=True):
            dist.barrier()
            start = time.perf_counter()
            for _ in mode.steps(window):
                pass
            taken.append(time.perf_counter() - start)
    return [Range.of(taken[_WARMUP_WINDOWS:]) for taken in seconds]
