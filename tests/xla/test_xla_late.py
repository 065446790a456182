"""The host reads the outcome of a window late, and no error is lost."""

from __future__ import annotations

import pytest
import torch
from xla_cases import device

import pyengine as pe


class _Toy:
    """An engine with one parameter whose gradient is 1, and the number of reads from the device."""

    def __init__(self) -> None:
        self.param = torch.nn.Parameter(torch.ones(3).to(device()))
        self.sync = pe.GradSync([self.param], accumulate=1)
        self.optimizer = torch.optim.SGD([self.param], lr=0.25)
        self.window()  # the first step of a parameter reads

    def window(self, scheduler=None, *, factor: float = 1.0, count: float = 1) -> None:
        with self.sync.accumulate():
            self.sync.backward((self.param * torch.tensor([factor, 1, 1]).to(device())).sum(), count=count)
            self.sync.step(self.optimizer, scheduler)

    @staticmethod
    def reads() -> int:
        import torch_xla.debug.metrics as met

        found = met.metric_data("TransferFromDeviceTime")
        return found[0] if found else 0


def _nobody_waits(rank: int) -> tuple[int, int, int]:
    toy = _Toy()
    before = toy.reads()
    for _ in range(70):
        toy.window()
    after, unread = toy.reads(), len(toy.sync._engine.verdicts._unread)
    toy.sync.synchronize()
    return after - before, unread, toy.reads() - after


def test_without_anybody_waiting_outcomes_are_read_together_every_64_windows(replicas):
    ((read, unread, at_the_end),) = replicas(1).run(_nobody_waits)
    assert (read, unread, at_the_end) == (63, 7, 7)


def _scheduled(rank: int) -> tuple[list[float], list[float]]:
    toy = _Toy()
    scheduler = torch.optim.lr_scheduler.StepLR(toy.optimizer, step_size=1, gamma=0.5)
    rates, values = [], []
    for factor in (1.0, float("inf"), 1.0, 1.0):
        toy.window(scheduler, factor=factor)
        rates.append(toy.optimizer.param_groups[0]["lr"])
        values.append(toy.param.detach().cpu()[1].item())
    toy.sync.synchronize()
    return rates, values


def test_a_scheduler_steps_before_the_next_update_and_not_for_a_skipped_one(replicas):
    for rates, values in replicas(2).run(_scheduled):
        assert rates == [0.25, 0.125, 0.125, 0.0625]  # the last window's outcome is not known yet
        assert values == [0.5, 0.5, 0.375, 0.3125]


def _records_on_rank_0(rank: int) -> tuple[list[tuple[int, bool]], list[tuple[int, bool, str]]]:
    toy, records = _Toy(), []
    if rank == 0:
        toy.sync.on_step(records.append)
    for factor in (1.0, 1.0, float("nan"), 1.0, 1.0):
        toy.window(factor=factor if rank == 1 else 1.0)
    early = [(record.step, record.skipped) for record in records]
    toy.sync.synchronize()
    return early, [(record.step, record.skipped, record.reason) for record in records]


def test_records_on_one_replica_come_a_window_late_and_stop_at_one_that_replicas_must_talk_about(replicas):
    (early, records), (_, others) = replicas(2).run(_records_on_rank_0)
    assert others == []
    assert early == [(1, False), (2, False)]
    assert [(step, skipped) for step, skipped, _ in records] == [(s, s == 3) for s in (1, 2, 3, 4, 5)]
    assert "rank 1, micro-batch 0 (its loss)" in records[2][2]


def _bad_count(rank: int) -> tuple[str, list[float]]:
    toy = _Toy()
    toy.window(count=-1 if rank == 1 else 1)
    toy.window()
    with pytest.raises(ValueError, match="need|count") as caught:
        toy.sync.synchronize()
    toy.sync.synchronize()
    return str(caught.value), toy.param.detach().cpu().tolist()


def test_a_bad_count_moves_nothing_and_is_an_error_on_every_replica_in_the_end(replicas):
    for text, value in replicas(2).run(_bad_count):
        assert "rank 1: count of micro-batch 0 is -1.0" in text
        assert value == [0.5] * 3


def _record(rank: int) -> pe.StepRecord:
    toy, records = _Toy(), []
    toy.sync.on_step(records.append)
    toy.window(count=1 + rank, factor=5.0)
    toy.sync.synchronize()
    return records[0]


def test_a_record_holds_what_all_replicas_brought(replicas):
    for record in replicas(2).run(_record):
        assert (record.count, record.micro_batches, record.collectives) == (3, 2, 1)
        assert record.loss == pytest.approx(2 * 7 * 0.75 / 3)
        assert record.grad_norm == pytest.approx(2 / 3 * 27**0.5)


def _abandon(rank: int) -> list[float]:
    toy = _Toy()
    toy.sync.close()
    toy.sync = pe.GradSync([toy.param], accumulate=2)
    with pytest.raises(KeyError), toy.sync.accumulate():
        toy.sync.backward(toy.param.sum())
        raise KeyError
    for window in toy.sync.windows(range(2)):
        for _ in window:
            toy.sync.backward(toy.param.sum())
        toy.sync.step(toy.optimizer)
    return toy.param.detach().cpu().tolist()


def test_an_abandoned_window_leaves_nothing_behind(replicas):
    assert replicas(2).run(_abandon) == [[0.5] * 3] * 2


def _keep(rank: int) -> list[list[float]]:
    toy, grads = _Toy(), []
    for _ in range(2):
        with toy.sync.accumulate():
            toy.sync.backward((toy.param * 3).sum(), count=4)
            toy.sync.unscale_()
            grads.append(toy.param.grad.cpu().tolist())
    return grads


def test_gradients_that_the_caller_keeps_are_added_to_the_next_window(replicas):
    assert replicas(2).run(_keep) == [[[0.75] * 3, [1.5] * 3]] * 2
