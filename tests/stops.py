"""Commands that get a signal at some moment, and what they leave behind."""

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
# Each but `plan` runs long enough to be stopped.
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
        code: its exit code; below 0 if the signal itself ended it.
        said: its lines on stderr.
        left: command lines of its processes that live.
    """

    code: int
    said: list[str]
    left: list[str]


def stop(
    arguments: Sequence[str], number: signal.Signals, seconds: float, folder: Path, *, is_group: bool
) -> Stop:
    """Run a command, send a signal some seconds after its first line of Python has run, and wait for its end.

    Args:
        is_group: send it to every process of the command, as a terminal does, or to the first one, as `kill`
            does.
    """
    command = [sys.executable, "-m", "pyengine", *arguments]
    mark = uuid.uuid4().hex  # every process of the command has it, in a session of its own too
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
    """Return what is wrong with an end; empty if nothing is."""
    if found.left:
        return f"left {found.left}"
    if found.code in (0, 1) and not found.said:
        return ""  # it had done its work
    word = {signal.SIGINT: "interrupted: ", signal.SIGTERM: "terminated: "}[number]
    is_clean = found.code == 128 + number and len(found.said) == 1 and found.said[0].startswith(word)
    return "" if is_clean else f"{found.code} {found.said}"
