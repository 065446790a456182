"""Records of steps as JSON lines."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyengine.step.step_record import StepRecord
from pyengine.telemetry.base import Listener


class JsonLines(Listener):
    """Append one JSON object a step to a file.

    It has the fields of `StepRecord`, and `time`, the seconds since 1970. The file is closed between steps.
    An existing file is continued; a line that a crash has cut off stays on a line of its own. After resuming,
    the last of several lines with the same `step` is the valid one. Inf and nan, which JSON does not have,
    become null.

    Args:
        path: the file, in an existing folder.
        rank: the rank that writes.

    Example:
        >>> sync.on_step(JsonLines("steps.jsonl"))  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str], *, rank: int = 0) -> None:
        super().__init__(rank=rank)
        self._path = Path(path)
        if self.writes and _is_torn(self._path):
            self._append("\n")

    def _write(self, record: StepRecord) -> None:
        fields = {name: _strict(value) for name, value in asdict(record).items()}
        self._append(json.dumps({"time": time.time(), **fields}, allow_nan=False) + "\n")

    def _append(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def _strict(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_torn(path: Path) -> bool:
    """Whether a file's last line has no newline."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
