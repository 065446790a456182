"""The trap at every phase of a case, and the faults."""

from __future__ import annotations

import gc
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn
from unittest import mock

import torch.distributed as dist
from fault_cases import BEHIND_A_BUCKET, LATE_S, PAUSE_S, STALL_AFTER_S, Case
from ranks import LOOKING, strike

from pyengine.comm import torch_dist
from pyengine.comm.arena import Arena


class Boom(Exception):
    """An exception that the user's code raises and catches."""


class Quit(Exception):
    """An exception that the user's code raises but does not catch."""


@contextmanager
def watched(trap: Trap) -> Iterator[list[dist.Work]]:
    """Report the body's all-reduces, also small ones and those in shared memory, to the trap; yield them."""
    works: list[dist.Work] = []

    def noted(launch: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            works.append(launch(*args, **kwargs))
            trap.launched(works[-1])
            return works[-1]

        return call

    with ExitStack() as patches:
        for owner, name in (
            (dist, "all_reduce"),
            (torch_dist, "SwapWork"),
            (torch_dist.PointToPoint, "all_reduce"),
            (Arena, "reduce"),
        ):
            patches.enter_context(mock.patch.object(owner, name, noted(getattr(owner, name))))
        yield works


def _close(descriptor: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.getpeername()  # raises if not connected, like gloo's listener, which must stay open
            connection.shutdown(socket.SHUT_RDWR)


def hang_up(works: Sequence[dist.Work]) -> None:
    """Close this rank's connections and shared memory, like a program's end; wait for its collectives."""
    for arena in [held for held in gc.get_objects() if isinstance(held, Arena)]:
        arena.close()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                _close(descriptor)
    for work in works:
        with suppress(RuntimeError):
            work.wait()


class Trap:
    """Produces a case's fault once, where and when the case says.

    Attributes:
        turn: "early" or "last": which micro-batch of its window this is.
        number: of this rank's current window, counting windows that it gave up.
        sent: collectives that had been launched in that window when the fault struck; -1 if it has not.
    """

    def __init__(self, case: Case) -> None:
        self._case, self.sent = case, -1
        self._is_set = dist.get_rank() == case.rank
        self._count = 0
        self._latest: dist.Work | None = None
        self.turn, self.number = "", -1

    def next_window(self) -> None:
        self.number += 1
        self._count = 0

    def launched(self, work: dist.Work) -> None:
        self._count += 1
        self._latest = work

    def at(self, phase: str, *, number: int | None = None) -> None:
        number = self.number if number is None else number
        if self._is_set and (phase, number) == (self._case.phase, self._case.window):
            self._is_set = False
            self.sent = self._count
            FAULTS[self._case.fault.partition(",")[0]]()

    def in_turn(self, phase: str) -> None:
        is_first = (self.turn, phase) == ("last", "backward")
        if is_first and self._is_set and self._latest is not None and self._case.phase in BEHIND_A_BUCKET:
            self._latest.wait()  # buckets are sent only after the header
        self.at(f"{self.turn} {phase}")


def _raise(error: type[BaseException]) -> NoReturn:
    raise error("user's code failed")


def _pause(seconds: float = PAUSE_S) -> None:
    """Stop this process for `seconds`, which is less than the group's timeout."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    strike(signal.SIGSTOP)


def _come_late() -> None:
    """Stop for long, after a heartbeat has shown the others that this rank is alive."""
    time.sleep(STALL_AFTER_S / 2)
    _pause(LATE_S)


def _exit_at_once() -> NoReturn:
    with LOOKING:  # see `strike`
        os._exit(4)


# A part after a comma in a case's fault says what the rank does next; see `Run.react`.
FAULTS = {
    "exception": lambda: _raise(Boom),
    "interrupt": lambda: _raise(KeyboardInterrupt),
    "uncaught": lambda: _raise(Quit),
    "sys.exit": lambda: sys.exit(3),
    "os._exit": _exit_at_once,
    "kill": lambda: strike(signal.SIGKILL),
    "stop": lambda: strike(signal.SIGSTOP),
    "pause": _pause,
    "late": _come_late,
}
