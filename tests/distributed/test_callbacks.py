"""Callbacks and schedulers that fail: the window has been used before they run, so nobody steps it twice."""

from __future__ import annotations

import pytest
import torch
from cases import engine, me, records_of
from ranks import on_ranks
from torch import nn

import pyengine as pe


class _Full(torch.optim.lr_scheduler.LRScheduler):
    """A schedule that fails once, in the second window of one rank."""

    def get_lr(self) -> list[float]:
        if self.last_epoch == 2 and me()[0] == 1:
            raise OSError("no space left on device")
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.parametrize("where", ["callback", "scheduler"])
@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_a_callback_or_schedule_that_fails_leaves_a_window_that_was_stepped_once(kind, where):
    rank, _ = me()
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    sync, forward = engine(kind, model, accumulate=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = _Full(optimizer) if where == "scheduler" else None
    first: list[int] = []
    raised = []

    def full(record: pe.StepRecord) -> None:
        if where == "callback" and record.step == 1 and rank == 1:
            raise OSError("no space left on device")
        first.append(record.step)

    sync.on_step(full)
    records = records_of(sync)
    for window in sync.windows([torch.ones(1, 2)] * 4):
        for x in window:
            sync.backward(forward(x).sum())
        try:
            sync.step(optimizer, scheduler)
            raised.append("")
        except OSError as error:
            raised.append(str(error))
    assert raised == ["", "no space left on device" if rank == 1 else "", "", ""]
    assert first == ([0, 2, 3] if (where, rank) == ("callback", 1) else [0, 1, 2, 3])
    assert [record.step for record in records] == [0, 1, 2, 3]  # the second listener is called all the same
    assert model.weight.tolist() == [[-4.0, -4.0]]  # four steps of 1


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_a_rank_whose_callback_fails_in_a_loops_last_window_meets_the_others_behind_it(kind):
    rank, _ = me()
    model = nn.Linear(2, 1)
    sync, forward = engine(kind, model, accumulate=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    is_full = [rank == 1]

    @sync.on_step
    def full(record: pe.StepRecord) -> None:
        if record.step == 1 and is_full.pop():
            raise OSError("no space left on device")

    steps = []
    for _ in range(2):
        try:
            for window in sync.windows([torch.ones(1, 2)] * 2):
                for x in window:
                    sync.backward(forward(x).sum())
                steps.append(bool(sync.step(optimizer)))
        except OSError:
            steps.append(True)
            sync.synchronize()  # the others compare at the end of their loop
    assert steps == [True] * 4
