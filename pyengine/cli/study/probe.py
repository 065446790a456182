"""What a training function under `study` is given: `watch` times every optimizer step and takes the
accuracy.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from pyengine.cli import terminal
from pyengine.cli.target import Enough, load
from pyengine.engine.sync import Sync
from pyengine.step.step_record import StepRecord

Quality = Callable[[], float | torch.Tensor | None]


@dataclass(frozen=True)
class Run:
    """One run, as its workers are told of it.

    Attributes:
        target: the training function, "module:function".
        threads: torch's threads in each worker.
        evaluate_every: steps from one accuracy to the next.
        beats: file to which rank 0 appends a line a step.
    """

    target: str
    workers: int
    global_batch: int
    micro_batch: int
    accumulate: int
    steps: int
    dataset_size: int
    seed: int
    threads: int
    evaluate_every: int
    beats: str


@dataclass
class Trace:
    """What one worker measured.

    Attributes:
        seconds: of each step, from the end of the one before (evaluations left out) to its own end.
        sync_s: seconds of each step in which this worker only waited for, or worked on, the reduction.
        losses: of each step.
        accuracy: (steps taken, accuracy).
        bytes_on_wire: that the last step sent.
        cpu_s: processor seconds during the steps, all threads.
        peak_rss_bytes: most memory the process ever held.
    """

    seconds: list[float] = field(default_factory=list)
    sync_s: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    accuracy: list[tuple[int, float]] = field(default_factory=list)
    bytes_on_wire: int = 0
    cpu_s: float = 0.0
    peak_rss_bytes: int = 0


class Probe:
    """Times a training function.

    Args:
        run: what the function is to do.

    Attributes:
        workers, global_batch, micro_batch, accumulate, steps, dataset_size, seed: of this run, for the
            function to follow; `global_batch` = `workers` × `accumulate` × `micro_batch`.
        trace: what has been measured.
    """

    def __init__(self, run: Run) -> None:
        self.workers, self.steps = run.workers, run.steps
        self.global_batch, self.micro_batch, self.accumulate = (
            run.global_batch,
            run.micro_batch,
            run.accumulate,
        )
        self.dataset_size, self.seed = run.dataset_size, run.seed
        self.trace = Trace()
        self._every, self._beats = run.evaluate_every, Path(run.beats)
        self._quality: Quality | None = None
        self._is_watching = False
        self._beat(done=0)

    def watch(self, sync: Sync | None, *, quality: Quality | None = None) -> None:
        """Time every step of the engine from here on, and end training after the last one; call it once.

        Args:
            sync: the engine; None if the loop calls `on_step` itself.
            quality: returns the accuracy on data that was not trained on, larger is better. Called on every
                rank, without gradients, outside of the timed steps; rank 0's number counts, other ranks may
                return None.

        Raises:
            RuntimeError: at a second call.

        Example:
            >>> study.watch(sync, quality=lambda: accuracy(model, test_data))  # doctest: +SKIP
        """
        if self._is_watching:
            raise RuntimeError(
                "study.watch was called twice: it follows one engine; watch the one to be timed"
            )
        self._is_watching, self._quality = True, quality
        self._evaluate()
        self._go_on()
        if sync is not None:
            sync.on_step(self.on_step)

    def on_step(self, record: StepRecord) -> None:
        """Note a step that has just ended; `watch` has the engine call it."""
        now, cpu, trace = time.perf_counter(), time.process_time(), self.trace
        if not self._is_watching:
            raise RuntimeError("study.on_step was called before study.watch, which starts the clock")
        trace.seconds.append(now - self._start)
        trace.cpu_s += cpu - self._cpu_start
        trace.sync_s.append(record.exposed_sync_s)
        trace.losses.append(record.loss)
        trace.bytes_on_wire = record.bytes_on_wire
        done = len(trace.seconds)
        self._beat(done=done)
        if done % self._every == 0 or done == self.steps:
            self._evaluate()
        if done == self.steps:
            trace.peak_rss_bytes = _peak_rss_bytes()
            raise Enough
        self._go_on()

    def _evaluate(self) -> None:
        if self._quality is None:
            return
        with torch.no_grad():
            accuracy = self._quality()
        if dist.get_rank() == 0:
            if accuracy is None:
                raise RuntimeError("quality returned None on rank 0: it has to return the accuracy there")
            self.trace.accuracy.append((len(self.trace.seconds), float(accuracy)))
            self._beat(done=len(self.trace.seconds), accuracy=float(accuracy))
        dist.barrier()  # who evaluates longer must not make the next step look longer

    def _go_on(self) -> None:
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def _beat(self, **values: float) -> None:
        """Tell whoever supervises the run that it lives; about 10 microseconds."""
        if dist.get_rank() == 0:
            with self._beats.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")


def work(run: Run) -> Trace:
    """Run the training function on this rank.

    Raises:
        RuntimeError: it ended before the study ended it.
    """
    terminal.show_everything()
    torch.set_num_threads(run.threads)
    probe = Probe(run)
    with suppress(Enough):
        load(run.target)(probe)
    if len(probe.trace.seconds) < run.steps:
        raise RuntimeError(
            f"{run.target} ended after {len(probe.trace.seconds)} of {run.steps} steps: it has to call "
            "study.watch(sync, quality=...) before its loop, and to go on until study ends it"
        )
    return probe.trace


def _peak_rss_bytes() -> int:
    # On Linux ru_maxrss also remembers the process this one was forked from; VmHWM is of the program alone.
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
