"""Results on disk: one JSON object a line, appended when a run ends,
so that nothing measured is ever lost.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pyengine.cli.arguments import Conflict
from pyengine.cli.study import line as study_line
from pyengine.cli.study.grid import Cell
from pyengine.cli.terminal import read_json

Key = tuple[int, int, int]
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Record:
    """One run, done or not; `supervise.Outcome` and `probe.Trace` say what the fields are.

    Attributes:
        status: "done", "failed", "stalled" or "timed out".
        seconds: of each step, on rank 0.
        sync_s: of each step, mean over workers.
        cpu_share: processor seconds over seconds, by worker: 1 is one core, all the time.
        peak_rss_bytes: by worker.
    """

    workers: int
    batch: int
    repeat: int
    status: str
    reason: str
    steps: int
    global_batch: int
    micro_batch: int
    accumulate: int
    wall_s: float
    busy: float
    seconds: list[float]
    sync_s: list[float]
    losses: list[float | None]
    accuracy: list[tuple[int, float | None]]
    cpu_share: list[float]
    peak_rss_bytes: list[int]
    bytes_on_wire: int

    @property
    def key(self) -> Key:
        """What identifies the run in its folder."""
        return self.workers, self.batch, self.repeat

    @property
    def cell(self) -> Cell:
        """Where it stands in the grid."""
        return Cell(self.workers, self.batch)

    @property
    def is_done(self) -> bool:
        """Whether it was measured to its end."""
        return self.status == "done"


class Store:
    """The file `runs.jsonl` of a folder: a first line that says what all runs share, then one line a run.

    A last line that was torn by a crash is dropped, and cut off before anything is appended. A run that was
    tried again counts as it was the last time.

    Args:
        folder: made if it is not there.
        shared: what all runs of the folder have to have in common, settings and machine; JSON values.

    Raises:
        Conflict: the folder cannot be written or holds a study of something else, another study is writing to
            it, or a line in the middle cannot be read.
    """

    def __init__(self, folder: Path, shared: dict[str, Any]) -> None:
        self.path = folder / "runs.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab+", buffering=0)
        except OSError as error:
            raise Conflict(
                f"argument --out: cannot write {error.filename or self.path} ({error.strerror}): name a "
                "folder, in one that is yours"
            ) from None
        self._lock()
        self.records: dict[Key, Record] = {}
        lines = self._read()
        if not lines:
            self._append({"event": "study", **shared})
            return
        self._check(self._understood(1, lines[0], study_line.parse), shared)
        for number, line in enumerate(lines[1:], start=2):
            record = self._understood(number, line, _record)
            self.records[record.key] = record

    def add(self, record: Record) -> None:
        """Append a run, all the way to the disk's cache.

        Raises:
            OSError: the disk is full, say; the runs before are as they were.
        """
        self._append({"event": "run", **asdict(record)})
        self.records[record.key] = record

    def close(self) -> None:
        """Let others write."""
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise Conflict(
                f"argument --out: got {self.path.parent}, and another study is writing there: wait for it, "
                "or use another folder"
            ) from None

    def _read(self) -> list[bytes]:
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            self._file.truncate(len(whole))
        return whole.split(b"\n")[:-1]

    def _understood(self, number: int, line: bytes, read: Callable[[bytes], _Read]) -> _Read:
        try:
            return read(line)
        except ValueError as error:
            remedy = "remove the line, and its run will be made again" if number > 1 else "use another folder"
            raise Conflict(
                f"argument --out: got {self.path.parent}, and line {number} of its {self.path.name} cannot "
                f"be read ({error}): {remedy}"
            ) from None

    def _check(self, first: dict[str, Any], shared: dict[str, Any]) -> None:
        wanted = read_json(json.dumps(shared))
        for name in wanted:
            if first.get(name) != wanted[name]:
                raise Conflict(
                    f"argument --out: got {self.path.parent}, which holds a study with "
                    f"{name.replace('_', ' ')} {_text(first.get(name))}, and this one has "
                    f"{_text(wanted[name])}: use another folder"
                )

    def _append(self, line: dict[str, Any]) -> None:
        """Append a line; one that does not fit on the disk leaves no part behind."""
        end, rest = self.path.stat().st_size, memoryview(json.dumps(line).encode() + b"\n")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(end)
            raise OSError(error.errno, error.strerror, str(self.path)) from None


def _record(text: bytes) -> Record:
    line = study_line.parse(text)
    study_line.check_run(line)
    fields = {name: value for name, value in line.items() if name != "event"}
    fields["accuracy"] = [(step, value) for step, value in line["accuracy"]]
    return Record(**fields)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return str(value)
