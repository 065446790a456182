"""Find processes of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def left(find: Callable[[str], list[str]], what: str, seconds: float = 30.0) -> list[str]:
    """Wait until `living` or `marked` finds no process; return the processes that are left after `seconds`.

    Helper processes, which end when their pipes close, need a moment, and more than 5 s on a busy machine.
    """
    end = time.monotonic() + seconds
    while (found := find(what)) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def marked(mark: str) -> list[str]:
    """Return the command lines of the running processes whose environment contains `mark`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():  # empty if it has ended
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def living(group: str) -> list[str]:
    """Return the command lines of the running processes of a process group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if its_group == group and state != "Z":
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it has just ended
    return found
