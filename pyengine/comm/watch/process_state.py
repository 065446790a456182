"""Processes of the ranks, as others on the same machine see them."""

from __future__ import annotations

import os
import socket
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["running", "stopped", "dead", "unknown"]

_STATES: dict[str, State] = {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead", "x": "dead"}


@dataclass(frozen=True)
class ProcessId:
    """One process of some machine.

    Attributes:
        pid: its number.
        host: the machine's name.
        space: where numbers of processes mean the same: a machine since it was started, or a container; of
            this process alone where /proc does not show it.
        started: when, in the kernel's ticks, so that another process of the same number is told from it;
            empty where that is not known.
    """

    pid: int
    host: str
    space: str
    started: str

    @classmethod
    def own(cls) -> ProcessId:
        """Return that of this process."""
        pid = os.getpid()
        try:
            space, started = _space(), _stat(pid)[1] if sys.platform == "linux" else ""
        except OSError:  # /proc is missing, or shows processes only (`subset=pid`)
            space, started = uuid.uuid4().hex, ""
        return cls(pid, socket.gethostname(), space, started)

    def state(self, here: ProcessId) -> State:
        """Return how this process is, as one on the machine of `here` sees it; "unknown" from elsewhere, and
        where that cannot be read now.
        """
        if self.space != here.space:
            return "unknown"
        if sys.platform != "linux":
            return "running" if _answers(self.pid) else "dead"
        try:
            letter, started = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return "dead"
        except OSError:  # there is no descriptor or memory left to look with
            return "unknown"
        return _STATES.get(letter, "running") if started == self.started else "dead"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def own_network() -> str:
    """Return the space of this process's addresses; empty where that is not known."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def _space() -> str:
    if sys.platform != "linux":
        return f"{uuid.getnode():x}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _stat(pid: int) -> tuple[str, str]:
    """Return the letter of a process's state, and the time of its start.

    Raises:
        FileNotFoundError, ProcessLookupError: there is no such process.
        OSError: it cannot be read.
    """
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()  # its name, in brackets, may hold anything
    return fields[0], fields[19]


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
