"""Checkpoints in a folder: every rank writes its part, whole or not at all; the newest whole one loads."""

from __future__ import annotations

import re
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyengine.checkpoint import state_file
from pyengine.checkpoint.state_file import NewerFormat, Origin
from pyengine.comm import comm_for

_NAME = re.compile(r"step-([0-9]+)\.rank-([0-9]+)-of-([0-9]+)\.pt")


@dataclass(frozen=True)
class Checkpoint:
    """What was saved.

    Attributes:
        step: of the save.
        states: what ranks gave to `save`: this rank's alone, from `load`; those of all ranks, by rank, from
            `load_all`.
    """

    step: int
    states: list[Any]

    @property
    def state(self) -> Any:
        """This rank's state, as `load` gives it."""
        (state,) = self.states
        return state


@dataclass(frozen=True)
class _Found:
    """What a rank has found of a step."""

    text: str  # what is wrong; empty if nothing is
    save: str = ""  # that the files are of
    is_newer: bool = False  # whether a newer pyengine wrote one
    is_first: bool = False  # whether a file records that no step was there before
    is_damaged: bool = False  # whether a file is there and of no use


class Checkpoints:
    """The checkpoints of one run, in one folder; every rank makes this and calls its methods alike.

    A rank's part is a file of its own, which gets its name when all of it is on the disk. A step counts when
    the parts of all ranks are there and of one save; a process may die at any moment.

    Args:
        folder: of the files; the first call makes it. On many hosts one that all of them see, or on each
            its own.
        keep: how many steps are kept, at least 1; older ones go when a new one is whole. 2 survive that the
            newest is damaged.
        process_group: the ranks; None is the default group, or this process alone.

    Raises:
        ValueError: `keep` is no number of at least 1; on this rank.

    Example:
        >>> checkpoints = pe.Checkpoints(folder)  # doctest: +SKIP
        >>> found = checkpoints.load()  # doctest: +SKIP
        >>> if found is not None:  # doctest: +SKIP
        ...     model.load_state_dict(found.state["model"])
        ...     sync.load_state_dict(found.state["sync"])
        >>> checkpoints.save(step, {"model": model.state_dict(), "sync": sync.state_dict()})  # doctest: +SKIP
    """

    def __init__(
        self, folder: str | Path, *, keep: int = 2, process_group: dist.ProcessGroup | None = None
    ) -> None:
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ValueError(f"keep={keep!r}: need a whole number of steps to keep, at least 1; 2 is safer")
        self._folder, self._keep = Path(folder), keep
        self._comm = comm_for(torch.device("cpu"), process_group)
        self._refused: set[int] = set()

    def save(self, step: int, state: Any) -> None:
        """Save a step; when this returns, the parts of all ranks are on the disk. Older steps may go then.

        Args:
            step: at least 0; the same on every rank, and not below one that is there. The same step is
                replaced, also if another number of ranks has saved it.
            state: this rank's: tensors and plain values, which `torch.load` reads with `weights_only=True`.

        Raises:
            ValueError: `step` is none, differs between ranks or is below one that is there; on every rank.
            RuntimeError: some rank could not write its part, `load` could not read that part, or older files
                could not be removed; on every rank. Earlier steps are kept.

        Cost: one write of the state, waited for until it is on the disk; three small gathers.
        """
        name = uuid.uuid4().hex

        def look() -> tuple[str, int, str, bool]:
            """Return what is wrong with the step, itself, a name, and whether none is there to go on from."""
            problem = self._problem_of(step)
            is_first = not {there for there, _ in self._found()} - self._refused
            return problem, -1 if problem else step, name, is_first

        gathered = self._on_all(look, f"{self._folder} cannot be used")
        self._raise([problem for problem, *_ in gathered], ValueError)
        if len({each for _, each, *_ in gathered}) > 1:
            raise ValueError(
                f"step={[each for _, each, *_ in gathered]} by rank: need the same on every rank; save "
                "behind a step that all of them have taken"
            )
        rank, world_size = self._comm.rank, self._comm.world_size
        is_first = all(is_empty for *_, is_empty in gathered)
        origin = Origin(step, rank, world_size, gathered[0][2], is_first)

        def write() -> list[int]:
            state_file.write(self._path(step, rank, world_size), origin, state)
            return [there for _, (there, *whose) in self._files() if whose == [rank, world_size]]

        steps = self._on_all(write, f"step {step} could not be written to {self._folder}")
        whole = set.intersection(*map(set, steps))
        self._on_all(
            lambda: self._remove_old(whole, step),
            f"step {step} was saved, and older files in {self._folder} could not be removed",
        )

    def load(self) -> Checkpoint | None:
        """Return this rank's state of the newest whole step; None if there is none yet.

        Warns:
            UserWarning: a newer step was passed over, and why: it is truncated or damaged, or lacks a part.
                Or the first save of all was interrupted, and there is no step to continue from.

        Raises:
            ValueError: no step is whole, or the newest one is of another number of ranks, of a newer
                pyengine, or of more than tensors and plain values; on every rank, with the reason.
            RuntimeError: some rank cannot read the folder; on every rank.

        Cost: reads the file twice, and one more for every step passed over.
        """
        return self._newest(is_all=False)

    def load_all(self) -> Checkpoint | None:
        """Return the states of all ranks that saved the newest whole step, however many they were.

        For `sync.load_state_dict(states)` with exact sums on another number of ranks. Every rank has to see
        the files of all. Otherwise as `load`.
        """
        return self._newest(is_all=True)

    def _newest(self, *, is_all: bool) -> Checkpoint | None:
        listed = self._on_all(self._found, f"{self._folder} cannot be read")
        found = sorted({key for mine in listed for key in mine}, reverse=True)
        reasons: list[str] = []
        is_lost = False  # whether there has been a whole step
        for step, world_size in found:
            is_other = not is_all and world_size != self._comm.world_size
            problems = self._on_all(
                partial(self._check, step, world_size, is_all=is_all or is_other),
                f"step {step} in {self._folder} cannot be read",
            )
            newer = [each.text for each in problems if each.is_newer]
            wrong = [f"rank {rank}: {each.text}" for rank, each in enumerate(problems) if each.text]
            saves = {each.save for each in problems}
            if not wrong and (len(saves) > 1 or " " in problems[0].save):
                wrong = ["its parts are of different saves: one was interrupted"]
            if newer:
                raise ValueError(f"step {step} in {self._folder}: {newer[0]}")
            if not wrong and is_other:
                raise ValueError(
                    f"the newest checkpoint in {self._folder}, of step {step}, is of {world_size} ranks, and "
                    f"there are {self._comm.world_size}: start as many, or share its states out by load_all()"
                )
            if not wrong:
                self._tell(reasons, "going on from an earlier step")
                return Checkpoint(step, self._read(step, world_size, is_all=is_all))
            reasons.append(f"step {step} is not whole ({wrong[0]})")
            self._refused.add(step)
            is_lost |= any(each.is_damaged for each in problems) or not any(
                each.is_first for each in problems
            )
        if reasons and not is_lost:
            self._tell(reasons, "and it was the first one: there is nothing to go on from")
            return None
        if reasons:
            raise ValueError(
                f"no checkpoint in {self._folder} is whole: {'; '.join(reasons)}. To start anew take "
                "an empty folder"
            )
        return None

    def _read(self, step: int, world_size: int, *, is_all: bool) -> list[Any]:
        ranks = range(world_size) if is_all else [self._comm.rank]
        states: list[Any] = []
        self._on_all(
            lambda: states.extend(state_file.read(self._path(step, rank, world_size)) for rank in ranks),
            f"step {step} in {self._folder} cannot be loaded",
            ValueError,
        )
        return states

    def _check(self, step: int, world_size: int, *, is_all: bool) -> _Found:
        """Look at files that this rank has to read: all of them, whatever is wrong with the first."""
        text, saves, is_first, is_damaged = "", set(), False, False
        ranks = self._ranks_of(step, world_size) if is_all else [self._comm.rank]
        for path in [self._path(step, rank, world_size) for rank in ranks]:
            try:
                origin = state_file.check(path)
            except FileNotFoundError:
                text = text or f"{path.name} is not there"
                continue
            except NewerFormat as error:
                return _Found(f"{path.name} is {error}", is_newer=True)
            except (ValueError, OSError) as error:
                text, is_damaged = f"{path.name} is {error}", True
                continue
            if self._path(origin.step, origin.rank, origin.world_size) != path:
                text, is_damaged = (
                    f"{path.name} is that of step {origin.step}, rank {origin.rank}, renamed",
                    True,
                )
            saves.add(origin.save)
            is_first |= origin.is_first
        return _Found(text, " ".join(sorted(saves)), is_first=is_first, is_damaged=is_damaged)

    def _ranks_of(self, step: int, world_size: int) -> list[int]:
        """Return the ranks whose files are there, and the first without one; a name may have any number."""
        there = {rank for _, (each, rank, size) in self._files() if (each, size) == (step, world_size)}
        missing = next((rank for rank in range(world_size) if rank not in there), 0)
        return sorted({*there, missing})

    def _tell(self, reasons: Sequence[str], what: str) -> None:
        if reasons:
            warnings.warn(f"{self._folder}: {'; '.join(reasons)}: {what}", UserWarning, stacklevel=4)

    def _problem_of(self, step: Any) -> str:
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**63:
            return f"step={step!r}: need a whole number of at least 0"
        later = [there for there, _ in self._found() if there > step and there not in self._refused]
        if later:
            return (
                f"step={step}: {self._folder} holds step {max(later)}, of another run, or of this one if it "
                "was not loaded: load it, or take an empty folder"
            )
        return ""

    def _remove_old(self, whole: set[int], step: int) -> None:
        """Remove the files of steps before those that are kept, and of those that were refused."""
        self._refused.discard(step)
        files = Counter((step, world_size) for _, (step, _, world_size) in self._files())
        # Steps of other numbers of ranks that have a file of each of them.
        others = {step for (step, size), num in files.items() if num == size != self._comm.world_size}
        kept = sorted((whole | others) - self._refused)[-self._keep :]
        for path, (there, _, world_size) in self._files():
            # Of other ranks' save of this step, which `load` would find first.
            is_replaced = there == step and world_size != self._comm.world_size
            if there < kept[0] or there in self._refused or is_replaced:
                path.unlink(missing_ok=True)
        for part in self._folder.glob(".step-*.part"):  # of a process that died
            part.unlink(missing_ok=True)

    def _found(self) -> set[tuple[int, int]]:
        """Return steps and numbers of ranks of which any file is there."""
        return {(step, world_size) for _, (step, _, world_size) in self._files()}

    def _files(self) -> Iterator[tuple[Path, tuple[int, int, int]]]:
        """Yield the files of checkpoints, each with step, rank and number of ranks, by their names."""
        missing = [each for each in (self._folder, *self._folder.parents) if not each.exists()]
        self._folder.mkdir(parents=True, exist_ok=True)
        for each in missing:  # so that the new folders are on the disk, too
            with suppress(PermissionError):  # of a folder that may be written to and not be listed
                state_file.sync_folder(each.parent)
        for path in sorted(self._folder.iterdir()):
            if (match := _NAME.fullmatch(path.name)) is not None:
                step, rank, world_size = map(int, match.groups())
                if rank < world_size and path == self._path(step, rank, world_size):
                    yield path, (step, rank, world_size)

    def _path(self, step: int, rank: int, world_size: int) -> Path:
        return self._folder / f"step-{step:010}.rank-{rank}-of-{world_size}.pt"

    def _on_all(self, work: Callable[[], Any], what: str, kind: type[Exception] = RuntimeError) -> list[Any]:
        """Return what `work` returns on every rank; raise on every rank if it raised on some rank."""
        try:
            mine = "", work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for this one
            mine = f"{what}: {type(error).__name__}: {error}", None
        gathered = self._comm.all_gather_object(mine)
        self._raise([problem for problem, _ in gathered], kind)
        return [result for _, result in gathered]

    def _raise(self, problems: Sequence[str], kind: type[Exception]) -> None:
        found = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        if found:
            raise kind("; ".join(found))
