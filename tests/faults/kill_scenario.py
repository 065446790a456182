"""A short training run that can be killed in phases of a window and of writing a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fault_scenario import Point
from fault_trap import watched
from kill_orders import Order
from torch import Tensor, nn

import pyengine as pe
from pyengine.cli.train import saves
from pyengine.cli.train.saves import Saves

MICRO_BATCHES = 8


@dataclass(frozen=True)
class Plan:
    """The settings of a run, whatever happens to it.

    Attributes:
        folder: of its checkpoints and its log.
        windows: total number of windows.
        accumulator: the engine's argument, by name.
    """

    folder: Path
    windows: int
    accumulator: str

    @property
    def log(self) -> Path:
        """The file in which rank 0 logs what was resumed, stepped and saved."""
        return self.folder / "log.jsonl"

    @property
    def passed(self) -> Path:
        """The file in which workers that die in a phase write its name."""
        return self.folder / "passed.txt"


class KillTrap:
    """Kills this worker at the phase or time of its order.

    Attributes:
        turn: "early" or "last": which micro-batch of the window this is.
    """

    def __init__(self, order: Order | None, log: Path) -> None:
        self._order, self._log = order, log
        self._passed, self._windows = 0, -1
        self.turn = "early"
        self.end_window()

    def at(self, phase: str) -> None:
        if self._order is not None and self._order.phase == phase:
            self._passed += 1
            if self._passed == self._order.passes:
                with self._log.open("a") as file:
                    file.write(f"{phase}\n")
                os.kill(os.getpid(), signal.SIGKILL)

    def in_turn(self, phase: str) -> None:
        """Pass the phase "bucket" in the last backward, when the first bucket is sent; else "backward"."""
        self.at("bucket" if phase == "bucket" and self.turn == "last" else "backward")

    def launched(self, work: dist.Work) -> None:
        """Pass the phase "collective": one was launched, and nothing has waited for it."""
        self.at("collective")

    def end_window(self) -> None:
        """Count a stepped window or the attempt's beginning; start the process that kills at a time."""
        self._windows += 1
        order = self._order
        if order is not None and not order.phase and self._windows == order.windows:
            subprocess.Popen(["sh", "-c", f"sleep {order.seconds}; kill -KILL {os.getpid()}"])


class Net(nn.Module):
    """Two layers with dropout and inexact arithmetic; forwards and backwards pass traps."""

    def __init__(self, trap: KillTrap) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 1)
        self._trap = trap
        self.first.weight.register_hook(lambda _: trap.at("hook"))

    def forward(self, x: Tensor) -> Tensor:
        self._trap.at("forward")
        hidden = Point.apply(self.first(x).tanh(), self._trap, "bucket")
        out = self.last(nn.functional.dropout(hidden, 0.2))
        return Point.apply((out - x.mean(1, keepdim=True)).square().sum(), self._trap, "backward")


def train(plan: Plan, trap: KillTrap, attempt: int) -> str:
    """Resume from the newest checkpoint, train to the end, and return a digest of everything."""
    trap.at("met")
    torch.set_num_threads(1)
    with watched(trap), _watched_files(trap):
        run = _Run(plan, trap)
        start = run.resume()
        run.log("resumed", step=start, attempt=attempt)
        trap.at("resumed")
        return run.windows(start)


class _Scheduler(torch.optim.lr_scheduler.StepLR):
    trap: KillTrap | None = None

    def step(self, epoch: Any = None) -> None:
        if self.trap is not None:
            self.trap.at("scheduler")
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "trap"}


