"""Counts read ahead: every loss is the mean over its own items, over all ranks and micro-batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import engine, me, records_of
from ranks import on_ranks
from recipes import RECIPES, Batch, Heads, gradient_of, micro_batch
from torch.distributed.fsdp import fully_shard

import pyengine as pe

ACCUMULATE = 3
PLAN = [7, 0, 5, 1]  # micro-batches by rank: short windows, and a rank without data


def _windows(world: int) -> list[list[int]]:
    longest = max(PLAN[:world])
    return [
        [100 * r + k for r in range(world) for k in range(start, min(start + ACCUMULATE, PLAN[r]))]
        for start in range(0, longest, ACCUMULATE)
    ]


def _train(kind: str, recipe_name: str, dtype: torch.dtype, **options: Any) -> None:
    rank, world = me()
    recipe = RECIPES[recipe_name]
    model = twin = Heads(dtype)
    if kind == "sharded":  # ranks that run out of data run padding
        forward = model = fully_shard(Heads(dtype))
        sync = pe.attach(model, accumulate=ACCUMULATE)
    else:
        sync, forward = engine(kind, model, accumulate=ACCUMULATE, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if kind == "sharded" else 0.125)
    records = records_of(sync)
    loader = [micro_batch(100 * rank + k) for k in range(PLAN[rank])]
    expected = _windows(world)
    for seeds, window in zip(expected, sync.windows(loader, count=recipe.count), strict=True):
        batches = [micro_batch(seed) for seed in seeds]
        loss, want = gradient_of(recipe, twin, batches)
        assert sync.totals == _totals(recipe.count, batches)
        for batch in window:
            sync.backward(recipe.losses(forward, batch))
        sync.unscale_()
        for p, grad in zip(model.parameters(), want, strict=True):
            _assert_near(p.grad, grad, dtype)
        assert sync.step(optimizer)
        tolerance = 16 * torch.finfo(dtype).eps
        assert records[-1].loss == pytest.approx(loss, rel=tolerance)
        assert records[-1].count == next(iter(sync.totals.values()))
        for param in model.parameters() if kind == "sharded" else ():
            param.grad = None


def _totals(count: Any, batches: list[Batch]) -> dict[str, float]:
    given = [count(batch) for batch in batches]
    named = [counts if isinstance(counts, dict) else {"count": counts} for counts in given]
    return {name: sum(float(counts[name]) for counts in named) for name in named[0]}


def _assert_near(got: torch.Tensor | None, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare, allowing 64 roundings to `dtype` of terms as large as the largest gradient; None means 0."""
    bound = 64 * torch.finfo(dtype).eps * want.abs().max()
    whole = got.full_tensor() if hasattr(got, "full_tensor") else got
    error = want if whole is None else whole.double() - want
    assert (error.abs() <= bound).all(), (got, want)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_the_gradient_of_the_whole_window(ranks, recipe, world):
    ranks(world).run(_train, "own", recipe, torch.float32)


@pytest.mark.parametrize("kind", ["own-native", "own-exact", "attach", "attach-view", "sharded"])
@pytest.mark.parametrize("recipe", ["several heads", "prompt mean"])
def test_weighed_losses_over_every_owner_of_the_gradients(ranks, recipe, kind):
    ranks(3).run(_train, kind, recipe, torch.float32)


@pytest.mark.parametrize("kind", ["own", "attach"])
def test_weighed_losses_with_narrow_parameters_and_a_narrow_wire(ranks, kind):
    ranks(2).run(_train, kind, "several heads", torch.bfloat16, wire=pe.wire.BF16())


@pytest.mark.parametrize("kind", ["own", "sharded"])
@on_ranks(2)
def test_a_loss_of_which_nothing_was_counted_adds_nothing_even_nan_and_a_window_of_it_alone_is_skipped(kind):
    model = Heads()
    if kind == "sharded":
        sync: pe.Sync = pe.attach(fully_shard(model), accumulate=2)
    else:
        sync = pe.GradSync(model, accumulate=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    records = records_of(sync)
    for window in sync.windows(range(4), count=lambda index: {"ce": 0, "aux": int(index > 1)}):
        for index in window:
            ce, _, aux = model(micro_batch(index)["x"])
            sync.backward({"ce": ce.sum() * math.nan, "aux": aux})
        assert bool(sync.step(optimizer)) == bool(sync.totals["aux"])
    assert [record.count for record in records] == [0.0, 4.0]
