"""`train`: small real models, data-parallel on this machine, and what pyengine saved over plain DDP."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import torch.distributed as dist

from pyengine.cli import stopping, terminal
from pyengine.cli.tasks.base import Task
from pyengine.cli.tasks.cnn import DigitsTask
from pyengine.cli.tasks.gpt import TextTask
from pyengine.cli.train import modes as train_modes
from pyengine.cli.train import trace as train_trace
from pyengine.cli.train.arguments import Settings
from pyengine.cli.train.compare import compare
from pyengine.cli.train.report import JsonLines, Report, Tables
from pyengine.cli.train.saving import Saving
from pyengine.comm.launching import launch

_TASKS: dict[str, Callable[[], Task]] = {"gpt": TextTask, "cnn": DigitsTask}


def run(settings: Settings) -> int:
    """Start the workers, which do everything; return the exit code."""
    folders = " and ".join(map(str, settings.checkpoints.values()))
    saved = (
        f"what was saved is in {folders}, and the same command goes on" if folders else "nothing was saved"
    )
    try:
        stopped = max(launch(work, workers=settings.workers, args=(settings,)))
        if stopped:  # torchrun's worker: elsewhere launch raises
            raise SystemExit(128 + stopped)
    except (KeyboardInterrupt, SystemExit) as stop:
        return stopping.told(stop, f"every worker has ended, {saved}")
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        # A worker that was ended in the middle of its live line has left the cursor hidden behind it.
        sys.stdout.write("\x1b[?25h\n" if sys.stdout.isatty() else "")
    return 0


def work(settings: Settings) -> int:
    """Train and compare, model after model; runs on every rank. Return the signal that ended it, or 0."""
    terminal.show_everything()
    for name in settings.models:
        task = _TASKS[name]()
        report = _report(settings)
        if stopped := train(task, settings, report):
            return stopped
        report.compare(compare(task, settings))
        if name in settings.traces:
            train_trace.take(task, settings, settings.traces[name])
            report.trace(settings.traces[name], windows=train_trace.WINDOWS)
    return 0


def train(task: Task, settings: Settings, report: Report) -> int:
    """Train one model in the chosen mode; return the signal that ended it, or 0."""
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
    folder, every = settings.checkpoints.get(task.name), settings.checkpoint_every
    saving = Saving(folder, every=every, parts=mode.parts, steps=steps)
    first, end = (each * settings.accumulate for each in (min(saving.start, steps), steps))
    with saving.signals():
        for done, record in enumerate(mode.steps(itertools.islice(stream, first, end)), saving.start + 1):
            report.step(record)
            if saving.must_stop(done):
                return saving.stopped
    report.finish(task.quality(mode.model))
    return 0


def _report(settings: Settings) -> Report:
    if dist.get_rank() > 0:
        return Report()
    return JsonLines() if settings.json else Tables()
