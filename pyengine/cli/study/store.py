"""The file of a study's results: one JSON object per line, appended as soon as a run ends."""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pyengine.cli.arguments import Conflict
from pyengine.cli.files import regular
from pyengine.cli.study.grid import Cell
from pyengine.cli.terminal import read_json

Key = tuple[int, int, int]
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Record:
    """The results of a run. For fields without a comment, see `supervise.RunOutcome` and `probe.Trace`."""

    workers: int
    batch: int
    repeat: int
    status: str  # "done", "failed", "stalled" or "timed out"
    reason: str
    steps: int
    global_batch: int
    micro_batch: int
    accumulate: int
    wall_s: float
    busy: float
    seconds: list[float]  # Seconds of each step, on rank 0.
    sync_s: list[float]  # Seconds of each step spent in the reduction, mean over workers.
    losses: list[float | None]
    accuracy: list[tuple[int, float | None]]
    cpu_share: list[float]  # Busy cores, by worker.
    peak_rss_bytes: list[int]  # Peak memory, by worker.
    bytes_on_wire: int
    noise_scale: float | None = None  # noise scale on rank 0
    noise_spread: float | None = None

    @property
    def key(self) -> Key:
        return self.workers, self.batch, self.repeat

    @property
    def cell(self) -> Cell:
        return Cell(self.workers, self.batch)

    @property
    def is_done(self) -> bool:
        return self.status == "done"


class Store:
    """The file `runs.jsonl` of a folder: a line with the settings that all runs share, then a line per run.

    An incomplete last line, left by a crash, is removed. If a run has several lines, the last line counts.

    Args:
        folder: the folder of the study; created if missing.
        shared: settings and machine as JSON values, which must be equal for all runs.

    Raises:
        Conflict: the folder cannot be written, contains a study with other settings or is in use by another
            study, or the file has a line that cannot be read.
    """

    def __init__(self, folder: Path, shared: dict[str, Any]) -> None:
        self.path = folder / "runs.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab+", buffering=0, opener=regular)  # noqa: SIM115 - see `close`
        except OSError as error:
            raise Conflict(
                f"argument --out: cannot write {error.filename or self.path} ({error.strerror}): name a "
                "writable folder"
            ) from None
        self.records: dict[Key, Record] = {}
        try:
            self._load(shared)
        except Conflict:
            self._file.close()
            raise

    def _load(self, shared: dict[str, Any]) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"argument --out: got {self.path.parent}, but another study is writing there: wait for it, "
                "or use another folder"
            ) from None
        lines = self._read()
        if not lines:
            self._append({"event": "study", **shared})
            return
        self._check(self._read_line(1, lines[0], _parse), shared)
        for number, line in enumerate(lines[1:], start=2):
            record = self._read_line(number, line, _record)
            self.records[record.key] = record

    def add(self, record: Record) -> None:
        """Append a run; if writing fails, for example on a full disk, earlier runs are unchanged."""
        self._append({"event": "run", **asdict(record)})
        self.records[record.key] = record

    def close(self) -> None:
        self._file.close()

    def _read(self) -> list[bytes]:
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            self._file.truncate(len(whole))
        return whole.split(b"\n")[:-1]

    def _read_line(self, number: int, line: bytes, read: Callable[[bytes], _Read]) -> _Read:
        try:
            return read(line)
        except ValueError as error:
            remedy = "delete the line to repeat its run" if number > 1 else "use another folder"
            raise Conflict(
                f"argument --out: got {self.path.parent}, but line {number} of its {self.path.name} cannot "
                f"be read ({error}): {remedy}"
            ) from None

    def _check(self, first: dict[str, Any], shared: dict[str, Any]) -> None:
        wanted = read_json(json.dumps(shared))
        for name in wanted:
            if first.get(name) != wanted[name]:
                raise Conflict(
                    f"argument --out: got {self.path.parent}, which contains a study with "
                    f"{name.replace('_', ' ')} {_text(first.get(name))}, but this one has "
                    f"{_text(wanted[name])}: use another folder"
                )

    def _append(self, line: dict[str, Any]) -> None:
        """Append a line; if the disk is full, remove the incomplete line."""
        end, rest = self.path.stat().st_size, memoryview(json.dumps(line).encode() + b"\n")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(end)
            raise OSError(error.errno, error.strerror, str(self.path)) from None


def _parse(line: bytes) -> dict[str, Any]:
    """Return the JSON object on a line; raise ValueError if there is none."""
    found = read_json(line)
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__}, not an object")  # noqa: TRY004 - the content of a file
    return found


def _record(text: bytes) -> Record:
    """Parse a line of the file as a run; raise ValueError if it is not a valid run."""
    line = _parse(text)
    is_run, hints = line.pop("event", None) == "run", get_type_hints(Record)
    if not is_run or line.keys() != hints.keys():
        parts = sorted(line.keys() ^ hints.keys()) or ["event"]
        raise ValueError(f"not a run: see {', '.join(map(repr, parts[:3]))}")
    for name, value in line.items():
        if not _fits(value, hints[name]):
            raise ValueError(f"{name!r} is {str(value)[:40]}")
    for names, least, most in _LIMITS:
        for name in names:
            if not all(least <= value <= most for value in _numbers(line[name])):
                raise ValueError(f"{name!r} is {str(line[name])[:40]}, expected {least:g} to {most:g}")
    lengths = dict.fromkeys(("seconds", "sync_s", "losses"), line["steps"])
    lengths |= dict.fromkeys(("cpu_share", "peak_rss_bytes"), line["workers"])
    for name, number in lengths.items():
        if line["status"] == "done" and len(line[name]) != number:
            raise ValueError(f"{name!r} has {len(line[name])} entries, expected {number}")
    line["accuracy"] = [(step, value) for step, value in line["accuracy"]]
    return Record(**line)


_YEARS_S = 1e9
# Limits of valid measurements. Values beyond these limits would cause divisions by zero or overflows.
_LIMITS: tuple[tuple[tuple[str, ...], float, float], ...] = (
    (("workers", "batch", "global_batch", "micro_batch", "accumulate"), 1, 2**53),
    (("repeat", "steps", "bytes_on_wire", "peak_rss_bytes", "cpu_share"), 0, 2**53),
    (("seconds",), 1e-9, _YEARS_S),
    (("sync_s", "wall_s"), 0, _YEARS_S),
    (("busy",), 0, 1),
    (("noise_spread",), 0, sys.float_info.max),
    (("accuracy",), -1e100, 1e100),  # the user's metric may have any value that can be plotted
)


def _numbers(value: Any) -> Iterator[float]:
    """Yield the numbers in a JSON value that consists of numbers, lists and null."""
    if isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif value is not None:
        yield value


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a JSON value has the type of a field and, if it is a number, is finite."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return any(_fits(value, part) for part in parts)
    if kind is list:
        return isinstance(value, list) and all(_fits(each, parts[0]) for each in value)
    if kind is tuple:
        return isinstance(value, list) and len(value) == len(parts) and all(map(_fits, value, parts))
    if hint is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is hint  # isinstance would accept True as an integer


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return str(value)
