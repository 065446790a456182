"""The table of docs/batch.md on schedules that come from Accelerate:
the same learning rate at every optimizer step.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
)

scheduler_module = pytest.importorskip("accelerate.scheduler")

PROCESSES, STEPS = 4, 10
N = PROCESSES * STEPS
SCHEDULES = {
    "T_max": (lambda o: CosineAnnealingLR(o, T_max=N), lambda o: CosineAnnealingLR(o, T_max=STEPS)),
    "milestones": (lambda o: MultiStepLR(o, [8, 24]), lambda o: MultiStepLR(o, [2, 6])),
    "warm-up": (lambda o: LinearLR(o, 0.1, total_iters=20), lambda o: LinearLR(o, 0.1, total_iters=5)),
    "gamma": (lambda o: ExponentialLR(o, 0.9), lambda o: ExponentialLR(o, 0.9**PROCESSES)),
    "lambda": (
        lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: LambdaLR(o, lambda step: 1 / (1 + step * PROCESSES)),
    ),
}


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_lengths_over_the_number_of_processes_give_the_same_learning_rates(monkeypatch, name):
    monkeypatch.setattr(
        scheduler_module, "AcceleratorState", lambda: SimpleNamespace(num_processes=PROCESSES)
    )
    there, here = an_optimizer(), an_optimizer()
    there.step_was_skipped = False
    theirs = scheduler_module.AcceleratedScheduler(SCHEDULES[name][0](there), there)
    ours = SCHEDULES[name][1](here)
    for _ in range(STEPS):
        there.step(), here.step()
        theirs.step(), ours.step()
        # The recursive forms multiply forty times instead of ten: a few roundings of 2**-53 each.
        assert here.param_groups[0]["lr"] == pytest.approx(there.param_groups[0]["lr"], rel=1e-12, abs=1e-15)
