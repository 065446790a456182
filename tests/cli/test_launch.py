"""`launch`: results by rank, errors of workers, and a clean end after Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path

import forked
import pytest
import torch.distributed as dist
from command import TRAIN
from processes import left, living

from pyengine import launch
from pyengine.comm import launching


@pytest.fixture(autouse=True)
def _from_the_server(monkeypatch):
    """Fork workers from a process that has imported torch, because starting new ones takes seconds."""
    monkeypatch.setattr(launching, "start_processes", forked.start_processes)


def rank_and(value: int) -> tuple[int, int]:
    return dist.get_rank(), value


@pytest.mark.parametrize("are_forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_results_come_by_rank(monkeypatch, are_forked):
    if not are_forked:
        monkeypatch.undo()
    assert launch(rank_and, workers=2, args=(7,)) == [(0, 7), (1, 7)]


def fail_on_rank_1_which_ends_last() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        Finalize(None, time.sleep, args=(5,), exitpriority=0)
        raise ValueError("cause")
    time.sleep(0.5)
    raise ValueError("consequence")


def test_first_error_is_told_with_worker_and_traceback_whoever_ends_first():
    told = r"worker 1 of 2 failed(?s:.)*fail_on_rank_1_which(?s:.)*ValueError: cause"
    with pytest.raises(RuntimeError, match=told):
        launch(fail_on_rank_1_which_ends_last, workers=2)


def kill_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def tarry(folder: Path) -> None:
    (folder / f"{dist.get_rank()}").write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


@pytest.mark.slow
def test_workers_that_take_too_long_are_told_with_their_stacks_and_nothing_is_left(tmp_path):
    launch(rank_and, workers=2, args=(7,))  # makes the server import torch, so that workers start at once
    with pytest.raises(
        TimeoutError, match="^timeout_s=5 has expired, and 2 of 2 workers were still running"
    ) as caught:
        launch(tarry, workers=2, args=(tmp_path,), timeout_s=5)
    first, second = str(caught.value).split("worker 1: ")
    assert "in tarry" in first and second.startswith("it wrote no stack: it was stopped")
    for rank in "01":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / rank).read_text()), 0)


def leave_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(0)
    time.sleep(60)


def return_a_lambda_on_rank_1() -> Callable[[], None] | None:
    return (lambda: None) if dist.get_rank() == 1 else None


KILLED = r"exit code -9\)\nSignal 9 \(SIGKILL\) received by PID \d+; the kernel sends it"
FAILS = [
    (leave_on_rank_1, r"exit code 0\)\nit exited by itself"),
    (return_a_lambda_on_rank_1, r"(?s:.)*pickle"),
]


@pytest.mark.parametrize(
    ("fn", "why"), [(kill_rank_1, KILLED), *(pytest.param(*case, marks=pytest.mark.slow) for case in FAILS)]
)
def test_a_worker_that_fails_is_named_ends_the_others_and_leaves_nothing(tmp_path, monkeypatch, fn, why):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match=rf"^worker 1 of 2 failed \({why}"):
        launch(fn, workers=2)
    assert list(tmp_path.iterdir()) == []


def test_handlers_and_mask_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert launch(rank_and, workers=1, args=(7,)) == [(0, 7)]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("workers", [0, -1, 1.5, True])
def test_number_of_workers_is_checked(workers):
    with pytest.raises(ValueError, match=rf"workers={workers}: expected a whole number of at least 1"):
        launch(rank_and, workers=workers)


def test_function_that_no_other_process_can_find_is_refused(monkeypatch):
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", __file__, raising=False
    )  # as if this were a script
    with pytest.raises(ValueError, match="expected a function at the top level of an importable module"):
        launch(lambda: None, workers=1)


def _training(*prefix: str) -> subprocess.Popen[str]:
    """Start a long training run in its own session, and wait for its first step."""
    command = [*prefix, *TRAIN, "--model", "gpt", "--json", "--steps", "10000"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    while '"event": "step"' not in process.stdout.readline():
        assert process.poll() is None, process.communicate()[1]
    return process


@pytest.mark.slow
def test_interrupt_ends_every_process_with_one_line():
    process = _training()
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == "interrupted: every worker has ended; nothing was saved\n"
    assert left(living, str(process.pid)) == []


@pytest.mark.slow
def test_workers_end_with_their_launcher_also_in_a_job_that_ignores_interrupts():
    process = _training("sh", "-c", 'trap "" INT; exec "$@"', "sh")
    process.kill()
    process.communicate(timeout=20)  # waits for workers, too: they share the pipe
    assert left(living, str(process.pid)) == []
