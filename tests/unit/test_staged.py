"""`Staged` launches several collectives in turn as one work; every wait raises the error of a collective."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pyengine.comm.base import Work
from pyengine.comm.staged import Staged
from pyengine.gradients.ddp.futures import StagedBuckets

CPU = torch.device("cpu")


class _Round:
    """A collective that logs its start and every wait for it."""

    def __init__(self, name: str, log: list[str], error: Exception | None = None) -> None:
        self._name, self._log, self._error = name, log, error
        log.append(f"start {name}")

    def wait(self) -> None:
        self._log.append(f"wait {self._name}")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[None]:
        raise AssertionError("nobody asks")


def _rounds(name: str, log: list[str], error: Exception | None = None, num: int = 2) -> Iterator[Work]:
    yield _Round(f"{name}0", log, error)
    for number in range(1, num):
        yield _Round(f"{name}{number}", log)
    log.append(f"end {name}")


def test_a_step_waits_for_one_collective_and_starts_the_next():
    log: list[str] = []
    work = Staged(_rounds("a", log), 2, CPU)
    assert log == ["start a0"] and work.rounds_left == 1 and not work.is_completed()
    work.step()
    assert log == ["start a0", "wait a0", "start a1"] and work.rounds_left == 0 and work.is_completed()
    assert not work.get_future().done()
    work.wait()
    work.wait()
    work.step()
    assert log == ["start a0", "wait a0", "start a1", "wait a1", "end a"]
    assert work.get_future().done() and work.is_completed()


def test_asking_whether_work_is_staged_runs_no_code_of_python():
    """Every launch of a bucket checks all earlier buckets, and `isinstance` with a protocol runs Python."""
    assert type(Staged) is type


def test_what_breaks_a_collective_is_raised_each_time_and_reaches_the_future():
    log: list[str] = []
    work = Staged(_rounds("a", log, RuntimeError("lost")), 2, CPU)
    for wait in (work.wait, work.wait, work.get_future().wait):
        with pytest.raises(RuntimeError, match="lost"):
            wait()
    assert work.is_completed() and log == ["start a0", "wait a0"]


def test_a_work_without_collectives_is_done():
    work = Staged(iter(()), 0, CPU)
    assert work.is_completed() and work.rounds_left == 0 and work.get_future().done()


class _Bucket:
    def __init__(self, index: int, is_last: bool) -> None:
        self._index, self._is_last = index, is_last

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last


def _drive(
    buckets: list[_Bucket], broken: int = -1, num: int = 2
) -> tuple[list[str], list[torch.futures.Future[torch.Tensor]]]:
    staged, log, futures = StagedBuckets(), [], []
    for number, bucket in enumerate(buckets):
        name = "abc"[number]
        error = RuntimeError("lost") if number == broken else None
        work = Staged(_rounds(name, log, error, num), num, CPU)

        def finish(work: Staged = work) -> torch.Tensor:
            work.wait()
            return torch.ones(1)

        futures.append(staged.add(bucket, work, finish))
    assert all(future.done() for future in futures)
    return log, futures


@pytest.mark.parametrize(
    ("num", "order"), [(2, "a0 b0 a1 c0 b1 c1"), (3, "a0 b0 a1 c0 b1 a2 c1 b2 c2")], ids=["two", "three"]
)
def test_the_hook_launches_a_bucket_s_next_collective_behind_the_first_of_a_later_bucket(num, order):
    log, _ = _drive([_Bucket(0, False), _Bucket(1, False), _Bucket(2, True)], num=num)
    assert [line.removeprefix("start ") for line in log if line.startswith("start")] == order.split()
    assert [line for line in log if line.startswith("end")] == ["end a", "end b", "end c"]


def test_buckets_that_are_all_number_0_as_in_a_static_graphs_first_backward_come_to_their_end():
    log, _ = _drive([_Bucket(0, False)] * 3)
    assert [line for line in log if line.startswith("end")] == ["end a", "end b", "end c"]


def test_a_bucket_that_fails_fails_alone():
    _, futures = _drive([_Bucket(0, False), _Bucket(1, True)], broken=0)
    with pytest.raises(RuntimeError, match="lost"):
        futures[0].wait()
    assert torch.equal(futures[1].wait(), torch.ones(1))
