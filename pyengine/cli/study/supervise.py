"""One run in processes of its own, under supervision: a crash,
a hang or an out-of-memory kill ends only the run.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from pyengine.cli import terminal
from pyengine.cli.study.grid import Cell
from pyengine.cli.study.probe import Run, Trace, work
from pyengine.comm.launching import launch, signals_blocked

_LOOK_S = 0.25  # between two looks at a run
_BUSY_S = 0.3  # for which the machine is watched before a run
_START_S = 120.0  # in which workers may import torch and meet, however short the limit between two steps is

# Hears (steps done, last accuracy or None) of a run under way.
Watch = Callable[[int, float | None], None]


@dataclass(frozen=True)
class Limits:
    """When a run is ended from outside.

    Attributes:
        stall_s: seconds without a step, from when the workers have met. They have two minutes for that, or
            these seconds if they are more.
        run_s: seconds in all.
    """

    stall_s: float
    run_s: float


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: "done", "failed", "stalled" or "timed out".
        reason: why, if not done.
        steps: optimizer steps taken.
        traces: by rank; empty if not done.
        wall_s: seconds from the start of the processes to their end.
        busy: share of the machine's processors that others used just before, 0 to 1.
    """

    status: str
    reason: str
    steps: int
    traces: list[Trace]
    wall_s: float
    busy: float


def log_path(cell: Cell, repeat: int) -> Path:
    """Return where a run's log lies in the study's folder."""
    return Path("logs", f"{cell.workers}-workers-batch-{cell.batch}-repeat-{repeat + 1}.txt")


def execute(run: Run, limits: Limits, log: Path, watch: Watch) -> Outcome:
    """Run on new local workers, whatever happens to them.

    Args:
        run: its `beats` is replaced.
        log: file for what the workers print and raise.
        watch: called after steps, a few times a second.
    """
    busy = psutil.cpu_percent(_BUSY_S) / 100
    with tempfile.TemporaryDirectory(prefix="pyengine-study-") as folder:
        beats, result = Beats(Path(folder) / "beats"), Path(folder) / "result"
        run = replace(run, beats=str(beats.path))
        child = mp.get_context("spawn").Process(target=_child, args=(run, str(result), str(log), os.getpid()))
        begin = time.perf_counter()
        try:
            with signals_blocked():  # the child does not unblock them: `_end` ends it
                child.start()
            status, reason = _supervise(child, beats, limits, watch)
        finally:
            _end(child)
        wall_s = time.perf_counter() - begin
        beats.read()
        traces: list[Trace] = []
        if status == "done":
            status, reason, traces = _answer(result, child.exitcode)
    return Outcome(status, reason, beats.done, traces, wall_s, busy)


def _answer(result: Path, exit_code: int | None) -> tuple[str, str, list[Trace]]:
    """Return status, reason and traces of a run that has ended by itself."""
    if not result.exists():
        return "failed", f"its launcher ended with exit code {exit_code} and no result", []
    answer = pickle.loads(result.read_bytes())  # noqa: S301 - SECURITY.md: a run of this process
    return ("failed", answer, []) if isinstance(answer, str) else ("done", "", answer)


class Beats:
    """The file to which a run appends a line a step, read as it grows.

    Attributes:
        done: steps taken.
        accuracy: the last one taken, or None.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done, self.accuracy = 0, None
        self._offset = 0

    def read(self) -> bool:
        """Read on; return whether there was anything new."""
        if not self.path.exists():
            return False
        with self.path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # a line may be half written
        for line in map(json.loads, whole.splitlines()):
            self.done, self.accuracy = line["done"], line.get("accuracy", self.accuracy)
        self._offset += len(whole)
        return bool(whole)


def _supervise(child: mp.process.BaseProcess, beats: Beats, limits: Limits, watch: Watch) -> tuple[str, str]:
    """Wait for a run's end; return ("done", "") if it ended by itself."""
    begin = time.monotonic()
    moved = None
    start_s = max(limits.stall_s, _START_S)
    while child.is_alive():
        child.join(_LOOK_S)
        now = time.monotonic()
        if beats.read():
            moved = now
            watch(beats.done, beats.accuracy)
        if moved is None and now - begin > start_s:
            reason = f"its workers had not all started after {start_s:g} s"
            return "stalled", f"{reason}; a larger --stall-timeout gives them more"
        if moved is not None and now - moved > limits.stall_s:
            reason = f"no sign of life for {limits.stall_s:g} s after step {beats.done} (--stall-timeout)"
            return "stalled", reason
        if now - begin > limits.run_s:
            return "timed out", f"not done after {limits.run_s:g} s, at step {beats.done} (--run-timeout)"
    return "done", ""


def _end(child: mp.process.BaseProcess) -> None:
    """End every process of a run, also those that it left behind."""
    if child.pid is None:
        return
    try:
        os.killpg(child.pid, signal.SIGKILL)  # the child leads a session of its own
    except (ProcessLookupError, PermissionError):
        child.kill()  # it had not got so far, or nobody is left
    child.join()


def _child(run: Run, result: str, log: str, parent: int) -> None:
    """Launch the workers, and leave their traces, or a sentence on what went wrong, in a file."""
    os.setsid()
    tempfile.tempdir = str(
        Path(result).parent
    )  # what is ended by force leaves its files where they are taken away
    with Path(log).open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        answer: list[Trace] | str = launch(work, workers=run.workers, args=(run,))
    except RuntimeError as error:
        answer = _in_short(str(error))
        terminal.show_everything()
        print(error, flush=True)
    part = Path(f"{result}.part")
    part.write_bytes(pickle.dumps(answer))
    part.replace(result)


def _end_with(parent: int) -> None:
    """End the whole session when the study itself has gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _in_short(message: str) -> str:
    """Return first and last line of an error with its traceback."""
    lines = [line for line in message.splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1].strip()}"
