"""`train`: train small models on this machine, and compare them with plain DDP."""

from __future__ import annotations

import fcntl
import itertools
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from pyengine.cli import terminal
from pyengine.cli.arguments import Conflict, writing
from pyengine.cli.files import regular, written
from pyengine.cli.gradient_measures import draw
from pyengine.cli.tasks.base import Task
from pyengine.cli.tasks.cnn import DigitsTask
from pyengine.cli.tasks.gpt import TextTask
from pyengine.cli.trackers import Trackers
from pyengine.cli.train import modes as train_modes
from pyengine.cli.train.arguments import TrainSettings, check_resumed
from pyengine.cli.train.compare import compare
from pyengine.cli.train.report import TrainReport
from pyengine.cli.train.saves import Saves
from pyengine.comm.launching import launch
from pyengine.step.step_record import StepRecord
from pyengine.telemetry import chrome_trace

_TASKS: dict[str, Callable[[], Task]] = {"gpt": TextTask, "cnn": DigitsTask}
TRACED_WINDOWS = 3
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WARM_UP_WINDOWS = 2  # the first window determines the bucket order, and the second is the first to use it


def run(settings: TrainSettings) -> int:
    with ExitStack() as locks:
        for model, folder in settings.checkpoints.items():
            locks.enter_context(locked(folder))
            check_resumed(settings, model, folder)
        try:
            stopped = max(launch(work, workers=settings.workers, args=(settings,)))
        except RuntimeError as error:
            if (code := terminal.exit_code_of_worker(error)) is not None:
                return code
            print(error, file=sys.stderr)
            return 1
    if stopped:  # only a worker of torchrun gets here; otherwise `launch` raises
        raise SystemExit(128 + stopped)
    return 0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a checkpoint folder; raise `Conflict` if another training run has locked it.

    Locks nothing under torchrun, where each worker is a separate command, or on file systems without locks.
    """
    if dist.is_torchelastic_launched():
        yield
        return
    path = folder / ".lock"
    with ExitStack() as stack:
        with writing("--checkpoints", f"write {path}"):
            file = stack.enter_context(open(path, "a", opener=regular))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"argument --checkpoints: another training run is writing to {folder}: wait for it, or name "
                "another folder"
            ) from None
        except OSError:
            pass
        yield


def work(settings: TrainSettings) -> int:
    """Train and compare every model on this rank; return the signal that ended training, or 0."""
    terminal.prepare_output()
    with terminal.ends_with_output():
        for name in settings.models:
            task = _TASKS[name]()
            report = TrainReport(as_json=settings.json, is_silent=dist.get_rank() > 0)
            if stopped := train(task, settings, report):
                return stopped
            report.compare(*compare(task, settings))
            if name in settings.traces:
                write_trace(task, settings, settings.traces[name])
                report.trace(settings.traces[name], windows=TRACED_WINDOWS)
    return 0


def train(task: Task, settings: TrainSettings, report: TrainReport) -> int:
    """Train one model in the chosen mode; return the signal that ended training, or 0."""
    mode = train_modes.make(settings.mode, task, settings)
    steps, trace = settings.steps[task.name], settings.traces.get(task.name)
    if trace:
        mode.measure()  # before loading a checkpoint, which contains the state of the measurements
    records: list[StepRecord] = []
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
    stream = train_modes.batches(task, settings, dist.get_rank(), seed=settings.seed)
    batches = itertools.islice(stream, saving.start * settings.accumulate, steps * settings.accumulate)
    # After the last step no batches are left, and `sync.windows` would yield an empty window.
    windows = mode.steps(batches) if saving.start < steps else ()
    trackers = settings.trackers if dist.get_rank() == 0 else Trackers()
    with saving.signals(), trackers.run(task.name, group=settings.mode, config=about) as tracked:
        for done, record in enumerate(windows, saving.start + 1):
            report.step(record)
            tracked(record)
            if trace:
                records.append(record)
            if saving.must_stop(done):
                return saving.stopped
        quality = task.quality(mode.model)
        tracked.log(quality, axis="pyengine/step", at=steps)
    report.finish(quality)
    if trace:
        plot(task, records, trace, report)
    return 0


def plot(task: Task, records: Sequence[StepRecord], trace: Path, report: TrainReport) -> None:
    """On rank 0, save a plot of a run's gradient norms and noise scale next to its trace file."""
    measured = [record for record in records if record.grad_norms is not None]
    if dist.get_rank() > 0 or not measured:
        return
    path = None
    if find_spec("matplotlib") is not None:
        path = trace.with_name(f"{trace.name.partition('.')[0]}-norms.png")
        with written(path) as part:
            draw(measured, part, unit=task.unit)
    report.norms(path, next((record for record in reversed(measured) if record.noise_scale), None))


def write_trace(task: Task, settings: TrainSettings, path: Path) -> None:
    """Write a Chrome trace of rank 0 over a few windows of a new model; every rank must call this function.

    The training itself is not traced, because profiling would slow it down.
    """
    mode = train_modes.make(settings.mode, task, settings, counted=False)
    batches = train_modes.batches(task, settings, dist.get_rank(), seed=settings.seed)
    list(mode.steps(itertools.islice(batches, _WARM_UP_WINDOWS * settings.accumulate)))
    with ExitStack() as stack:
        if dist.get_rank() == 0:  # the profiler's own temporary file would have a guessable name
            path = stack.enter_context(written(path))
        stack.enter_context(chrome_trace(path))
        list(mode.steps(itertools.islice(batches, TRACED_WINDOWS * settings.accumulate)))


class Saving:
    """The checkpoints of one model's training; every rank calls the same methods in the same order.

    Args:
        folder: the folder of the checkpoints; None saves nothing and handles no signals.
        every: number of steps between two checkpoints.
        parts: the objects to save and load, by name; each has `state_dict` and `load_state_dict`.
        steps: number of steps of the whole training run.
    """

    def __init__(self, folder: Path | None, *, every: int, parts: Mapping[str, Any], steps: int) -> None:
        self.start = 0  # The step of the newest checkpoint, where training continues.
        self.stopped = 0  # The signal that ended the training.
        self._every, self._parts, self._steps = every, parts, steps
        self._saves = None if folder is None else Saves(folder)
        self._signal = 0
        found = self._saves.load() if self._saves else None
        if found is not None:
            self.start, state = found
            for name, part in parts.items():
                part.load_state_dict(state[name])

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Defer signals in the body to `must_stop`; re-raise a signal that arrives after the last step."""
        if self._saves is None:
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}

        def note(number: int, frame: FrameType | None) -> None:
            self._signal = self._signal or number

        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._signal and not self.stopped:
                signal.raise_signal(self._signal)

    def must_stop(self, step: int) -> bool:
        """Save a checkpoint if one is due after `step` steps; return whether any rank received a signal."""
        if self._saves is None:
            return False
        received = torch.tensor(self._signal)
        dist.all_reduce(received, dist.ReduceOp.MAX)  # all ranks stop after the same step
        self.stopped = int(received)
        if self.stopped or step % self._every == 0 or step == self._steps:
            self._saves.save(step, {name: part.state_dict() for name, part in self._parts.items()})
        return bool(self.stopped)
