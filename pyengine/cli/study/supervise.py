"""Run training in supervised, separate processes: a crash, a hang or an OOM kill ends only one run."""

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
from pyengine.cli.files import fresh
from pyengine.cli.study.grid import Cell
from pyengine.cli.study.probe import Run, Trace, work
from pyengine.comm.launching import launch, signals_blocked

_POLL_S = 0.25  # Seconds between two checks of a run.
_BUSY_S = 0.3  # Time for which the load of the machine is measured before a run.
_START_S = 120.0  # Minimum time limit for importing torch and joining the group, whatever the step limit.

# A progress callback, called with the number of steps and the last accuracy or None.
Watch = Callable[[int, float | None], None]


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended."""

    status: str  # "done", "failed", "stalled" or "timed out".
    reason: str  # Why the run is not done; empty if it is done.
    steps: int  # Optimizer steps so far.
    traces: list[Trace]  # Traces by rank; empty if the run is not done.
    wall_s: float  # Seconds from the start of the processes to their end.
    busy: float  # Share of the CPU that other processes used just before the run, 0 to 1.


def log_path(cell: Cell, repeat: int) -> Path:
    """Return the path of a run's log in the study's folder."""
    return Path("logs", f"{cell.workers}-workers-batch-{cell.batch}-repeat-{repeat + 1}.txt")


def execute(run: Run, log: Path, watch: Watch) -> RunOutcome:
    """Perform a run on local workers, with their output in `log`; return how the run ended."""
    busy = psutil.cpu_percent(_BUSY_S) / 100
    with tempfile.TemporaryDirectory(prefix="pyengine-study-") as folder:
        beats, result = Beats(Path(folder) / "beats"), Path(folder) / "result"
        run = replace(run, beats=str(beats.path))
        child = mp.get_context("spawn").Process(target=_child, args=(run, str(result), str(log), os.getpid()))
        begin = time.perf_counter()
        try:
            with signals_blocked():  # the child keeps signals blocked; `_end` kills the child
                child.start()
            status, reason = _supervise(child, beats, run, watch)
        finally:
            _end(child)
        wall_s = time.perf_counter() - begin
        beats.read()
        traces: list[Trace] = []
        if status == "done" and result.exists():
            status, reason, traces = pickle.loads(result.read_bytes())  # noqa: S301 - see SECURITY.md
        elif status == "done":
            status, reason = "failed", f"its launcher ended with exit code {child.exitcode} and no result"
    return RunOutcome(status, reason, beats.done, traces, wall_s, busy)


class Beats:
    """The file to which a run appends a line after each step: steps so far, and the last accuracy."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done, self.accuracy = 0, None
        self._offset = 0

    def read(self) -> bool:
        """Read the new lines; return whether there were any."""
        if not self.path.exists():
            return False
        with self.path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # the last line may be incomplete
        for line in map(json.loads, whole.splitlines()):
            self.done, self.accuracy = line["done"], line.get("accuracy", self.accuracy)
        self._offset += len(whole)
        return bool(whole)


def _supervise(child: mp.process.BaseProcess, beats: Beats, run: Run, watch: Watch) -> tuple[str, str]:
    """Wait until a run ends; return ("done", "") if no limit was exceeded."""
    stall_s, run_s = run.stall_timeout_s, run.run_timeout_s
    begin = time.monotonic()
    moved = None
    start_s = max(stall_s, _START_S)
    while child.is_alive():
        child.join(_POLL_S)
        now = time.monotonic()
        if beats.read():
            moved = now
            watch(beats.done, beats.accuracy)
        if moved is None and now - begin > start_s:
            reason = f"its workers had not all started after {start_s:g} s"
            return "stalled", f"{reason}; a larger --stall-timeout gives them more time"
        if moved is not None and now - moved > stall_s:
            return "stalled", f"no progress for {stall_s:g} s after step {beats.done} (--stall-timeout)"
        if now - begin > run_s:
            return "timed out", f"not done after {run_s:g} s, at step {beats.done} (--run-timeout)"
    return "done", ""


def _end(child: mp.process.BaseProcess) -> None:
    """Kill every process of a run, including orphans."""
    if child.pid is None:
        return
    try:
        os.killpg(child.pid, signal.SIGKILL)  # the child leads a separate session
    except (ProcessLookupError, PermissionError):
        child.kill()  # the child has no session yet, or has ended
    child.join()


def _child(run: Run, result: str, log: str, parent: int) -> None:
    """Launch the workers, and write the status, the reason and the traces to the file `result`."""
    os.setsid()
    # Temporary files that killed processes leave behind go to a folder that the study deletes.
    tempfile.tempdir = str(Path(result).parent)
    with fresh(Path(log)) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        ended: tuple[str, str, list[Trace]] = ("done", "", launch(work, workers=run.workers, args=(run,)))
    except RuntimeError as error:
        ended = "failed", _shorten(str(error)), []
        terminal.prepare_output()
        print(error, flush=True)
    part = Path(f"{result}.part")
    part.write_bytes(pickle.dumps(ended))
    part.replace(result)


def _end_with(parent: int) -> None:
    """Kill the whole session when the study's process has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _shorten(message: str) -> str:
    """Shorten an error message that contains a traceback.

    Only its first line and the line that names the exception are kept.
    """
    lines = [line for line in message.splitlines() if line.strip()]
    if len(lines) == 1:
        return lines[0]
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    behind = lines[frames[-1] + 1 :] if frames else []
    exception = next((line for line in behind if not line.startswith(" ")), lines[-1])
    return f"{lines[0]}: {exception.strip()}"
