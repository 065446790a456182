"""Workers of this machine: how many it takes, the interface they connect over,
and what they find in their environment.
"""

from __future__ import annotations

import errno
import multiprocessing as mp
import os
import resource
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyengine import launch
from pyengine.comm import local_workers


def job(folder: Path, *, workers: int = 2) -> local_workers._Job:
    return local_workers._Job(len, ("abc",), workers, 1, "lo7", "run", folder)


# --- How many ---


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5}, raising=False)


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("workers", [65, 99999, 2**40])
def test_more_workers_than_cores_can_serve_are_refused_before_any_is_started(workers):
    with pytest.raises(
        ValueError, match=rf"^workers={workers}: need at most 64 on the 2 cores of this machine"
    ):
        launch(len, workers=workers, args=("abc",))


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("workers", [1, 2, 8, 64])
def test_a_few_dozen_workers_may_share_a_core(workers):
    local_workers.check_number(workers)


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(("workers", "limit", "need"), [(2, 40, 70), (8, 87, 88)])
def test_a_low_limit_of_open_files_is_told_before_any_worker_is_started(monkeypatch, workers, limit, need):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    with pytest.raises(
        RuntimeError, match=rf"need {need} open files .* may open {limit}: `ulimit -n {need}`"
    ):
        launch(len, workers=workers, args=("abc",))


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("limit", [70, 1024, resource.RLIM_INFINITY])
def test_enough_open_files_are_enough(monkeypatch, limit):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    local_workers.check_number(2)


def test_when_the_machine_starts_no_more_those_that_were_started_are_ended(monkeypatch, tmp_path):
    started = []

    def start(*arguments, **options):
        if started:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(mp.get_context("spawn").Process(target=time.sleep, args=(60,)))
        started[0].start()
        return SimpleNamespace(processes=[started[0]])

    monkeypatch.setattr(local_workers, "start_processes", start)
    with pytest.raises(RuntimeError, match=r"^workers=3: worker 1 could not be started \(.*unavailable\)"):
        local_workers.run(len, ("abc",), workers=3, method="spawn")
    assert started[0].exitcode == -signal.SIGTERM


# --- Over which interface ---


def test_the_loopback_interface_is_found_by_what_it_is():
    name = local_workers.loopback()
    assert name in [each for _, each in socket.if_nameindex()]
    flags = Path("/sys/class/net", name, "flags")
    assert not flags.exists() or int(flags.read_text(), 16) & 0x9 == 0x9  # IFF_UP, IFF_LOOPBACK


def test_without_a_loopback_interface_nothing_is_started(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", list)
    with pytest.raises(RuntimeError, match="^no loopback interface is up.*ip link set lo up"):
        launch(len, workers=1, args=("abc",))


# --- What workers find ---


@pytest.fixture
def environment(monkeypatch):
    """An empty environment."""
    monkeypatch.setattr(os, "environ", {})
    return os.environ


def test_workers_find_what_torchrun_would_give_them(environment, tmp_path):
    local_workers._set_environment(1, job(tmp_path, workers=3))
    assert {name: environment[name] for name in ("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK")} == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "ROLE_RANK": "1",
        "GROUP_RANK": "0",
    }
    assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
    assert (environment["MASTER_ADDR"], environment["TORCHELASTIC_RUN_ID"]) == ("127.0.0.1", "run")


def test_the_place_of_another_launchers_store_is_forgotten(environment, tmp_path):
    environment |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    local_workers._set_environment(0, job(tmp_path))
    assert {"MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} & set(environment) == set()


@pytest.mark.parametrize("given", [{}, {"GLOO_SOCKET_IFNAME": "eth5", "NCCL_SOCKET_IFNAME": "ib0"}], ids=str)
def test_groups_use_the_loopback_unless_another_interface_was_named(environment, tmp_path, given):
    environment |= given
    local_workers._set_environment(0, job(tmp_path))
    assert environment["GLOO_SOCKET_IFNAME"] == given.get("GLOO_SOCKET_IFNAME", "lo7")
    assert environment["NCCL_SOCKET_IFNAME"] == given.get("NCCL_SOCKET_IFNAME", "=lo7")


def test_what_a_worker_starts_is_told_that_it_has_inherited_a_place(environment, tmp_path):
    local_workers._set_environment(0, job(tmp_path))
    with pytest.raises(RuntimeError, match=r"MASTER_PORT expected.*`env -u TORCHELASTIC_RUN_ID`"):
        launch(len, workers=2, args=("abc",))


# --- Which failure is told ---


def ended(*codes: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(exitcode=code, pid=100 + rank) for rank, code in enumerate(codes)]


@pytest.mark.parametrize(
    ("codes", "failed", "raised", "told"),
    [
        (
            (1, -9),
            (0, 1),
            {0: "lost"},
            "worker 1 of 2 failed (exit code -9)\nSignal 9 (SIGKILL) received by PID 101",
        ),
        ((1, -6), (0, 1), {0: "cause"}, "worker 0 of 2 failed (exit code 1)\ncause"),
        ((-15, 1), (1,), {1: "cause"}, "worker 1 of 2 failed (exit code 1)\ncause"),
        ((1, 1), (0, 1), {1: "cause", 0: "lost"}, "worker 1 of 2 failed (exit code 1)\ncause"),
        ((0, -15), (0,), {}, "worker 0 of 2 failed (exit code 0)\nit ended by itself"),
    ],
)  # fmt: skip
def test_the_failure_that_took_the_others_along_is_told(tmp_path, codes, failed, raised, told):
    for second, (rank, text) in enumerate(raised.items()):
        job(tmp_path).error(rank).write_text(text)
        os.utime(job(tmp_path).error(rank), (second, second))
    assert local_workers._describe(failed, ended(*codes), job(tmp_path)).startswith(told)


# --- Those that take too long ---


def test_of_a_late_workers_stack_the_lines_before_the_launchers_are_told(tmp_path):
    trace = tmp_path / "trace"
    trace.write_text(
        f'Stack (most recent call first):\n  File "train.py", line 7 in train\n'
        f'  File "{local_workers.__file__}", line 9 in _work\n  File "spawn.py", line 2 in main\n'
    )
    assert (
        local_workers._stands(trace) == 'Stack (most recent call first):\n  File "train.py", line 7 in train'
    )
    trace.write_text("")
    assert local_workers._stands(trace).startswith("it did not answer: it was stopped")


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "30", True])
def test_a_timeout_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match=r"^timeout_s=.*: need seconds above 0"):
        launch(len, workers=1, args=("abc",), timeout_s=value)
