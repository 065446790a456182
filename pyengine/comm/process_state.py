"""The state of a rank's process, as seen by other processes on the same machine."""

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
    """The identity of one process."""

    pid: int
    host: str  # Name of the machine.
    # Identifies the boot of the machine and the container in which `pid` is valid; unique to this process if
    # /proc does not have this information.
    space: str
    # The start time in kernel ticks, which distinguishes this process from a later process with the same pid;
    # empty if the start time is not known.
    started: str

    @classmethod
    def own(cls) -> ProcessId:
        pid = os.getpid()
        try:
            space, started = _space(), _stat(pid)[1] if sys.platform == "linux" else ""
        except OSError:  # /proc is missing, or contains only processes (`subset=pid`)
            space, started = uuid.uuid4().hex, ""
        return cls(pid, socket.gethostname(), space, started)

    def state(self, here: ProcessId) -> State:
        """Return the state of this process, as seen by the process `here`.

        The state is "unknown" if `here` is on another machine, or if the state cannot be read.
        """
        if self.space != here.space:
            return "unknown"
        if sys.platform != "linux":
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return "dead"
            except OSError:
                pass
            return "running"
        try:
            letter, started = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return "dead"
        except OSError:  # this process has run out of file descriptors or memory
            return "unknown"
        return _STATES.get(letter, "running") if started == self.started else "dead"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def own_network() -> str:
    """Return the network namespace of this process, or an empty string if it is not known."""
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
    """Return the state letter and the start time of a process; raise OSError if they cannot be read."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()  # the process name, in parentheses, may contain anything
    return fields[0], fields[19]
