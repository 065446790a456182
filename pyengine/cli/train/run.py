"""`train`: train small models on this machine, and compare with plain DDP."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist

from pyengine.cli import terminal
from pyengine.cli.tasks.base import Batch, Task
from pyengine.cli.tasks.cnn import DigitsTask
from pyengine.cli.tasks.gpt import TextTask
from pyengine.cli.trackers import Trackers
from pyengine.cli.train import modes as train_modes
from pyengine.cli.train.arguments import Settings
from pyengine.cli.train.compare import compare
from pyengine.cli.train.report import Report
from pyengine.cli.train.saving import Saving
from pyengine.comm.launching import launch
from pyengine.telemetry import chrome_trace

_TASKS: dict[str, Callable[[], Task]] = {"gpt": TextTask, "cnn": DigitsTask}
TRACED_WINDOWS = 3
_WARM_UP_WINDOWS = 2  # the first lays the buckets out, the second is the first to use them


def run(settings: Settings) -> int:
    try:
        stopped = max(launch(work, workers=settings.workers, args=(settings,)))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    if stopped:  # in a worker of torchrun; elsewhere launch raises
        raise SystemExit(128 + stopped)
    return 0


def work(settings: Settings) -> int:
    """Train and compare every model, on each rank; return the signal that has ended it, or 0."""
    terminal.replace_unencodable()
    for name in settings.models:
        task = _TASKS[name]()
        report = Report(as_json=settings.json, is_silent=dist.get_rank() > 0)
        if stopped := train(task, settings, report):
            return stopped
        report.compare(*compare(task, settings))
        if name in settings.traces:
            write_trace(task, settings, settings.traces[name])
            report.trace(settings.traces[name], windows=TRACED_WINDOWS)
    return 0


def train(task: Task, settings: Settings, report: Report) -> int:
    """Train one model in the chosen mode; return the signal that has ended it, or 0."""
    mode = train_modes.make(settings.mode, task, settings)
    steps = settings.steps[task.name]
    about = {
        "parameters": sum(param.numel() for param in mode.model.parameters()),
        "mode": settings.mode,
        "workers": dist.get_world_size(),
        "accumulate": settings.accumulate,
        "micro_batch": settings.micro_batch[task.name],
        "dtype": settings.dtype,
        "wire": settings.wire,
    }
    folder, every = settings.checkpoints.get(task.name), settings.checkpoint_every
    saving = Saving(folder, every=every, parts=mode.parts, steps=steps)
    report.start(task.name, task.unit, done=saving.start, steps=steps, about=about)
    first, end = (each * settings.accumulate for each in (min(saving.start, steps), steps))
    batches = itertools.islice(_batches(task, settings), first, end)
    trackers = settings.trackers if dist.get_rank() == 0 else Trackers()
    with saving.signals(), trackers.run(task.name, group=settings.mode, config=about) as tracked:
        for done, record in enumerate(mode.steps(batches), saving.start + 1):
            report.step(record)
            tracked(record)
            if saving.must_stop(done):
                return saving.stopped
        quality = task.quality(mode.model)
        tracked.log(quality, axis="pyengine/step", at=steps)
    report.finish(quality)
    return 0


def write_trace(task: Task, settings: Settings, path: Path) -> None:
    """Write a Chrome trace of rank 0 in a few windows of a new model; every rank must call it.

    It is not of the training itself, which profiling would slow down.
    """
    mode = train_modes.make(settings.mode, task, settings, counted=False)
    batches = _batches(task, settings)

    def train(windows: int) -> None:
        for _ in mode.steps(itertools.islice(batches, windows * settings.accumulate)):
            pass

    train(_WARM_UP_WINDOWS)
    with chrome_trace(path):
        train(TRACED_WINDOWS)


def _batches(task: Task, settings: Settings) -> Iterator[Batch]:
    size = settings.micro_batch[task.name]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return task.batches(rank=rank, world_size=world_size, micro_batch=size, seed=settings.seed)
