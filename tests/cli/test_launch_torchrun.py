"""`launch` in workers that torchrun has started: it runs the function there, and starts nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from pyengine import launch
from pyengine.cli.main import main

SCRIPT = Path(__file__).with_name("launch_script.py")


def torchrun(*arguments: str, fails_at: str = "") -> subprocess.CompletedProcess[str]:
    """Run two workers; the last arguments are the `workers` of the script's calls."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *arguments]
    environment = os.environ | {"FAILS_AT": fails_at}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, env=environment)


def test_every_call_runs_on_torchruns_workers_until_one_wants_another_number() -> None:
    done = torchrun(str(SCRIPT), "3", "3", "4")
    assert sorted(done.stdout.splitlines()) == ["[(0, 0), (0, 1)]"] * 2 + ["[(1, 0), (1, 1)]"] * 2
    assert done.returncode == 1
    assert "ValueError: workers=4 after workers=3: all calls run on the same 2 workers" in done.stderr


def test_a_failure_is_in_torchruns_summary_and_its_restart_meets_anew() -> None:
    failed = torchrun(str(SCRIPT), "2", fails_at="0")
    assert failed.returncode == 1
    root_cause = failed.stderr.partition("Root Cause (first observed failure):")[2]
    assert "rank      : 1" in root_cause
    assert "ValueError: boom" in root_cause
    restarted = torchrun("--max-restarts", "1", str(SCRIPT), "2", fails_at="0")
    assert restarted.returncode == 0, restarted.stderr
    assert restarted.stdout.splitlines() == ["[(0, 0), (0, 1)]"] * 2


@pytest.mark.parametrize("command", ["verify", "study", "bench", "doctor"])
def test_commands_that_start_workers_of_their_own_refuse_to_be_started_by_torchrun(
    command: str, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    with pytest.raises(SystemExit, match="2"):
        main([command])
    said = f"error: torchrun has started this, but {command} starts its own workers: run it by python"
    assert said in capsys.readouterr().err


def test_a_worker_that_has_a_group_is_told_so(monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match=r"^this worker has a process group already: call fn itself"):
            launch(len, workers=2, args=("abc",))
    finally:
        dist.destroy_process_group()
