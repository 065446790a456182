"""Finite sums whose mean is not finite: detected after the division by the count, before any step."""

from __future__ import annotations

import pytest
import torch
from cases import engine, records_of
from ranks import on_ranks
from torch import nn

import pyengine as pe

FP32, FP16 = pe.wire.FP32(), pe.wire.FP16()


@pytest.mark.parametrize(
    ("kind", "fused", "dtype", "wire", "gradient", "count"),
    [
        ("own", False, torch.float32, FP32, 1.0, 1e-40),
        ("own", True, torch.float32, FP32, 1e30, 1e-10),
        ("own", False, torch.float32, FP16, 4e4, 0.5),  # 4e4 on two ranks, count 1: 8e4 is beyond 65504
        ("own-native", True, torch.float32, FP32, 1.0, 1e-40),
        ("own-native", False, torch.float16, FP32, 1e3, 1e-3),
        ("attach", True, torch.float16, FP32, 1e3, 1e-3),
        ("attach", False, torch.float32, FP32, 1e30, 1e-10),
        ("attach", False, torch.float32, FP16, 4e4, 0.5),
    ],
)
@on_ranks(2)
def test_a_mean_out_of_range_skips_the_step_on_every_rank(kind, fused, dtype, wire, gradient, count):
    model = nn.Linear(3, 1, bias=False).to(dtype)
    sync, forward = engine(kind, model, accumulate=1, wire=wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    records = records_of(sync)
    before = model.weight.detach().clone()
    stepped = []
    for value, divisor in [(gradient, count), (1.0, 1.0)]:
        with sync.accumulate():
            sync.backward(forward(torch.full((1, 3), value, dtype=dtype)).sum().float(), count=divisor)
        stepped.append(bool(sync.step(optimizer)))
        if len(stepped) == 1:
            assert torch.equal(model.weight, before)
    assert stepped == [False, True] and model.weight.isfinite().all()
    reason = records[0].reason
    assert "finite sums leave the range" in reason or "inf or nan in the gradient of 'weight'" in reason


@on_ranks(2)
def test_kept_gradients_that_leave_the_range_skip_the_step():
    model = nn.Linear(2, 1, bias=False)
    sync = pe.GradSync(model, accumulate=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepped = []
    for number in range(3):
        with sync.accumulate():
            sync.backward(model(torch.full((1, 2), 1.0 if number == 2 else 2e38)).sum())
        if number == 0:
            sync.unscale_()
        else:
            stepped.append(bool(sync.step(optimizer)))
    assert stepped == [False, True]
