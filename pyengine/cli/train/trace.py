"""A Chrome trace of a few windows of the chosen mode, taken after training:
profiling slows down what it looks at.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch.distributed as dist

from pyengine.cli.tasks.base import Task
from pyengine.cli.train import modes as train_modes
from pyengine.cli.train.arguments import Settings
from pyengine.telemetry import chrome_trace

WINDOWS = 3
_WARM_UP_WINDOWS = 2  # buckets are laid out in the first; the second is the first to use them


def take(task: Task, settings: Settings, path: Path) -> None:
    """Train a fresh model for some windows, and write rank 0's trace of the last of them;
    every rank must call it.
    """
    mode = train_modes.make(settings.mode, task, settings, counted=False)
    stream = task.batches(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        micro_batch=settings.micro_batch[task.name],
        seed=settings.seed,
    )

    def train(windows: int) -> None:
        for _ in mode.steps(itertools.islice(stream, windows * settings.accumulate)):
            pass

    train(_WARM_UP_WINDOWS)
    with chrome_trace(path):
        train(WINDOWS)
