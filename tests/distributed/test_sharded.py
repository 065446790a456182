"""Windows over FSDP2: whatever the mesh and the policy, one gradient of the whole batch, bit for bit."""

from __future__ import annotations

import pytest
import torch
from cases import assert_same, me
from sharded_cases import (
    PLAN,
    WORLDS,
    batch,
    items,
    loss_of,
    right_grads,
    sharded,
    whole_grads,
)

import pyengine as pe


def _trains(kind: str, *, narrow: bool) -> None:
    rank, world = me()
    sync, model = sharded(kind, narrow=narrow)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    records: list[pe.StepRecord] = []
    sync.on_step(records.append)
    loader = [(k, batch(100 * rank + k, items(rank, k))) for k in range(PLAN[rank])]
    seen = 0
    for window in sync.windows(loader):
        for k, data in window:
            sync.backward(loss_of(model, data), count=items(rank, k))
        members = [(r, k) for r in range(world) for k in range(3 * seen, min(3 * seen + 3, PLAN[r]))]
        count = sum(items(*member) for member in members)
        norm = sync.grad_norm()
        sync.unscale_()
        want = right_grads([batch(100 * r + k, items(r, k)) for r, k in members], count)
        assert_same(whole_grads(model), want)
        squares = sum(grad.double().square().sum() for grad in want.values() if grad is not None)
        # Every product with 1/count was rounded to float32, behind the norm.
        torch.testing.assert_close(norm, squares.sqrt(), rtol=2**-23, atol=0)
        sync.step(optimizer)
        assert (records[-1].micro_batches, records[-1].count) == (len(members), count)
        for param in model.parameters():
            param.grad = None
        seen += 1
    assert seen == -(-max(PLAN[:world]) // 3)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("kind", "world"), WORLDS)
def test_integer_gradients_equal_one_big_batch_exactly(ranks, kind, world, narrow):
    ranks(world).run(_trains, kind, narrow=narrow)
