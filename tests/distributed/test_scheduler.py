"""One scheduler step an optimizer step: the same learning rates however the global batch is split."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

import pyengine as pe

SAMPLES, GLOBAL_BATCH, EPOCHS = 50, 12, 2


def train(micro_batch: int) -> tuple[list[float], torch.Tensor]:
    """Return the learning rate of every optimizer step, and the parameter at the end."""
    data = torch.arange(1.0, SAMPLES + 1)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    sampler = pe.WindowSampler(SAMPLES, seed=0, micro_batch=micro_batch, global_batch=GLOBAL_BATCH)
    world = sampler.world_size
    plan = pe.plan_batch(global_batch=GLOBAL_BATCH, micro_batch=micro_batch, world_size=world, uneven=True)
    steps = EPOCHS * plan.steps_per_epoch(SAMPLES)
    scheduler = pe.warm_up(CosineAnnealingLR(optimizer, T_max=steps - 3), steps=3, start_factor=0.5)
    sync = pe.GradSync([weight], accumulate=plan.shares[sampler.rank])
    used = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for window in sync.windows(sampler):
            for rows in window:
                sync.backward((weight * data[rows]).sum(), count=len(rows))
            used.append(optimizer.param_groups[0]["lr"])
            sync.step(optimizer, scheduler)
    assert len(used) == steps
    return used, weight.detach()


@pytest.fixture(scope="module")
def one_backward() -> tuple[list[float], torch.Tensor]:
    """A whole window in one backward, on one device."""
    return train(GLOBAL_BATCH)


@pytest.mark.parametrize(("world", "micro_batch"), [(1, 3), (2, 1), (4, 2)])
def test_learning_rates_do_not_depend_on_workers_or_accumulation(ranks, one_backward, world, micro_batch):
    for used, weight in ranks(world).run(train, micro_batch):
        assert used == one_backward[0]
        # The gradient's sum is exact (small integers); 1/count and the update round once each, in fp32, ten
        # times.
        assert torch.allclose(weight, one_backward[1], rtol=20 * 2**-24, atol=0)