class _Run:
    """One attempt on one rank."""

    def __init__(self, plan: Plan, trap: KillTrap) -> None:
        self._plan, self._trap = plan, trap
        torch.manual_seed(0)
        self._model = Net(trap)
        self._data = torch.randn(MICRO_BATCHES * plan.windows * 2, 6)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-2)
        self._optimizer.register_step_pre_hook(lambda *_: trap.at("step"))
        self._scheduler = _Scheduler(self._optimizer, 7, 0.95)
        self._scheduler.trap = trap
        self._sampler = pe.WindowSampler(self._data, seed=3, micro_batch=2, global_batch=2 * MICRO_BATCHES)
        exact = pe.Exact(micro_batches=MICRO_BATCHES)
        self._sync = pe.GradSync(
            self._model,
            accumulate=self._sampler.accumulate,
            accumulator=exact if plan.accumulator == "exact" else plan.accumulator,
            bucket_cap_mb=1e-4,
        )
        self._sync.on_step(lambda record: trap.at("callback"))
        folder = plan.folder / "checkpoints"
        folder.mkdir(exist_ok=True)
        self._saves = Saves(folder)

    def resume(self) -> int:
        """Load the newest complete step, and return it: the number of windows that are done."""
        found = self._newest() if self._plan.accumulator == "exact" else self._saves.load()
        if found is None:
            return 0
        step, own = found
        self._model.load_state_dict(own["model"])
        self._optimizer.load_state_dict(own["optimizer"])
        self._scheduler.load_state_dict(own["scheduler"])
        self._sync.load_state_dict(own["sync"])
        return step

    def _newest(self) -> tuple[int, Any] | None:
        """Return the newest complete step, saved by any number of ranks, and the state this rank loads."""
        rank, world = dist.get_rank(), dist.get_world_size()
        for first in sorted((self._plan.folder / "checkpoints").glob("step-*.rank-0-of-*.pt"), reverse=True):
            step, size = int(first.name.split(".")[0].removeprefix("step-")), int(first.stem.split("-")[-1])
            files = [first.with_name(first.name.replace("rank-0", f"rank-{r}")) for r in range(size)]
            if all(file.exists() for file in files):
                found = [saves.read(file) for file in files]
                if len({each["save"] for each in found}) == 1:
                    return step, found[rank if size == world else 0]["state"]
        return None

    def windows(self, start: int) -> str:
        trap, sync = self._trap, self._sync
        if start == self._plan.windows:
            return self._digest()
        self._sampler.set_epoch(0, window=start)
        for step, window in enumerate(sync.windows(self._loader()), start=start):
            for rows in window:
                trap.turn = "last" if sync.is_sync_step else "early"
                with pe.micro_batch_rng(3, step=step, index=sync.place):
                    sync.backward(self._model(self._data[rows]), count=len(rows))
            trap.at("clip")
            sync.clip_grad_norm_(1.0)
            sync.step(self._optimizer, self._scheduler)
            trap.at("stepped")
            self.log("stepped", step=step + 1, digest=self._digest())
            self._save(step + 1)
            trap.end_window()
        return self._digest()

    def log(self, what: str, **values: Any) -> None:
        """Append a line with a single write, on rank 0."""
        if dist.get_rank() == 0:
            line = json.dumps({"what": what, "world": dist.get_world_size(), **values}) + "\n"
            descriptor = os.open(self._plan.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(descriptor, line.encode())
            os.close(descriptor)

    def _loader(self) -> Iterator[list[int]]:
        for rows in self._sampler:
            self._trap.at("loader")
            yield rows

    def _save(self, step: int) -> None:
        self._trap.at("save")
        parts = {
            "model": self._model,
            "optimizer": self._optimizer,
            "scheduler": self._scheduler,
            "sync": self._sync,
        }
        self._saves.save(step, {name: part.state_dict() for name, part in parts.items()})
        self.log("saved", step=step)
        self._trap.at("saved")

    def _digest(self) -> str:
        state = [value for p in self._model.parameters() for value in self._optimizer.state[p].values()]
        sha = hashlib.sha256(repr(self._scheduler.get_last_lr()).encode())
        for tensor in (*self._model.parameters(), *state):
            sha.update(tensor.detach().numpy().tobytes())
        return sha.hexdigest()[:16]


@contextmanager
def _watched_files(trap: KillTrap) -> Iterator[None]:
    """Pass the phases in which a checkpoint's files are written, removed and loaded."""
    write, save, fsync = saves.write, torch.save, os.fsync
    syncs = [0]

    def write_and_tell(*args: Any) -> None:
        syncs[0] = 0
        write(*args)
        trap.at("written")

    def save_and_tell(state: Any, file: Any) -> None:
        trap.at("opened")
        save(state, _InPieces(file, trap))

    def fsync_and_tell(descriptor: int) -> None:
        trap.at("named" if syncs[0] else "unsynced")  # fsync of the file, then of the folder
        syncs[0] += 1
        fsync(descriptor)

    with (
        mock.patch.object(saves, "write", write_and_tell),
        mock.patch.object(torch, "save", save_and_tell),
        mock.patch.object(os, "fsync", fsync_and_tell),
        mock.patch.object(Path, "replace", _behind(trap, "unnamed", Path.replace)),
        mock.patch.object(Path, "unlink", _behind(trap, "remove", Path.unlink)),
        mock.patch.object(saves, "read", _behind(trap, "load", saves.read)),
    ):
        yield


class _InPieces:
    """A file that passes a phase when some of a state's tensors are written, but not their directory."""

    def __init__(self, file: Any, trap: KillTrap) -> None:
        self._file, self._trap, self._pieces = file, trap, 0

    def write(self, data: Any) -> int:
        self._pieces += 1
        if self._pieces == 9:
            self._trap.at("half written")
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _behind(trap: KillTrap, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def tell_and_do(*args: Any, **kwargs: Any) -> Any:
        trap.at(phase)
        return function(*args, **kwargs)

    return tell_and_do
