"""torch's default dtype and device have no effect, whether set before or after an engine is created."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from cases import assert_same, me
from ranks import on_ranks
from sharded_cases import Chain, all_batches, loss_of, own_batches, right_grads, shard, whole_grads
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe


@contextmanager
def _default(of_torch: torch.dtype | str | None) -> Iterator[None]:
    """Set torch's default dtype, or its default device by name; tensors on "meta" have no values to read."""
    if not isinstance(of_torch, torch.dtype):
        with nullcontext() if of_torch is None else torch.device(of_torch):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(of_torch)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _made(owner: str, accumulator: str, model: nn.Module) -> tuple[pe.Sync, nn.Module, nn.Module]:
    options = {"accumulate": 2, "accumulator": accumulator}
    if owner == "own":
        return pe.GradSync(model, **options), model, model
    if owner == "fsdp":
        model = shard(model, "nested")
        return pe.attach(model, **options), model, model
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    return pe.attach(ddp, **options), ddp, model


@pytest.mark.parametrize(
    ("owner", "accumulator", "early", "late"),
    [
        ("own", "fp32", "meta", "meta"),
        ("own", "exact", torch.float64, torch.float64),
        ("own", "exact", "meta", "meta"),
        ("ddp", "fp32", torch.float16, torch.float16),
        ("ddp", "exact", "meta", "meta"),
        ("fsdp", "fp32", "meta", "meta"),
        ("fsdp", "exact", torch.bfloat16, torch.bfloat16),
        ("own", "fp32", None, "meta"),
        ("ddp", "fp32", None, torch.float64),
        ("fsdp", "fp32", None, "meta"),
    ],
    ids=str,
)
@on_ranks(2)
def test_a_window_is_right_under_another_default_of_torch(owner, accumulator, early, late):
    """The engine is created under the default `early`, and trains under `late`."""
    _, world = me()
    model, batches, want = Chain(), own_batches(2), right_grads(all_batches([2] * world), 6 * world)
    with _default(early):
        sync, forward, model = _made(owner, accumulator, model)
    with _default(late):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for window in sync.windows(batches, count=lambda _: 3.0):
            for data in window:
                sync.backward(loss_of(forward, data))
            sync.clip_grad_norm_(math.inf)
            sync.unscale_()
            with torch.device("cpu"):  # for the tensors that the comparison creates
                assert_same(whole_grads(model), want)
            assert bool(sync.step(optimizer))
