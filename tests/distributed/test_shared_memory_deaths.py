"""Ranks that die or are stopped during a reduction in shared memory: one of them, or all of them."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import me
from ranks import strike
from torch import nn

import pyengine as pe
from pyengine.comm import watch as comm_watch
from pyengine.comm.arena import Arena


def _struck(owner: str, number: int) -> str:
    """Send rank 1 a signal in the first reduction of its third window; return the others' error message."""
    rank, world = me()
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    if owner == "hook":
        ddp = nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(pe.HookState(shared_memory=True), pe.comm_hook)
    else:
        watch = {"stall_after_s": None if world == 2 else 1.0}
        sync = pe.GradSync(model, shared_memory=True, bucket_cap_mb=1e-5, **watch)

    def window() -> None:
        if owner == "hook":
            ddp(torch.ones(1, 50)).sum().backward()
            return
        with sync.accumulate():
            sync.backward(model(torch.ones(1, 50)).sum())
        sync.step(torch.optim.SGD(model.parameters(), lr=0.1))

    for _ in range(2):
        window()
    dist.barrier()  # a new process imports much in its first step
    comm_watch.WAIT_S = 0.5
    if number == signal.SIGSTOP:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Arena, "reduce", lambda *args, **options: strike(number))
        try:
            window()
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("owner", "world"),
    [("hook", 2), *(pytest.param("own", world, marks=pytest.mark.slow) for world in (2, 3))],
)
def test_a_rank_that_is_killed_in_a_reduction_is_an_error_that_names_it(ranks, owner, world):
    ends = ranks(world).ends(30, _struck, owner, signal.SIGKILL)
    assert ends[1].exit_code == -signal.SIGKILL
    for end in [*ends[:1], *ends[2:]]:
        assert not end.is_silent and not end.error and "rank 1" in end.value
        assert owner == "hook" or "a collective failed: " in end.value


@pytest.mark.slow
def test_a_rank_that_is_stopped_in_a_reduction_is_an_error_behind_the_groups_timeout(ranks):
    ends = ranks(2).ends(30, _struck, "own", signal.SIGSTOP)
    assert not ends[0].is_silent
    assert "a collective failed: rank 1 of 2 did not answer" in ends[0].value
    assert ends[1].was_stopped


def _all_killed(note: str) -> None:
    """Write the inode of the file that ranks share to `note`, then kill every rank in a window."""
    before = _inodes(Path("/proc/self"))  # of engines of earlier tests, which other workers may still have
    model = nn.Linear(100, 100)
    sync = pe.GradSync(model, shared_memory=True)
    with sync.accumulate():
        sync.backward(model(torch.ones(1, 100)).sum())
    (inode,) = _inodes(Path("/proc/self")) - before
    Path(note).write_text(inode)
    strike(signal.SIGKILL)


@pytest.mark.slow
def test_of_ranks_that_are_all_killed_nothing_is_left(ranks, tmp_path):
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    note = tmp_path / "inode"
    ends = ranks(3).ends(60, _all_killed, str(note))
    assert [end.exit_code for end in ends] == [-signal.SIGKILL] * 3
    inode = note.read_text()
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if inode in _inodes(pid)]
    if before:
        assert not [name for name in set(os.listdir("/dev/shm")) - before if "pyengine" in name]


def _inodes(process: Path) -> set[str]:
    """Return the shared files that a process has mapped; none if the process has ended."""
    try:
        lines = (process / "maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[4] for line in lines if "memfd:pyengine" in line}
