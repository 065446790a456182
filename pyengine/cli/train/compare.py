"""Compare a mode with plain DDP on the same data: traffic, time, and the error of the gradient."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Sequence
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
    model = train_modes.build(task, settings)
    wanted = [
        _big_batch_gradient(task, model, list(itertools.chain.from_iterable(windows)))
        for windows in (data.full, data.short)
    ]
    checked = [_check(train_modes.make(name, task, settings), data, wanted) for name in names]
    timed = [train_modes.make(name, task, settings, counted=False) for name in names]
    seconds = _time(timed, data)
    return [
        Row(name, step_s=step_s, **values)
        for name, step_s, values in zip(names, seconds, checked, strict=True)
    ]


class _Windows:
    """Windows that are the same for every mode, and not those of training.

    Attributes:
        full: a window for each rank.
        short: as at the end of a dataset: fewer micro-batches, the last one shorter, unlike on each rank.
    """

    def __init__(self, task: Task, settings: Settings) -> None:
        self._task, self._settings = task, settings
        ranks = range(dist.get_world_size())
        self.full = [self.first(1, rank)[0] for rank in ranks]
        num = -(-settings.accumulate // 2)
        self.short = [
            [*window[: num - 1], task.short(window[num - 1], rank)] for rank, window in enumerate(self.full)
        ]

    def first(self, num: int, rank: int) -> list[list[Batch]]:
        """Return a rank's first windows."""
        settings, world_size = self._settings, dist.get_world_size()
        size = settings.micro_batch[self._task.name]
        seed = settings.seed + 1
        stream = self._task.batches(rank=rank, world_size=world_size, micro_batch=size, seed=seed)
        return [list(itertools.islice(stream, settings.accumulate)) for _ in range(num)]


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
        float((mode.gradient(windows[dist.get_rank()]) - gradient).norm() / gradient.norm())
        for windows, gradient in zip((data.full, data.short), wanted, strict=True)
    )
    mode.model.train()
    (record,) = mode.steps(data.full[dist.get_rank()])
    return {
        "label": mode.label,
        "buckets": mode.buckets,
        "collectives": record.collectives,
        "bytes_sent": record.bytes_on_wire,
        "full_window": full,
        "short_window": short,
    }


def _time(modes: list[Mode], data: _Windows) -> list[Range]:
    """Time the modes in turn, window by window, so that a slow machine slows all of them down."""
    seconds: list[list[float]] = [[] for _ in modes]
    for window in data.first(_WARMUP_WINDOWS + _TIMED_WINDOWS, dist.get_rank()):
        for mode, taken in zip(modes, seconds, strict=True):
            dist.barrier()
            start = time.perf_counter()
            for _ in mode.steps(window):
                pass
            taken.append(time.perf_counter() - start)
    return [Range.of(taken[_WARMUP_WINDOWS:]) for taken in seconds]
