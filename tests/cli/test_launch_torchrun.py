"""`launch` in workers that torchrun has started: it runs the function there, and starts no workers."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from marks import rest

from pyengine import launch
from pyengine.cli.main import main
from pyengine.comm import launching

SCRIPT = Path(__file__).with_name("launch_script.py")
pytestmark = pytest.mark.slow  # starts many processes


def torchrun(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run two workers; the last arguments are the `workers` of the script's calls."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *arguments]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=300, env=os.environ | environment
    )


def meet(store: dist.Store, world_size: int) -> set[str]:
    """Let all ranks meet, the last rank first; return the values that they read after rank 0 wrote one."""

    def one(rank: int) -> str:
        shared = launching._meet(store, rank, world_size, timedelta(seconds=60))
        if rank == 0:
            shared.set("word", str(world_size))
        return shared.get("word").decode()

    with ThreadPoolExecutor(world_size) as ranks:
        return set(ranks.map(one, reversed(range(world_size))))


def test_every_call_runs_on_torchruns_workers_until_one_wants_another_number():
    done = torchrun(str(SCRIPT), "3", "3", "4")
    lines = done.stdout.splitlines()
    # torchrun ends a worker when the other one has failed, perhaps before it has printed its second result.
    assert lines.count("[(0, 0), (0, 1)]") == 2 and set(lines) == {"[(0, 0), (0, 1)]", "[(1, 0), (1, 1)]"}
    assert done.returncode == 1
    assert "ValueError: workers=4 after workers=3: all calls run on the same 2 workers" in done.stderr


def test_a_failure_is_in_torchruns_summary_and_its_restart_meets_anew():
    """Rank 1 fails in its first call, and after the restart in its second call."""
    failed = torchrun("--max-restarts", "1", str(SCRIPT), "2", "2", FAILS_AT="0,1")
    assert failed.stdout.splitlines() == ["[(0, 0), (0, 1)]"] * 2, failed.stderr
    assert failed.returncode == 1
    root_cause = failed.stderr.partition("Root Cause (first observed failure):")[2]
    assert "rank      : 1" in root_cause
    assert "ValueError: boom" in root_cause


@pytest.mark.parametrize("absent", ["0", *rest("1")])
def test_a_restart_meets_although_only_one_rank_had_come_before(absent):
    restarted = torchrun("--max-restarts", "1", str(SCRIPT), "2", "2", ABSENT=absent)
    assert restarted.returncode == 0, restarted.stderr
    assert sorted(restarted.stdout.splitlines()) == ["[(0, 0), (0, 1)]"] * 2 + ["[(1, 0), (1, 1)]"] * 2


@pytest.mark.parametrize("world_sizes", [(2, 4, 4), (4, 2, 3), (1, 2, 1)], ids=str)
def test_rounds_of_any_size_meet_in_one_store_each_by_itself(world_sizes):
    store = dist.HashStore()
    assert [meet(store, world_size) for world_size in world_sizes] == [{str(size)} for size in world_sizes]


@pytest.mark.parametrize("early", [0, 1])
def test_one_who_came_and_went_is_not_met_afterwards(early):
    store = dist.HashStore()
    with pytest.raises(
        RuntimeError, match=rf"^ranks \[{1 - early}\] of 2 have not joined this launch within 0 s"
    ):
        launching._meet(store, early, 2, timedelta(milliseconds=50))
    assert meet(store, 2) == {"2"}


def test_rank_0_names_all_who_have_not_come():
    store = dist.HashStore()
    meet(store, 4)
    with ThreadPoolExecutor(1) as other:
        coming = other.submit(launching._meet, store, 2, 4, timedelta(seconds=60))
        with pytest.raises(RuntimeError, match=r"^ranks \[1, 3\] of 4 have not joined"):
            launching._meet(store, 0, 4, timedelta(seconds=2))
        coming.result()


@pytest.mark.parametrize("command", ["verify", "study", "bench", "doctor"])
def test_commands_that_start_workers_of_their_own_refuse_to_be_started_by_torchrun(
    command, monkeypatch, capsys
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    with pytest.raises(SystemExit, match="2"):
        main([command])
    said = f"error: {command} starts its own workers: run it with python, not with torchrun"
    assert said in capsys.readouterr().err


def test_a_worker_that_has_a_group_is_told_so(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match=r"^this worker already has a process group: call fn directly"):
            launch(len, workers=2, args=("abc",))
    finally:
        dist.destroy_process_group()
