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
from pyengine.cli.train.arguments import TrainSettings
from pyengine.cli.train.modes import Mode, pop_gradient

_TIMED_WINDOWS = 5
_WARMUP_WINDOWS = 1


@dataclass(frozen=True)
class Row:
    """The figures of one mode in this run."""

    mode: str
    label: str
    buckets: int  # Number of gradient buckets.
    collectives: int  # Number of gradient collectives per window, including the engine's header.
    bytes_sent: int  # Bytes that this rank sent in these collectives.
    step_s: Range  # Seconds of a step, over the timed windows.
    full_window: float  # Relative difference between a window's gradient and the gradient of one big batch.
    short_window: float  # Relative difference for a window with fewer micro-batches and unequal counts.


def compare(task: Task, settings: TrainSettings) -> list[Row]:
    """Run the mode and plain DDP on the same windows; return a row for each.

    If the mode is plain DDP, it is compared with the engine. Every rank must call this function. All ranks
    have the same gradients, so the differences on any rank are representative.
    """
    names = ("engine" if settings.mode == "ddp" else settings.mode, "ddp")
    ranks = range(dist.get_world_size())
    full = [_first_windows(task, settings, rank, 1)[0] for rank in ranks]
    # Imitate the end of a dataset: use fewer micro-batches per window, and shorten the last micro-batch by a
    # different amount on each rank.
    *early, last = range(-(-settings.accumulate // 2))
    short = [
        [*(window[index] for index in early), task.short(window[last], rank)]
        for rank, window in enumerate(full)
    ]
    model = train_modes.build(task, settings)
    mine = dist.get_rank()
    checks = [(windows[mine], _big_batch_gradient(task, model, windows)) for windows in (full, short)]
    checked = [_check(train_modes.make(name, task, settings), checks) for name in names]
    timed = [train_modes.make(name, task, settings, counted=False) for name in names]
    seconds = _time(timed, _first_windows(task, settings, mine, _WARMUP_WINDOWS + _TIMED_WINDOWS))
    return [
        Row(name, step_s=step_s, **values)
        for name, step_s, values in zip(names, seconds, checked, strict=True)
    ]


def _first_windows(task: Task, settings: TrainSettings, rank: int, num: int) -> list[list[Batch]]:
    """Return a rank's windows for the comparison: the same in all modes, and not used in training."""
    stream = train_modes.batches(task, settings, rank, seed=settings.seed + 1)
    return [list(itertools.islice(stream, settings.accumulate)) for _ in range(num)]


def _big_batch_gradient(task: Task, model: nn.Module, windows: Sequence[Sequence[Batch]]) -> Tensor:
    """Return the gradient of the mean loss over all ranks' items.

    It comes from one backward of a float64 copy of the model. The copy is in eval mode, because batch
    statistics depend on the split into micro-batches. In training mode, no split would give the gradient of
    the big batch.
    """
    exact = copy.deepcopy(model).double().eval()
    x, y = map(torch.cat, zip(*itertools.chain.from_iterable(windows), strict=True))
    loss, count = task.loss(exact, (x, y))
    (loss / count).backward()
    return pop_gradient(exact)


def _check(mode: Mode, checks: Sequence[tuple[list[Batch], Tensor]]) -> dict[str, Any]:
    """Return the gradient errors of a full and a short window, and the traffic of a window."""
    mode.model.eval()  # the model in `_big_batch_gradient` is in eval mode, too
    full, short = (
        float((mode.gradient(window) - wanted).norm() / wanted.norm()) for window, wanted in checks
    )
    mode.model.train()
    (record,) = mode.steps(checks[0][0])
    return {
        "label": mode.label,
        "buckets": mode.buckets,
        "collectives": record.collectives,
        "bytes_sent": record.bytes_on_wire,
        "full_window": full,
        "short_window": short,
    }


def _time(modes: list[Mode], windows: Sequence[list[Batch]]) -> list[Range]:
    """Time the modes in turn, window by window, so that a slow machine affects all modes equally."""
    seconds: list[list[float]] = [[] for _ in modes]
    for window in windows:
        for mode, taken in zip(modes, seconds, strict=True):
            dist.barrier()
            start = time.perf_counter()
            list(mode.steps(window))
            taken.append(time.perf_counter() - start)
    return [Range.of(taken[_WARMUP_WINDOWS:]) for taken in seconds]
