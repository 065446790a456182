"""Callbacks and schedulers that fail: the window has been used before they run, so nobody steps it twice."""

from __future__ import annotations

import pytest
import torch
from cases import engine, me
from torch import nn

import pyengine as pe


class _Full(torch.optim.lr_scheduler.LRScheduler):
    """A schedule that fails once, in the second window of one rank."""

    def get_lr(self) -> list[float]:
        if self.last_epoch == 2 and me()[0] == 1:
            raise OSError("no space left on device")
        return [group["lr"] for group in self.optimizer.param_groups]


def _fails(kind: str, where: str) -> tuple[list[str], list[int], list[int], list[float]]:
    """Return what each window raised, the records of two listeners, and where the parameters ended."""
    rank, _ = me()
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    sync, forward = engine(kind, model, accumulate=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = _Full(optimizer) if where == "scheduler" else None
    first: list[int] = []
    second: list[int] = []
    raised = []

    def full(record: pe.StepRecord) -> None:
        if where == "callback" and record.step == 1 and rank == 1:
            raise OSError("no space left on device")
        first.append(record.step)

    sync.on_step(full)
    sync.on_step(lambda record: second.append(record.step))
    for window in sync.windows([torch.ones(1, 2)] * 4):
        for x in window:
            sync.backward(forward(x).sum())
        try:
            sync.step(optimizer, scheduler)
            raised.append("")
        except OSError as error:
            raised.append(str(error))
    return raised, first, second, model.weight.flatten().tolist()


@pytest.mark.parametrize("where", ["callback", "scheduler"])
@pytest.mark.parametrize("kind", ["own", "attach"])
def test_a_callback_or_schedule_that_fails_leaves_a_window_that_was_stepped_once(ranks, kind, where):
    other, failing = ranks(2).run(_fails, kind, where)
    assert failing[0] == ["", "no space left on device", "", ""] and other[0] == [""] * 4
    assert other[1] == other[2] == failing[2] == [0, 1, 2, 3]  # the second listener is called all the same
    assert failing[1] == ([0, 2, 3] if where == "callback" else [0, 1, 2, 3])
    assert other[3] == failing[3] == [-4.0, -4.0]  # four steps of 1, on both


def _fails_last(kind: str) -> list[bool]:
    """One rank's callback fails in the last window of its loop, which it leaves so."""
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
    return steps


@pytest.mark.parametrize("kind", ["own", "attach"])
def test_a_rank_whose_callback_fails_in_a_loops_last_window_meets_the_others_behind_it(ranks, kind):
    assert ranks(2).run(_fails_last, kind) == [[True] * 4] * 2
