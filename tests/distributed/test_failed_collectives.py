"""A failed collective raises on its rank, and no step uses the incomplete gradients."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from cases import FutureWork, comm_of_buckets, engine, me
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

CASES = {
    "own": ("own", torch.float32, {}),
    "own, int8": ("own", torch.float32, {"wire": pe.wire.Int8()}),
    "attach, bf16 wire": ("attach", torch.float32, {"wire": pe.wire.BF16()}),
    "attach, int8": ("attach", torch.float32, {"wire": pe.wire.Int8()}),
    "attach, bf16 sums, unused": ("attach-unused", torch.bfloat16, {}),
    "attach, exact, unused": ("attach-unused", torch.float32, {"accumulator": "exact"}),
}


def _broken() -> FutureWork:
    """Return a collective that fails after it was launched."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_exception(RuntimeError("connection lost"))
    return FutureWork(future)


def _break(comm: Any, numel: int, exchange: str = "all_to_all") -> None:
    """Make `exchange` fail, and all-reduces of at least `numel` elements, which are not headers."""
    all_reduce = comm.all_reduce
    comm.all_reduce = lambda flat: _broken() if flat.numel() >= numel else all_reduce(flat)
    setattr(comm, exchange, lambda *_: _broken())


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30, dtype=dtype), nn.Linear(30, 1, dtype=dtype))


@pytest.mark.parametrize("wire", [pe.wire.FP32(), pe.wire.BF16(), pe.wire.Int8()], ids=str)
@on_ranks(2)
def test_the_hook_raises_what_broke_its_collective_as_stock_ddp_does(wire):
    ddp = DistributedDataParallel(_model())
    state = pe.HookState(wire=wire)
    ddp.register_comm_hook(state, pe.comm_hook)
    _break(state.comm(torch.device("cpu")), 100)
    with pytest.raises(RuntimeError, match="connection lost") as found:
        ddp(torch.ones(2, 40)).sum().backward()
    assert "Unable to cast" not in str(found.value)


@pytest.mark.parametrize(
    ("case", "exchange"),
    [*((case, "all_to_all") for case in CASES), ("own, int8", "all_gather"), ("attach, int8", "all_gather")],
)
@on_ranks(2)
def test_a_failed_collective_raises_and_nothing_is_stepped_with_half_reduced_gradients(case, exchange):
    kind, dtype, options = CASES[case]
    model = _model(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    sync, forward = engine(kind, model, accumulate=2, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    _break(comm_of_buckets(sync), 30, exchange)
    x = torch.ones(2, 40, dtype=dtype)
    with pytest.raises(RuntimeError, match="connection lost"):
        for window in sync.windows([x, x]):
            for batch in window:
                sync.backward(forward(batch).sum().float())
            sync.unscale_()
    for _ in range(2):  # every further step fails, too
        says = "were not reduced: a collective failed on this rank|connection lost"
        with pytest.raises(RuntimeError, match=says):
            sync.step(optimizer)
    with pytest.raises(RuntimeError, match="from a checkpoint"):
        next(sync.windows([x, x]))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@on_ranks(2)
def test_an_interrupt_while_a_rank_waits_for_ddps_last_bucket_reaches_the_caller():
    """The other rank, whose collectives are complete, steps."""
    rank, _ = me()
    model = DistributedDataParallel(_model())
    sync = pe.attach(model, accumulate=1)
    comm = comm_of_buckets(sync)
    if rank == 0:
        all_reduce, interrupt = comm.all_reduce, Mock(side_effect=KeyboardInterrupt)
        comm.all_reduce = lambda flat: (
            Mock(wraps=all_reduce(flat), wait=interrupt) if flat.numel() > 100 else all_reduce(flat)
        )
    with pytest.raises(KeyboardInterrupt) if rank == 0 else nullcontext():
        for window in sync.windows([torch.ones(2, 40)]):
            for batch in window:
                sync.backward(model(batch).sum())
            sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
            break
    if rank == 0:
        with pytest.raises(RuntimeError, match="from a checkpoint"):
            next(sync.windows([torch.ones(2, 40)]))


@pytest.mark.slow  # unfinished collectives end only after the group's timeout
@on_ranks(2)
def test_a_rank_that_cannot_start_a_later_collective_of_a_bucket_raises_on_all():
    """Rank 1 has no memory for the second collective of an exact sum."""
    rank, _ = me()
    group = dist.new_group(timeout=timedelta(seconds=5))
    model = DistributedDataParallel(_model(), process_group=group)
    sync = pe.attach(model, accumulate=2, accumulator="exact", stall_after_s=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    if rank == 1:
        comm_of_buckets(sync).all_reduce = Mock(side_effect=MemoryError("no memory"))
    for _ in range(2):
        with suppress(RuntimeError, MemoryError), sync.accumulate():  # raised here, or at the window's end
            sync.backward(model(torch.ones(2, 40)).sum())
    with pytest.raises((RuntimeError, MemoryError)) as error:
        sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert "no memory" in str(error.value) or "a collective failed" in str(error.value)
