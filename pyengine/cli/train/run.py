"""`train`: small real models, data-parallel on this machine, and what pyengine saved over plain DDP."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import torch.distributed as dist

from pyengine.cli import terminal
from pyengine.cli.tasks.base import Task
from pyengine.cli.tasks.cnn import DigitsTask
from pyengine.cli.tasks.gpt import TextTask
from pyengine.cli.train import modes as train_modes
from pyengine.cli.train import trace as train_trace
from pyengine.cli.train.arguments import Settings
from pyengine.cli.train.compare import compare
from pyengine.cli.train.report import JsonLines, Report, Tables
from pyengine.comm.launching import launch

_TASKS: dict[str, Callable[[], Task]] = {"gpt": TextTask, "cnn": DigitsTask}


def run(settings: Settings) -> int:
    """Start the workers, which do everything; return the exit code."""
    try:
        launch(work, workers=settings.workers, args=(settings,))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        # A worker that was ended in the middle of its live line has left the cursor hidden behind it.
        sys.stdout.write("\x1b[?25h\n" if sys.stdout.isatty() else "")
    return 0


def work(settings: Settings) -> None:
    """Train and compare, model after model; runs on every rank."""
    terminal.show_everything()
    for name in settings.models:
        task = _TASKS[name]()
        report = _report(settings)
        train(task, settings, report)
        report.compare(compare(task, settings))
        if name in settings.traces:
            train_trace.take(task, settings, settings.traces[name])
            report.trace(settings.traces[name], windows=train_trace.WINDOWS)


def train(task: Task, settings: Settings, report: Report) -> None:
    """Train one model in the chosen mode."""
    mode = train_modes.make(settings.mode, task, settings)
    steps, size = settings.steps[task.name], settings.micro_batch[task.name]
    about = {
        "parameters": sum(param.numel() for param in mode.model.parameters()),
        "mode": settings.mode,
        "workers": dist.get_world_size(),
        "accumulate": settings.accumulate,
        "micro_batch": size,
        "dtype": settings.dtype,
        "wire": settings.wire,
    }
    stream = task.batches(
        rank=dist.get_rank(), world_size=dist.get_world_size(), micro_batch=size, seed=settings.seed
    )
    report.start(task.name, task.unit, steps=steps, about=about)
    for record in mode.steps(itertools.islice(stream, steps * settings.accumulate)):
        report.step(record)
    report.finish(task.quality(mode.model))


def _report(settings: Settings) -> Report:
    if dist.get_rank() > 0:
        return Report()
    return JsonLines() if settings.json else Tables()
