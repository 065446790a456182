"""A rank that dies, or is stopped, while ranks reduce in memory that they share; and when all of them die."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import me
from ranks import strike
from torch import nn

import pyengine as pe
from pyengine.comm import watch as comm_watch
from pyengine.comm.arena import Arena


def _killed_by_hook() -> str:
    """Kill rank 1 in a reduction of a bare hook; return what the others are told."""
    model = nn.Linear(50, 50)
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(pe.HookState(shared_memory=True), pe.comm_hook)
    comm_watch.WAIT_S = 0.5
    try:
        for window in range(3):
            if window == 2 and me()[0] == 1:
                Arena.reduce = lambda *args, **options: strike(signal.SIGKILL)
            ddp(torch.ones(1, 50)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_is_killed_under_a_bare_hook_is_an_error_that_names_it(ranks):
    other, killed = ranks(2).ends(30, _killed_by_hook)
    assert killed.exit_code == -signal.SIGKILL
    assert not other.is_silent and not other.error and "rank 1" in other.value


def _killed(who: str, stall_after_s: float | None) -> tuple[float, str]:
    rank, _ = me()
    comm_watch.WAIT_S = 0.5
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    sync = pe.GradSync(model, shared_memory=True, stall_after_s=stall_after_s, bucket_cap_mb=1e-5)

    def window() -> None:
        with sync.accumulate():
            sync.backward(model(torch.ones(1, 50)).sum())

    window()
    sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
    dist.barrier()  # a process that is new imports much in its first step
    reduce = Arena.reduce
    if rank == 1:  # behind the header, with the first bucket

        def die(*args: Any, **options: Any) -> Any:
            reduce(*args, **options)
            strike(signal.SIGKILL if who == "one" else signal.SIGSTOP)

        Arena.reduce = die  # type: ignore[method-assign]
    if who == "one is stopped":
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    since = time.monotonic()
    try:
        window()
        sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
    except RuntimeError as error:
        return time.monotonic() - since, str(error)
    finally:
        Arena.reduce = reduce  # type: ignore[method-assign]
    return 0.0, ""


@pytest.mark.slow
@pytest.mark.parametrize(("world", "stall_after_s"), [(2, None), (3, 1.0)])
def test_a_rank_that_is_killed_in_a_reduction_is_an_error_that_names_it(ranks, world, stall_after_s):
    ends = ranks(world).ends(30, _killed, "one", stall_after_s)
    assert ends[1].exit_code == -signal.SIGKILL
    for end in [*ends[:1], *ends[2:]]:
        assert not end.is_silent and not end.error
        assert "a collective failed: " in end.value[1] and "rank 1" in end.value[1]


@pytest.mark.slow
def test_a_rank_that_is_stopped_in_a_reduction_is_an_error_behind_the_groups_timeout(ranks):
    ends = ranks(2).ends(30, _killed, "one is stopped", None)
    assert not ends[0].is_silent
    assert "a collective failed: rank 1 of 2 did not answer" in ends[0].value[1]
    assert ends[1].was_stopped


def _all_killed(note: str) -> None:
    """Tell which file the ranks share, then have all of them killed in a window."""
    before = _inodes(Path("/proc/self"))  # of earlier tests' engines, which other workers may still have
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
    """Return the shared files that a process has mapped; none of one that has ended."""
    try:
        lines = (process / "maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[4] for line in lines if "memfd:pyengine" in line}
