"""Workers die and the run goes on with more or fewer of them: accumulator="exact" ends with the same bits.

Real processes under torch.distributed.elastic, ended by SIGKILL. Rank 0 saves a checkpoint after every step,
and every rank its own part of the window after every micro-batch, when it likes.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import comm_of_buckets
from test_same_bits import Gpt, _digest

import pyengine as pe
from pyengine.comm.launching import launch

STEPS, MICRO_BATCHES = 8, 12
pytestmark = pytest.mark.slow  # new processes again and again


class Fate:
    """When this rank dies: at a step and place, or after some seconds,
    and until then every step waits a little.
    """

    def __init__(self, step: int = -1, place: str = "", seconds: float = 0.0, hold_s: float = 0.0) -> None:
        self.step, self.place, self.now, self._hold_s = step, place, -1, hold_s
        if seconds:
            threading.Timer(seconds, self.strike).start()

    def at(self, step: int, place: str) -> None:
        """Die if this is the moment."""
        time.sleep(self._hold_s)
        if (step, place) == (self.step, self.place):
            self.strike()

    def strike(self) -> None:
        """Die without a word."""
        os.kill(os.getpid(), signal.SIGKILL)


def _train(folder: str, fate: dict | None) -> list[tuple[str, float]]:
    """Go on from the last checkpoint; return (digest of everything, count)
    of every step since the beginning.
    """
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
    exact = pe.Exact(micro_batches=MICRO_BATCHES)
    # All ranks meet in GradSync: none saves before all have read.
    parts = [part for part in map(torch.load, Path(folder).glob("part-*.pt")) if part["window"] == start]
    sync = pe.GradSync(model, accumulate=sampler.accumulate, accumulator=exact, bucket_cap_mb=0.02)
    if parts:
        sync.load_state_dict(parts)
    counts: list[float] = []
    sync.on_step(lambda record: counts.append(record.count))
    _die_in_a_collective(sync, fate)
    sampler.set_epoch(0, window=start, due=sync.due)
    for step, window in enumerate(sync.windows(sampler), start=start):
        fate.now = step
        for position, rows in enumerate(window):
            if position == 1:
                fate.at(step, "mid-window")
            with pe.micro_batch_rng(7, step=step, index=sync.place):
                sync.backward(model(data[rows]), count=8 * len(rows))
            _note(Path(folder), step, sync.place)
            if not sync.is_sync_step:
                _replace(sync.state_dict(), Path(folder) / f"part-{dist.get_world_size()}-{rank}.pt")
        sync.clip_grad_norm_(1.0)
        sync.step(optimizer)
        fate.at(step, "before the checkpoint")
        state = [value for p in model.parameters() for value in optimizer.state[p].values()]
        history.append((_digest(*model.parameters(), *state), counts[-1]))
        if rank == 0:
            _save(Path(folder), model, optimizer, history)
    return history


def _note(folder: Path, step: int, place: int) -> None:
    with open(folder / "ran.txt", "a") as ran:
        ran.write(f"{step} {place}\n")


def _die_in_a_collective(sync: pe.Sync, fate: Fate) -> None:
    """Let the doomed rank die when a bucket's integers are on their way."""
    comm = comm_of_buckets(sync)
    all_reduce = comm.all_reduce

    def launch_and_die(flat: torch.Tensor) -> object:
        work = all_reduce(flat)
        if flat.dtype == torch.int32:
            fate.at(fate.now, "mid-collective")
        return work

    comm.all_reduce = launch_and_die  # type: ignore[method-assign]


def _save(folder: Path, model: Gpt, optimizer: torch.optim.Optimizer, history: list) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "history": history}
    _replace(state, folder / "last.pt")


def _replace(state: dict, path: Path) -> None:
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)  # whole or not at all


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


def _computed(folder: Path) -> list[str]:
    return (folder / "ran.txt").read_text().splitlines()


def test_killed_on_four_then_three_then_one_ends_on_six_like_one_worker_alone(tmp_path, undisturbed):
    deaths = [
        (4, {"step": 1, "place": "mid-window"}),
        (3, {"step": 1, "place": "mid-collective"}),  # again, before the window has ended
        (1, {"step": 5, "place": "before the checkpoint"}),
    ]
    assert _chain(tmp_path, deaths, 6) == undisturbed
    # What was computed twice was at most one micro-batch a rank: the one whose end it did not live to save.
    computed = _computed(tmp_path)
    assert len(set(computed)) == MICRO_BATCHES * STEPS - 3 <= len(computed) <= len(set(computed)) + 4 + 3 + 1


def test_killed_at_a_random_moment_on_four_goes_on_with_three(tmp_path, undisturbed):
    seconds = random.uniform(0.02, 0.2)
    with pytest.raises(RuntimeError, match="failed"):  # the run is held up while it is that fast
        launch(_train, workers=4, args=(str(tmp_path), {"seconds": seconds, "hold_s": 0.05}))
    assert launch(_train, workers=3, args=(str(tmp_path), None))[0] == undisturbed
