"""Checkpoints of `train`: an interrupted save loses no earlier step, and links are not followed."""

from __future__ import annotations

import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyengine.cli.files import regular, written

_KEPT = 2  # number of steps kept, so that the previous file can be loaded if the newest is damaged


def write(path: Path, state: Any) -> None:
    """Write a file to disk either completely or not at all; an existing file is replaced."""
    with written(path) as part, part.open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # writes the file name to disk, too
    finally:
        os.close(descriptor)


def read(path: Path) -> Any:
    """Load a regular file without running code from it; reject tensors that reach beyond their memory."""
    with open(path, "rb", opener=regular) as file, torch.sparse.check_sparse_tensor_invariants():
        return torch.load(file, map_location="cpu", weights_only=True)


class Saves:
    """The saved steps of a training run; every rank creates a `Saves` and calls the same methods.

    Each rank has one file per step. A step is complete if every rank has a file for this step, and all these
    files are from the same save.

    Args:
        folder: the folder of the files, which must exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._suffix = folder, f".rank-{dist.get_rank()}-of-{dist.get_world_size()}.pt"

    def save(self, step: int, state: Any) -> None:
        """Save this rank's state; on return the states of all ranks are on disk, and older steps are removed.

        Raises:
            RuntimeError: some rank could not write its file. Every rank raises this error, and earlier steps
                are kept.
        """
        save = self._gathered(uuid.uuid4().hex)[0]
        self._on_all(
            lambda: write(self._path(step), {"save": save, "state": state}),
            f"step {step} could not be written to {self._folder}",
        )
        self._on_all(self._remove_old, f"older steps in {self._folder} could not be removed")

    def load(self) -> tuple[int, Any] | None:
        """Return the newest complete step and this rank's state; None if there is no complete step yet.

        Raises:
            RuntimeError: the folder cannot be read, or has several steps, all of them incomplete. Raised on
                every rank.
        """
        by_rank = self._on_all(self._steps, f"{self._folder} cannot be read")
        problems = []
        for step in sorted(set().union(*by_rank), reverse=True):
            found = self._gathered(self._look(step))
            wrong = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(found) if text]
            if len({save for save, _ in found}) > 1:
                wrong.append("the ranks' files are from different saves")
            if not wrong:
                return step, read(self._path(step))["state"]
            problems.append(f"step {step} is incomplete ({wrong[0]})")
            if dist.get_rank() == 0:
                print(f"{self._folder}: {problems[-1]}: continuing from an earlier step", file=sys.stderr)
        if len(problems) > 1:  # an interrupted first save leaves one incomplete step, which can be ignored
            raise RuntimeError(
                f"name an empty folder to start over: no step in {self._folder} loads ({'; '.join(problems)})"
            )
        return None

    def _look(self, step: int) -> tuple[str, str]:
        """Return the ID of the save that wrote this rank's file, and an error text if it does not load."""
        try:
            found = read(self._path(step))
            return found["save"], ""
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one, whatever the error
            return "", f"{self._path(step).name}: {type(error).__name__}: {error}"

    def _steps(self) -> set[int]:
        """Return the steps for which this rank has a file."""
        names = (path.name for path in self._folder.iterdir())
        matches = (re.fullmatch(rf"step-(\d+){re.escape(self._suffix)}", name) for name in names)
        return {int(match[1]) for match in matches if match}

    def _remove_old(self) -> None:
        for step in sorted(self._steps())[:-_KEPT]:
            self._path(step).unlink(missing_ok=True)
        if dist.get_rank() == 0:  # removes files of processes that died; all ranks have written their files
            for part in self._folder.glob(".pyengine-*"):
                shutil.rmtree(part, ignore_errors=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:010}{self._suffix}"

    def _gathered(self, mine: Any) -> list[Any]:
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, mine)
        return everybody

    def _on_all(self, work: Callable[[], Any], what: str) -> list[Any]:
        """Return the results of `work` on all ranks; raise on every rank if `work` raised on any rank."""
        try:
            mine = work(), ""
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one, whatever the error
            mine = None, f"{what}: {type(error).__name__}: {error}"
        gathered = self._gathered(mine)
        if found := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(gathered) if text]:
            raise RuntimeError("; ".join(found))
        return [result for result, _ in gathered]
