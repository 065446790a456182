"""Workers die and the run goes on with more or fewer of them: accumulator="exact" ends with the same bits.

Real processes under torch.distributed.elastic, ended by SIGKILL; a checkpoint after every step.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_same_bits import Gpt, _digest

import pyengine as pe
from pyengine.launching import launch

STEPS, MICRO_BATCHES = 8, 12


class Fate:
    """When this rank dies: at a step and place, or after some seconds; never if there is none."""

    def __init__(self, step: int = -1, place: str = "", seconds: float = 0.0) -> None:
        self.step, self.place, self.now = step, place, -1
        if seconds:
            threading.Timer(seconds, self.strike).start()

    def at(self, step: int, place: str) -> None:
        """Die if this is the moment."""
        if (step, place) == (self.step, self.place):
            self.strike()

    def strike(self) -> None:
        """Die without a word."""
        os.kill(os.getpid(), signal.SIGKILL)


def _train(folder: str, fate: dict | None) -> list[tuple[str, float]]:
    """Go on from the last checkpoint; return (digest of everything, count) of every step since the beginning."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    doomed = fate is not None and rank == dist.get_world_size() - 1
    fate = Fate(**fate) if doomed and fate else Fate()
    torch.manual_seed(0)
    model = Gpt(torch.float32)
    data = torch.randint(0, 50, (MICRO_BATCHES * STEPS - 3, 9))
    sampler = pe.WindowSampler(len(data), seed=7, micro_batch=1, global_batch=MICRO_BATCHES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start, history = _load(Path(folder), model, optimizer)
    if start == STEPS:
        return history
    sync = pe.GradSync(model, accumulate=sampler.accumulate, accumulator="exact", bucket_cap_mb=0.02)
    counts: list[float] = []
    sync.on_step(lambda record: counts.append(record.count))
    _die_in_a_collective(sync, fate)
    sampler.set_epoch(0, window=start)
    for step, window in enumerate(sync.windows(sampler), start=start):
        fate.now = step
        for position, rows in enumerate(window):
            if position == 1:
                fate.at(step, "mid-window")
            with pe.micro_batch_rng(7, step=step, index=sampler.first + position):
                sync.backward(model(data[rows]), count=8 * len(rows))
        sync.clip_grad_norm_(1.0)
        sync.step(optimizer)
        fate.at(step, "before the checkpoint")
        state = [value for p in model.parameters() for value in optimizer.state[p].values()]
        history.append((_digest(*model.parameters(), *state), counts[-1]))
        if rank == 0:
            _save(Path(folder), model, optimizer, history)
    return history


def _die_in_a_collective(sync: pe.Sync, fate: Fate) -> None:
    """Let the doomed rank die when a bucket's integers are on their way."""
    comm = sync._engine.comm
    all_reduce = comm.all_reduce

    def launch_and_die(flat: torch.Tensor) -> object:
        work = all_reduce(flat)
        if flat.dtype == torch.int32:
            fate.at(fate.now, "mid-collective")
        return work

    comm.all_reduce = launch_and_die  # type: ignore[method-assign]


def _save(folder: Path, model: Gpt, optimizer: torch.optim.Optimizer, history: list) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "history": history}
    torch.save(state, folder / "new.pt")
    (folder / "new.pt").replace(folder / "last.pt")  # whole or not at all


def _load(folder: Path, model: Gpt, optimizer: torch.optim.Optimizer) -> tuple[int, list]:
    if not (folder / "last.pt").exists():
        return 0, []
    state = torch.load(folder / "last.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return len(state["history"]), state["history"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[tuple[str, float]]:
    (history,) = launch(_train, workers=1, args=(str(tmp_path_factory.mktemp("alone")), None))
    assert sum(count for _, count in history) == 8 * (MICRO_BATCHES * STEPS - 3)
    return history


def _chain(folder: Path, deaths: list[tuple[int, dict]], last_workers: int) -> list[tuple[str, float]]:
    for workers, fate in deaths:
        with pytest.raises(RuntimeError, match="failed"):
            launch(_train, workers=workers, args=(str(folder), fate))
    return launch(_train, workers=last_workers, args=(str(folder), None))[0]


def test_killed_on_four_then_three_then_one_ends_on_six_like_one_worker_alone(tmp_path, undisturbed):
    deaths = [
        (4, {"step": 1, "place": "mid-window"}),
        (3, {"step": 3, "place": "mid-collective"}),
        (1, {"step": 5, "place": "before the checkpoint"}),
    ]
    assert _chain(tmp_path, deaths, 6) == undisturbed


def test_killed_at_a_random_moment_on_four_goes_on_with_three(tmp_path, undisturbed):
    seconds = random.uniform(0.05, 0.6)
    try:
        launch(_train, workers=4, args=(str(tmp_path), {"seconds": seconds}))
    except RuntimeError:
        pass  # it was in time, unless the run was faster
    assert launch(_train, workers=3, args=(str(tmp_path), None))[0] == undisturbed
