"""Counts read ahead over a sharded model, whose ranks run padding where they have run out."""

from __future__ import annotations

import pytest
import torch
from cases import me
from recipes import RECIPES, Heads, gradient_of, micro_batch
from torch.distributed.fsdp import fully_shard

import pyengine as pe

ACCUMULATE = 3
PLAN = [7, 3, 5]  # micro-batches by rank: short windows, and padding


def _trains(name: str) -> None:
    rank, world = me()
    recipe, twin, model = RECIPES[name], Heads(), fully_shard(Heads())
    sync = pe.attach(model, accumulate=ACCUMULATE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = [micro_batch(100 * rank + k) for k in range(PLAN[rank])]
    seen = 0
    for window in sync.windows(loader, count=recipe.count):
        members = [(r, k) for r in range(world) for k in range(3 * seen, min(3 * seen + 3, PLAN[r]))]
        batches = [micro_batch(100 * r + k) for r, k in members]
        for batch in window:
            sync.backward(recipe.losses(model, batch))
        sync.unscale_()
        _, want = gradient_of(recipe, twin, batches)
        assert next(iter(sync.totals.values())) > 0
        for param, grad in zip(model.parameters(), want, strict=True):
            got = torch.zeros(()) if param.grad is None else param.grad.full_tensor()
            bound = 64 * torch.finfo(torch.float32).eps * grad.abs().max()
            assert ((got.double() - grad).abs() <= bound).all()
        sync.step(optimizer)
        for param in model.parameters():
            param.grad = None
        seen += 1
    assert seen == 3


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("recipe", ["several heads", "prompt mean"])
def test_weighed_losses_over_a_sharded_model(ranks, recipe, world):
    ranks(world).run(_trains, recipe)


def _trains_with_nothing() -> list[float | None]:
    """Train a window of which nothing is counted, then one with something."""
    model = fully_shard(Heads())
    sync = pe.attach(model, accumulate=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    records: list[pe.StepRecord] = []
    sync.on_step(records.append)
    for window in sync.windows(range(4), count=lambda index: {"ce": int(index > 1), "aux": 0}):
        for index in window:
            ce, _, aux = model(micro_batch(index)["x"])
            sync.backward({"ce": ce.sum(), "aux": aux})
        assert bool(sync.step(optimizer)) == bool(sync.totals["ce"])
    return [record.count for record in records]


def test_a_window_without_anything_counted_is_skipped_over_a_sharded_model(ranks):
    assert ranks(2).run(_trains_with_nothing) == [[0.0, 4.0]] * 2
