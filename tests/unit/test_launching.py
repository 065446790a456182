"""New workers on this machine: their number and environment, and the failures and stacks reported."""

from __future__ import annotations

import errno
import math
import multiprocessing as mp
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyengine import launch
from pyengine.comm import launching


def job(folder: Path, *, workers: int = 2) -> launching._Job:
    return launching._Job(len, ("abc",), workers, 1, folder)


# --- How many ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 65}, "workers=65: expected at most 64 on the 2 cores of this machine"),
        *(
            ({"workers": 1, "timeout_s": s}, "timeout_s=.*: expected a positive number of seconds")
            for s in (0, math.nan, math.inf)
        ),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_is_started(options, message, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5}, raising=False)
    with pytest.raises(ValueError, match=f"^{message}"):
        launch(len, args=("abc",), **options)
    launching.check_number(64)


def test_when_the_machine_starts_no_more_those_that_were_started_are_ended(monkeypatch, tmp_path):
    started = []

    def start(*arguments, **options):
        if started:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(mp.get_context("spawn").Process(target=time.sleep, args=(60,)))
        started[0].start()
        return SimpleNamespace(processes=[started[0]])

    monkeypatch.setattr(launching, "start_processes", start)
    with pytest.raises(RuntimeError, match=r"^workers=3: worker 1 could not be started \(.*unavailable\)"):
        launch(len, workers=3, args=("abc",))
    assert started[0].exitcode == -signal.SIGKILL


# --- The environment of workers ---


@pytest.fixture
def environment(monkeypatch):
    """Return an empty environment, which replaces `os.environ`."""
    monkeypatch.setattr(os, "environ", {})
    return os.environ


def test_workers_find_what_torchrun_would_give_them_and_nothing_of_another_launcher(environment, tmp_path):
    environment |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    launching._set_environment(1, job(tmp_path, workers=3))
    ranks = ("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert [environment[name] for name in ranks] == ["1", "1", "1", "0", "3", "3"]
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert environment["TORCHELASTIC_RUN_ID"] == tmp_path.name
    assert {"MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} & set(environment) == set()


@pytest.mark.parametrize("given", [{}, {"GLOO_SOCKET_IFNAME": "eth5", "NCCL_SOCKET_IFNAME": "ib0"}], ids=str)
def test_groups_use_the_loopback_unless_another_interface_was_named(environment, tmp_path, given):
    environment |= given
    launching._set_environment(0, job(tmp_path))
    assert environment["GLOO_SOCKET_IFNAME"] == given.get("GLOO_SOCKET_IFNAME", launching._LOOPBACK)
    assert environment["NCCL_SOCKET_IFNAME"] == given.get("NCCL_SOCKET_IFNAME", f"={launching._LOOPBACK}")


def test_a_launch_inside_a_worker_is_refused_for_its_inherited_environment(environment, tmp_path):
    launching._set_environment(0, job(tmp_path))
    with pytest.raises(RuntimeError, match=r"MASTER_PORT expected.*`env -u TORCHELASTIC_RUN_ID`"):
        launch(len, workers=2, args=("abc",))


# --- Which failure is reported ---


@pytest.mark.parametrize(
    ("codes", "raised", "report"),
    [
        (
            {0: 1, 1: -9},
            {0: "lost"},
            "worker 1 of 2 failed (exit code -9)\nSignal 9 (SIGKILL) received by PID 101",
        ),
        ({0: 1, 1: -6}, {0: "cause"}, "worker 0 of 2 failed (exit code 1)\ncause"),
        ({1: 1}, {1: "cause"}, "worker 1 of 2 failed (exit code 1)\ncause"),
        ({0: 1, 1: 1}, {1: "cause", 0: "lost"}, "worker 1 of 2 failed (exit code 1)\ncause"),
        ({0: 0}, {}, "worker 0 of 2 failed (exit code 0)\nit exited by itself"),
    ],
)  # fmt: skip
def test_the_failure_that_caused_the_others_is_reported(tmp_path, codes, raised, report):
    for second, (rank, text) in enumerate(raised.items()):
        job(tmp_path).file("error", rank).write_text(text)
        os.utime(job(tmp_path).file("error", rank), (second, second))
    processes = [SimpleNamespace(pid=100), SimpleNamespace(pid=101)]
    assert launching._describe_failure(job(tmp_path), processes, codes).startswith(report)


# --- Workers that take too long ---


def test_the_stack_of_a_late_worker_ends_above_launchs_own_calls(tmp_path):
    trace = tmp_path / "trace"
    assert launching._stack(trace).startswith("it was still starting")
    trace.write_text("")
    assert launching._stack(trace).startswith("it wrote no stack: it was stopped")
    trace.write_text(
        'Timeout (0:00:30)!\nThread 0x1 (most recent call first):\n  File "threading.py", line 3 in run\n\n'
        'Thread 0x2 (most recent call first):\n  File "train.py", line 7 in train\n'
        f'  File "{launching.__file__}", line 9 in _work\n  File "spawn.py", line 2 in main\n'
    )
    assert launching._stack(trace) == (
        'Thread 0x2 (most recent call first):\n  File "train.py", line 7 in train'
    )
