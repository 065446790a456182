"""Who is killed when, and the board on which workers tell where they are.

A run is a chain of jobs of torch.distributed.elastic, and has one order an attempt: either the doomed worker
kills itself on passing a phase ("placed"), or another process kills it after some windows and some
milliseconds, wherever it is then ("moment").
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# In the order of a run. What stands behind "save" is the writing of one file of a checkpoint.
ONCE = ("start", "met", "load", "resumed")
WINDOW = (
    "loader",
    "forward",
    "backward",
    "hook",
    "bucket",
    "collective",
    "clip",
    "step",
    "stepped",
    "scheduler",
    "callback",
)
SAVE = ("save", "opened", "half written", "unsynced", "unnamed", "named", "written", "remove", "saved")
PHASES = (*ONCE, *WINDOW, *SAVE)
MOST_WORKERS = 4
_LOOK_S = 0.0005


@dataclass(frozen=True)
class Order:
    """One kill.

    Attributes:
        rank: of the worker that dies.
        phase: on passing which; empty for a moment.
        passes: the how manyth pass, from 1.
        windows: that the attempt has ended before a moment.
        seconds: from there to the moment.
    """

    rank: int
    phase: str = ""
    passes: int = 1
    windows: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Kill:
    """What became of an order.

    Attributes:
        how: "placed" or "moment".
        phase: behind which mark the worker was when it died.
        rank, world: whose worker.
        window: how many the attempt had ended.
    """

    how: str
    phase: str
    rank: int
    world: int
    window: int


def draw(generator: random.Random, phases: Sequence[str], world: int) -> list[Order]:
    """Return an order for each of `phases`; an empty one is a moment."""
    orders = []
    for phase in phases:
        rank = generator.randrange(world)
        if phase:
            passes = 1 if phase in ONCE else generator.randint(1, 12 if phase == "collective" else 3)
            orders.append(Order(rank, phase, passes))
        else:
            windows = generator.randrange(4)
            longest_s = 0.03 if windows else 0.4  # a window takes some 30 ms, the start of an attempt longer
            orders.append(Order(rank, windows=windows, seconds=longest_s * generator.random()))
    return orders


class Board:
    """Memory that a job's processes share: of every rank its attempt, process, phase, windows and end.

    Args:
        path: of the file that it is; made if it is not there.
    """

    _ATTEMPT, _PID, _PHASE, _WINDOWS, _STRUCK, _FIELDS = range(6)

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.exists():
            path.write_bytes(bytes(8 * MOST_WORKERS * self._FIELDS))
        with path.open("r+b") as file:
            self._cells = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    def __reduce__(self) -> tuple[type[Board], tuple[Path]]:
        return Board, (self._path,)

    def enter(self, rank: int, attempt: int) -> None:
        """An attempt begins on this worker; the number goes last."""
        values = {self._PID: os.getpid(), self._PHASE: 0, self._WINDOWS: 0, self._STRUCK: 0}
        for field, value in values.items():
            self._cells[rank * self._FIELDS + field] = value
        self._cells[rank * self._FIELDS + self._ATTEMPT] = attempt + 1

    def pass_by(self, rank: int, phase: str) -> None:
        """This worker passes a phase."""
        self._cells[rank * self._FIELDS + self._PHASE] = PHASES.index(phase)

    def end_window(self, rank: int) -> None:
        """This worker has ended a window."""
        self._cells[rank * self._FIELDS + self._WINDOWS] += 1

    def strike(self, rank: int) -> None:
        """End this worker."""
        self._cells[rank * self._FIELDS + self._STRUCK] = 1
        os.kill(os.getpid(), signal.SIGKILL)

    def execute(self, orders: Sequence[Order], world: int, log: Path) -> None:
        """Kill or watch one worker an attempt, and write down in which phase it died; ended from outside."""
        for attempt, order in enumerate(orders):
            if not self._wait(order, attempt):
                continue
            kill = Kill(
                "placed" if order.phase else "moment",
                PHASES[self._of(order.rank, self._PHASE)],
                order.rank,
                world,
                self._of(order.rank, self._WINDOWS),
            )
            with log.open("a") as file:
                file.write(json.dumps(asdict(kill)) + "\n")

    def _wait(self, order: Order, attempt: int) -> bool:
        """Wait until an order is carried out; return whether it was, and the attempt did not end before."""
        while not self._is_due(order, attempt):
            if self._is_over(attempt):
                return False
            time.sleep(_LOOK_S)
        pid = self._of(order.rank, self._PID)
        if not order.phase:
            time.sleep(order.seconds)
            if self._is_over(attempt) or not _is_alive(pid):
                return False
            os.kill(pid, signal.SIGKILL)
        while _is_alive(pid):
            time.sleep(_LOOK_S)
        return True

    def _is_due(self, order: Order, attempt: int) -> bool:
        if self._of(order.rank, self._ATTEMPT) != attempt + 1:
            return False
        is_struck = bool(self._of(order.rank, self._STRUCK))
        return is_struck if order.phase else self._of(order.rank, self._WINDOWS) >= order.windows

    def _is_over(self, attempt: int) -> bool:
        return any(self._of(rank, self._ATTEMPT) > attempt + 1 for rank in range(MOST_WORKERS))

    def _of(self, rank: int, field: int) -> int:
        return self._cells[rank * self._FIELDS + field]


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has asked for its exit code yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
