"""A statistic of each rank's own gradients, before they are summed over ranks: `Reducer.observers`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe


@pytest.mark.parametrize("wire", [pe.wire.FP32(), pe.wire.BF16()], ids=str)
@pytest.mark.parametrize("accumulator", ["native", "fp32"])
@pytest.mark.parametrize("owner", ["own", "attach"])
@on_ranks(2)
def test_each_rank_s_own_sum_is_seen_before_it_travels(owner, accumulator, wire):
    rank = dist.get_rank()
    model = nn.Linear(3, 1, bias=False, dtype=torch.bfloat16 if accumulator == "fp32" else torch.float32)
    make = pe.attach if owner == "attach" else pe.GradSync
    forward = DistributedDataParallel(model) if owner == "attach" else model
    sync, sums = make(forward, accumulate=2, accumulator=accumulator, wire=wire), []

    def observe(indices, grads, scale):
        squares = sum(grad.double().square().sum() for grad in grads)
        sums.append(float(squares if scale is None else squares / scale.double().square()))

    sync._engine.reducer.observers.append(observe)
    for window in sync.windows(torch.ones(2, 1, 3, dtype=model.weight.dtype) * (1 + rank)):
        for x in window:
            sync.backward(forward(x).sum(), count=1)
        sync.unscale_()
    # Two micro-batches of 1 on rank 0, of 2 on rank 1, three elements; the mean is 1.5.
    assert sum(sums) == 3 * (2.0 + 2.0 * rank) ** 2
    assert model.weight.grad.double().square().sum() == 3 * 1.5**2


def test_exact_sums_cannot_be_observed_and_say_so():
    sync = pe.GradSync(nn.Linear(2, 2), accumulator="exact")
    assert sync._engine.reducer.observers is None
    with pytest.raises(ValueError, match="BucketReducer has no float sums of this rank alone"):
        sync.measure(pe.NoiseScale())
