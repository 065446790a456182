"""The object that `study` passes to a training function; it times every step and evaluates the model."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name

import torch
import torch.distributed as dist

from pyengine.cli import terminal
from pyengine.cli.gradient_measures import measure_noise_scale
from pyengine.cli.target import Enough
from pyengine.engine.sync import Sync
from pyengine.step.step_record import StepRecord
from pyengine.window.noise_scale import NoiseEstimate

Quality = Callable[[], float | torch.Tensor | None]


@dataclass(frozen=True)
class Run:
    """The settings of one training run."""

    target: str  # the training function, "module:function"
    workers: int
    global_batch: int
    micro_batch: int
    accumulate: int
    steps: int
    dataset_size: int
    seed: int
    threads: int  # torch's threads in each worker.
    evaluate_every: int  # Steps between two evaluations.
    stall_timeout_s: float  # A run is ended after this time without a step; workers may take longer to start.
    run_timeout_s: float  # Time limit of the whole run.
    beats: str  # File to which rank 0 appends a line after each step.


@dataclass
class Trace:
    """The measurements of one worker."""

    # For each step, the time since the end of the previous step, without evaluations.
    seconds: list[float] = field(default_factory=list)
    # For each step, the part of `seconds` in which the worker only waited for or computed the reduction.
    sync_s: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    accuracy: list[tuple[int, float]] = field(default_factory=list)  # (steps taken, accuracy).
    bytes_on_wire: int = 0  # Bytes sent in the last step.
    cpu_s: float = 0.0  # CPU time of all threads during the steps.
    peak_rss_bytes: int = 0  # Peak memory of the process.
    noise_scale: float | None = None  # Last estimate, in the unit of `Run.global_batch`.
    noise_spread: float | None = None


class StudyProbe:
    """Times the steps of a training function, and evaluates the model.

    Args:
        run: the settings of the run.

    Attributes:
        workers, global_batch, micro_batch, accumulate, steps, dataset_size, seed: settings of this run, which
            the function has to follow; `global_batch` = `workers` × `accumulate` × `micro_batch`.
        trace: the measurements so far.
    """

    def __init__(self, run: Run) -> None:
        self.workers, self.steps, self.seed = run.workers, run.steps, run.seed
        self.global_batch, self.micro_batch = run.global_batch, run.micro_batch
        self.accumulate, self.dataset_size = run.accumulate, run.dataset_size
        self.trace = Trace()
        self._every, self._beats = run.evaluate_every, Path(run.beats)
        self._quality: Quality | None = None
        self._is_watching = False
        self._estimate: NoiseEstimate | None = None
        self._count = 0.0
        self._beat(done=0)

    def watch(self, sync: Sync | None, *, quality: Quality | None = None, noise_scale: bool = True) -> None:
        """Time every step from now on, and end the function after the last step; call this method once.

        Args:
            sync: the engine; None if the loop calls `on_step` itself.
            quality: function that returns the accuracy on test data; larger is better. It is called on every
                rank under no_grad, between the timed steps. Only the value of rank 0 counts, and other ranks
                may return None.
            noise_scale: whether to measure `pe.NoiseScale` if there are at least two workers and the engine
                supports it. The timed steps then include its cost, and windows of `sync.capture` run without
                a graph.

        Raises:
            RuntimeError: the method has already been called.

        Example:
            >>> study.watch(sync, quality=lambda: accuracy(model, test_data))  # doctest: +SKIP
        """
        if self._is_watching:
            raise RuntimeError(
                "study.watch was called twice, but it times one engine: call it only for the engine to time"
            )
        self._is_watching, self._quality = True, quality
        # With one worker, the noise scale would need a hook per parameter, which would slow down the baseline
        # for speed-ups.
        if sync is not None and noise_scale and self.workers > 1:
            measure_noise_scale(sync, parts=self.workers)
        self._evaluate()
        self._start_clock()
        if sync is not None:
            sync.on_step(self.on_step)

    def on_step(self, record: StepRecord) -> None:
        """Record a step that has just ended; `watch` registers this method with the engine."""
        now, cpu, trace = time.perf_counter(), time.process_time(), self.trace
        if not self._is_watching:
            raise RuntimeError("study.on_step was called before study.watch, which starts the clock")
        trace.seconds.append(now - self._start)
        trace.cpu_s += cpu - self._cpu_start
        trace.sync_s.append(record.exposed_sync_s)
        trace.losses.append(record.loss)
        trace.bytes_on_wire = record.bytes_on_wire
        self._estimate = record.noise_scale or self._estimate
        self._count += record.count
        done = len(trace.seconds)
        self._beat(done=done)
        if done % self._every == 0 or done == self.steps:
            self._evaluate()
        if done == self.steps:
            trace.peak_rss_bytes = _peak_rss_bytes()
            self._conclude_noise_scale()
            raise Enough
        self._start_clock()

    def _evaluate(self) -> None:
        if self._quality is None:
            return
        with torch.no_grad():
            accuracy = self._quality()
        if dist.get_rank() == 0:
            if accuracy is None:
                raise RuntimeError("quality returned None on rank 0: return the accuracy there")
            self.trace.accuracy.append((len(self.trace.seconds), float(accuracy)))
            self._beat(done=len(self.trace.seconds), accuracy=float(accuracy))
        dist.barrier()  # the next step must not include a slow evaluation on one rank

    def _conclude_noise_scale(self) -> None:
        """Record the last noise scale estimate in samples; `count` may be in another unit, such as tokens."""
        found, trace = self._estimate, self.trace
        if found is not None and found.scale is not None:
            samples = self.global_batch * self.steps / self._count
            trace.noise_scale = found.scale * samples
            trace.noise_spread = None if found.spread is None else found.spread * samples

    def _start_clock(self) -> None:
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def _beat(self, **values: float) -> None:
        """Append a line for the supervising process; takes about 10 microseconds."""
        if dist.get_rank() == 0:
            with self._beats.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")


def work(run: Run) -> Trace:
    """Run the training function on this rank; raise if the function returns before its last step."""
    terminal.prepare_output()
    torch.set_num_threads(run.threads)
    probe = StudyProbe(run)
    with suppress(Enough):
        resolve_name(run.target)(probe)
    if len(probe.trace.seconds) < run.steps:
        raise RuntimeError(
            f"{run.target} returned after {len(probe.trace.seconds)} of {run.steps} steps: call "
            "study.watch(sync, quality=...) before the loop, and train until study ends the function"
        )
    return probe.trace


def _peak_rss_bytes() -> int:
    # On Linux, `ru_maxrss` includes the process from which this process was forked; `VmHWM` does not.
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
