"""A model that is cast, moved or converted after its engine was created: noticed when a window begins."""

from __future__ import annotations

import pytest
import torch
from cases import Integers, assert_same, grads, integers, me, mean_of_integers
from ranks import on_ranks
from torch import nn

import pyengine as pe


def _there_and_back(model: nn.Module, dtype: torch.dtype, how: str) -> None:
    if how == "cast":
        model.to(torch.float64).to(dtype)
    elif how == "share_memory":
        model.share_memory()
    else:
        for p in model.parameters():
            p.data = p.data.clone()
            if p.grad is not None:
                p.grad.data = p.grad.data.clone()


@pytest.mark.parametrize("where", ["between windows", "inside a window", "before the step"])
@pytest.mark.parametrize(
    ("accumulator", "dtype", "how"),
    [
        ("fp32", torch.float32, "cast"),
        ("fp32", torch.bfloat16, "clone"),
        ("native", torch.bfloat16, "share_memory"),
        ("exact", torch.float32, "clone"),
        ("exact", torch.bfloat16, "cast"),
    ],
)
@on_ranks(2)
def test_a_cast_or_move_there_and_back_changes_nothing(accumulator, dtype, how, where):
    rank, world = me()
    model = Integers(dtype)
    sync = pe.GradSync(model, accumulate=2, accumulator=accumulator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number in range(3):
        if number and where == "between windows":
            _there_and_back(model, dtype, how)
        for k in range(2):
            if number and k == 1 and where == "inside a window":
                _there_and_back(model, dtype, how)
            with sync.accumulate():
                sync.backward(model(*integers(10 * rank + k, 4)), count=4)
        if number and where == "before the step":
            _there_and_back(model, dtype, how)
        sync.unscale_()
        batches = [integers(10 * r + k, 4) for r in range(world) for k in range(2)]
        assert_same(grads(model), mean_of_integers(model, batches, 8 * world))
        assert sync.step(optimizer)


@pytest.mark.parametrize("accumulator", ["fp32", "native", "exact"])
@pytest.mark.parametrize("how", ["cast", "channels_last"])
def test_a_model_that_stays_converted_is_refused_by_name(accumulator, how):
    model = nn.Conv2d(2, 3, 3)
    sync = pe.GradSync(model, accumulate=1, accumulator=accumulator)
    x = torch.ones(1, 2, 4, 4)
    if how == "cast":
        model.to(torch.bfloat16)
        x = x.bfloat16()
    else:
        model.to(memory_format=torch.channels_last)
    what = "parameter '(weight|bias)' is .* now, and was float32 .* when this engine was made"
    with pytest.raises(ValueError, match=what), sync.accumulate():
        sync.backward(model(x).sum())
    sync.close()
    with pe.GradSync(model, accumulate=1, accumulator=accumulator) as sync, sync.accumulate():
        sync.backward(model(x).sum())
