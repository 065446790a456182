"""Send signals to commands at any moment, and find what the commands leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from processes import left, marked

LIMIT_S = 60
_LOOK_S = 0.002
BOTH = (signal.SIGINT, signal.SIGTERM)
# Every command except `plan` runs long enough to be stopped.
COMMANDS = {
    "train": ("train", "--model", "gpt", "--json", "--steps", "5000"),
    "train, saved": ("train", "--model", "gpt", "--json", "--steps", "5000", "--checkpoints", "saved"),
    "verify": ("verify", "--model", "gpt", "--steps", "50"),
    "study": ("study", "--workers", "1,2", "--batch", "32", "--json"),
    "bench": ("bench", "--rounds", "1000", "--json"),
    "plan": ("plan",),
    "doctor": ("doctor",),
}


@dataclass(frozen=True)
class Stop:
    """How a command ended.

    Attributes:
        code: the exit code; below 0 if the signal itself ended the command.
        said: the lines on stderr.
        left: the command lines of processes that are still running.
    """

    code: int
    said: list[str]
    left: list[str]


def stop(
    arguments: Sequence[str], number: signal.Signals, seconds: float, folder: Path, *, is_group: bool
) -> Stop:
    """Run a command, send it a signal `seconds` after it begins to handle SIGTERM, and wait for its end.

    Args:
        is_group: send the signal to every process of the command, as a terminal does, and not only to the
            first one, as `kill` does.
    """
    command = [sys.executable, "-m", "pyengine", *arguments]
    mark = uuid.uuid4().hex  # every process of the command inherits it, even in another session
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=folder,
        env=os.environ | {"PYENGINE_TEST_MARK": mark},
    )
    end = time.monotonic() + LIMIT_S
    while not _is_caught(process.pid, signal.SIGTERM) and process.poll() is None and time.monotonic() < end:
        time.sleep(_LOOK_S)
    time.sleep(seconds)
    if process.poll() is None:
        (os.killpg if is_group else os.kill)(process.pid, number)
    try:
        _, said = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return Stop(-signal.SIGKILL, ["did not end", *process.communicate()[1].splitlines()], [])
    return Stop(process.returncode, said.splitlines(), left(marked, mark))


def _is_caught(pid: int, number: signal.Signals) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def problem(found: Stop, number: signal.Signals) -> str:
    """Return what is wrong with the end of a command; empty if nothing is."""
    if found.left:
        return f"left {found.left}"
    if found.code in (0, 1) and not found.said:
        return ""  # it had finished before
    word = {signal.SIGINT: "interrupted: ", signal.SIGTERM: "terminated: "}[number]
    is_clean = found.code == 128 + number and len(found.said) == 1 and found.said[0].startswith(word)
    return "" if is_clean else f"{found.code} {found.said}"
