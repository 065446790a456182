"""A callback that fails in the last window of a loop; tests/faults has failures in the middle of a loop."""

from __future__ import annotations

import pytest
import torch
from cases import engine, me, records_of
from ranks import on_ranks
from torch import nn

import pyengine as pe


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_a_rank_whose_callback_fails_in_a_loops_last_window_meets_the_others_behind_it(kind):
    rank, _ = me()
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    sync, forward = engine(kind, model, accumulate=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    is_full = [rank == 1]

    @sync.on_step
    def full(record: pe.StepRecord) -> None:
        if record.step == 1 and is_full.pop():
            raise OSError("no space left on device")

    records, steps = records_of(sync), []
    for _ in range(2):
        try:
            for window in sync.windows([torch.ones(1, 2)] * 2):
                for x in window:
                    sync.backward(forward(x).sum())
                steps.append(bool(sync.step(optimizer)))
        except OSError:
            steps.append(True)
            sync.synchronize()  # the other rank compares at the end of its loop
    assert steps == [True] * 4
    assert [record.step for record in records] == [0, 1, 2, 3]  # the second listener is still called
    assert model.weight.tolist() == [[-4.0, -4.0]]  # four steps of 1
