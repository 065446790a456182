"""Listeners for step records: `sync.on_step(JsonLines("steps.jsonl"))`.

`telemetry.tensorboard` requires tensorboard.
"""

from __future__ import annotations

import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import profile

from pyengine.step.step_record import StepRecord

__all__ = ["JsonLines", "Listener", "Wandb", "chrome_trace", "numbers"]


def numbers(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a record by name. Missing numbers are omitted, and `skipped` is 0 or 1.

    If a field has several numbers, their names have the form `grad_norms/<parameter>`.

    Example:
        >>> record = StepRecord(0, 2, 8.0, None, 1.5, False, "", 64, 2, 0.1, 0.0, 0.2)
        >>> list(numbers(record))[:3], numbers(record)["skipped"]
        (['micro_batches', 'count', 'grad_norm'], 0.0)
    """
    found: dict[str, float] = {}
    for name, value in asdict(record).items():
        if _is_number(value) and name != "step":
            found[name] = float(value)
        elif isinstance(value, dict):
            found |= {f"{name}/{key}": float(each) for key, each in value.items() if _is_number(each)}
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


class Listener(ABC):
    """A callback for `sync.on_step` that writes records on one rank only.

    Args:
        rank: the rank that writes the records, in the default group; 0 if there is no group.
    """

    def __init__(self, *, rank: int) -> None:
        self.writes = _is_own(rank)

    def __call__(self, record: StepRecord) -> None:
        """Write one record."""
        if self.writes:
            self._write(record)

    @abstractmethod
    def _write(self, record: StepRecord) -> None: ...


def _is_own(rank: int) -> bool:
    """Whether this process has this rank; raise ValueError if the rank does not exist."""
    own, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if type(rank) is not int or not 0 <= rank < world_size:
        raise ValueError(
            f"rank={rank!r}: expected the rank that writes, a whole number from 0 to {world_size - 1}"
        )
    return rank == own


def _check_folder(path: str | os.PathLike[str]) -> None:
    """Raise FileNotFoundError before anything is measured if the folder of `path` does not exist."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"path={os.fspath(path)!r}: there is no folder {folder}; create it first")


class JsonLines(Listener):
    """Append one JSON object per step to a file.

    The object has the fields of `StepRecord`, and `time` in seconds since 1970. The file is closed between
    steps. New lines are appended to an existing file; a line that a crash has truncated stays a separate
    line. If several lines have the same `step` after resuming, the last of them is valid. Inf and nan, which
    JSON does not support, are written as null.

    Args:
        path: the file, in an existing folder.
        rank: the rank that writes the file.

    Raises:
        FileNotFoundError: the folder does not exist; raised on the rank that writes the file.
        ValueError: the rank does not exist.

    Example:
        >>> sync.on_step(JsonLines("steps.jsonl"))  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str], *, rank: int = 0) -> None:
        super().__init__(rank=rank)
        self._path = Path(path)
        if self.writes:
            _check_folder(path)
        if self.writes and self._path.exists() and self._path.stat().st_size > 0:
            with self._path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                is_torn = file.read() != b"\n"
            if is_torn:
                self._append("\n")

    def _write(self, record: StepRecord) -> None:
        fields = without_nan(asdict(record))
        self._append(json.dumps({"time": time.time(), **fields}, allow_nan=False) + "\n")

    def _append(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def without_nan(value: Any) -> Any:
    """Return a value with inf and nan replaced by None."""
    if isinstance(value, dict):
        return {name: without_nan(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Wandb(Listener):
    """Log every number of a `StepRecord` as `pyengine/<name>`, with `pyengine/step` as the x-axis.

    Your own `run.log` calls keep their steps. Offline and resumed runs are supported.

    Args:
        run: the run that `wandb.init` returned on the rank that writes to wandb; other ranks may pass None.
        rank: the rank that writes to wandb.

    Example:
        >>> run = wandb.init(project="gpt", mode="offline")  # doctest: +SKIP
        >>> sync.on_step(Wandb(run))  # doctest: +SKIP
    """

    def __init__(self, run: Any, *, rank: int = 0) -> None:
        super().__init__(rank=rank)
        self._run = run
        if self.writes and run is None:
            raise ValueError(
                f"run: got None on rank {rank}, the rank that writes to wandb; expected the run that "
                "wandb.init returned"
            )
        if self.writes:
            run.define_metric("pyengine/step")
            run.define_metric("pyengine/*", step_metric="pyengine/step")

    def _write(self, record: StepRecord) -> None:
        named = {f"pyengine/{name}": value for name, value in numbers(record).items()}
        self._run.log({"pyengine/step": record.step, **named})
        if record.skipped:
            self._run.summary["pyengine/last_skip"] = f"step {record.step}: {record.reason}"


@contextmanager
def chrome_trace(path: str | os.PathLike[str], *, rank: int = 0) -> Iterator[None]:
    """Profile the body on one rank and write a trace for chrome://tracing and Perfetto.

    In addition to PyTorch's events, the trace contains `pyengine: backward`, `pyengine: exposed_sync`,
    `pyengine: optimizer`, and for every bucket `pyengine: launch bucket <n>` and `pyengine: wait for bucket
    <n>` (except under DDP, where DDP itself waits). The process group adds its collectives as
    `gloo:all_reduce` or `nccl:all_reduce`: the header's all-reduce, then the buckets' in launch order.

    Args:
        path: the JSON file to write; compressed if the name ends in `.gz`.
        rank: the rank to profile.

    Raises:
        FileNotFoundError: the folder does not exist; raised before the body runs.
        ValueError: the rank does not exist.

    Cost: profiling slows down every operation. A few windows are enough.

    Example:
        >>> with chrome_trace("trace.json"):  # doctest: +SKIP
        ...     train(sync, model, loader)
    """
    if not _is_own(rank):
        yield
        return
    _check_folder(path)
    with profile() as profiler:
        yield
    profiler.export_chrome_trace(os.fspath(path))
