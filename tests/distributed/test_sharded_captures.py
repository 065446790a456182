"""`torch.autograd.grad` beside the backward of a sharded model brings nothing, and is refused nowhere."""

from __future__ import annotations

import pytest
import torch
from cases import assert_same, me
from sharded_cases import all_batches, loss_of, own_batches, right_grads, sharded, whole_grads

import pyengine as pe


def _backward(sync: pe.Sync, loss: torch.Tensor, how: str) -> None:
    if how == "backward":
        sync.backward(loss, count=3)
    else:
        with sync.micro_batch(count=3):
            loss.backward()


def _brings_nothing(kind: str, how: str, options: dict[str, str]) -> None:
    _, world = me()
    sync, model = sharded(kind, **options)
    for window in sync.windows(own_batches(3)):
        for data in window:
            loss = loss_of(model, data)
            other = loss_of(model, data, extra=True) * torch.inf
            scale, sometimes = model.scale, model.sometimes  # what the forward has shown
            torch.autograd.grad(other, [scale, sometimes])
            torch.autograd.grad(loss, scale, retain_graph=True)
            _backward(sync, loss, how)
        sync.unscale_()
        assert_same(whole_grads(model), right_grads(all_batches([3] * world), 9 * world))
        assert bool(sync.step(torch.optim.SGD(model.parameters(), lr=0.0)))


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulator": "exact"}, {"nonfinite": "raise"}, {"nonfinite": "drop_micro_batch"}],
    ids=str,
)
@pytest.mark.parametrize("how", ["backward", "block"])
@pytest.mark.parametrize("kind", ["flat", "nested", "replicate"])
def test_a_gradient_that_is_only_computed_brings_nothing(ranks, kind, how, options):
    ranks(2).run(_brings_nothing, kind, how, options)
