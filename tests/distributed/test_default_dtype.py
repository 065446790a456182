"""`torch.set_default_dtype` changes nothing, whether it is called before or after an engine is made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from cases import assert_same, grads, me
from sharded_cases import Chain, all_batches, loss_of, own_batches, right_grads, shard, whole_grads
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

OWNERS = ("own", "ddp", "fsdp")
DTYPES = [torch.bfloat16, torch.float16, torch.float64]


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _made(owner: str, accumulator: str) -> tuple[pe.Sync, nn.Module, nn.Module]:
    """Return an engine, the module to call, and the model."""
    model = Chain()
    options = {"accumulate": 2, "accumulator": accumulator, "nonfinite": "drop_micro_batch"}
    if owner == "own":
        return pe.GradSync(model, **options), model, model
    if owner == "fsdp":
        model = shard(model, "nested")
        return pe.attach(model, **options), model, model
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    return pe.attach(ddp, **options), ddp, model


def _whole(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients, of a sharded model unsharded."""
    is_sharded = any(isinstance(param, DTensor) for param in model.parameters())
    return whole_grads(model) if is_sharded else grads(model)


def _a_window_is_right(owner: str, accumulator: str, early: torch.dtype, late: torch.dtype) -> None:
    _, world = me()
    with _default(early):
        sync, forward, model = _made(owner, accumulator)
    with _default(late):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for window in sync.windows(own_batches(2), count=lambda _: 3.0):
            for data in window:
                sync.backward(loss_of(forward, data))
            sync.clip_grad_norm_(math.inf)
            sync.unscale_()
            assert_same(_whole(model), right_grads(all_batches([2] * world), 6 * world))
            assert bool(sync.step(optimizer))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
@pytest.mark.parametrize("owner", OWNERS)
def test_an_engine_made_under_another_default_dtype_is_right(ranks, owner, accumulator, dtype):
    ranks(2).run(_a_window_is_right, owner, accumulator, dtype, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("owner", OWNERS)
def test_a_default_dtype_that_changes_between_windows_is_right(ranks, owner, dtype):
    ranks(2).run(_a_window_is_right, owner, "fp32", torch.float32, dtype)
