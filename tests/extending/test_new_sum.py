"""A new kind of sum is one class and its dtype in two tables; this one sums in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pyengine as pe
from pyengine.gradients import settings, sums
from pyengine.gradients.sums import FlatSum


class Float64Sum(FlatSum):
    """Sums gradients of any dtype in float64."""

    def deposit_(self, grads, /, *, first, nonfinite):
        if first:
            self.flat.zero_()
        slots = zip(self._plan.offsets, self._plan.numels, grads.tensors, strict=True)
        for index, (offset, numel, grad) in enumerate(slots):
            if grad is not None:
                self.flat[offset : offset + numel] += grad.reshape(-1)
                nonfinite[index] |= ~torch.isfinite(grad).all()


@pytest.fixture
def float64(monkeypatch):
    monkeypatch.setitem(sums.FLAT_SUMS, torch.float64, Float64Sum)
    monkeypatch.setitem(settings.SUM_DTYPES, "float64", torch.float64)
    monkeypatch.setattr(settings, "KINDS", (*settings.KINDS, "float64"))


@pytest.mark.parametrize("wire", [pe.wire.FP32(), pe.wire.BF16()], ids=str)
def test_a_sum_in_float64_keeps_what_float32_loses(float64, wire):
    model = nn.Linear(1, 1, bias=False)
    sync = pe.GradSync(model, accumulate=3, accumulator="float64", wire=wire)
    for window in sync.windows(torch.tensor([2.0**30, 1.0, -(2.0**30)])):
        for x in window:
            sync.backward(model(x.reshape(1, 1)).sum(), count=1)
        sync.unscale_()
        third = torch.tensor(1 / 3).to(wire.dtype if wire.folds_count else torch.float32)
        assert model.weight.grad.item() == pytest.approx(third.item(), rel=1e-7)


def test_in_float32_the_same_window_ends_at_zero():
    model = nn.Linear(1, 1, bias=False)
    sync = pe.GradSync(model, accumulate=3)
    for window in sync.windows(torch.tensor([2.0**30, 1.0, -(2.0**30)])):
        for x in window:
            sync.backward(model(x.reshape(1, 1)).sum(), count=1)
        sync.unscale_()
        assert model.weight.grad.item() == 0.0
