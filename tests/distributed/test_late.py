"""A host that runs ahead: the device decides the step, and the host reads the outcome in the next window.

The engine works this way on an accelerator. Here the CPU plays the device: only the engine's decision to
wait is turned off, and all other code is the same as on an accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from cases import (
    Integers,
    assert_same,
    comm_of_buckets,
    engine,
    grads,
    integers,
    me,
    mean_of_integers,
    raise_key_error,
    records_of,
)
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import pyengine as pe

KINDS = ("own", "attach")


class NoHostRead(TorchDispatchMode):
    """A dispatch mode that refuses ops which make the host wait for a value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func.overloadpacket._qualified_op_name not in {
            "aten::_local_scalar_dense",
            "aten::nonzero",
            "aten::equal",
        }, "the host reads a value from the device"
        return func(*args, **(kwargs or {}))


def _late(kind: str, model: nn.Module, *, late: bool = True, **options: object) -> tuple[pe.Sync, nn.Module]:
    sync, forward = engine(kind, model, **options)
    sync._engine.is_late = late
    return sync, forward


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)


def _train(kind: str, late: bool, dtype: torch.dtype) -> tuple[list[Tensor], list[Any]]:
    """Train with clipping, a scheduler, a short last window and an inf on one rank; return the results."""
    rank, world = me()
    model = _model(dtype)
    sync, forward = _late(kind, model, late=late, accumulate=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    records = records_of(sync)
    data = [torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * rank + k)) for k in range(14)]
    stepped = []
    for number, window in enumerate(sync.windows(data)):
        for k, x in enumerate(window):
            is_bad = (number, rank, k) == (2, world - 1, 1)
            loss = forward(x.to(dtype)).float().square().sum() * (math.inf if is_bad else 1.0)
            sync.backward(loss, count=1 + rank)
        sync.clip_grad_norm_(0.5)
        stepped.append(sync.step(optimizer, scheduler))
    assert [bool(step) for step in stepped] == [True, True, False, True, True]
    facts = [(r.step, r.micro_batches, r.count, r.loss, r.grad_norm, r.skipped, r.reason) for r in records]
    return list(model.parameters()), [*facts, scheduler.get_last_lr()]


@pytest.mark.parametrize(
    ("kind", "world", "dtype"),
    [("own", 1, torch.bfloat16), ("own", 3, torch.float32), ("attach", 3, torch.bfloat16)],
)
@on_ranks()
def test_parameters_records_and_learning_rate_are_those_of_a_host_that_waits(kind, dtype):
    (late, facts), (waiting, others) = (_train(kind, is_late, dtype) for is_late in (True, False))
    assert all(map(torch.equal, late, waiting))
    assert repr(facts) == repr(others) and len(facts) == 6  # repr, because the bad window's loss is nan


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_the_step_path_reads_nothing_and_each_record_comes_a_window_late(kind):
    model = _model()
    sync, forward = _late(kind, model, accumulate=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    records, counts = records_of(sync), []
    # Let the host read a header only at points where it waits for collectives anyway.
    with (
        mock.patch("pyengine.window.header._host_may_look", lambda *_: False),
        mock.patch("pyengine.window.digest._is_on_device", lambda _: True),
    ):
        for number, window in enumerate(sync.windows([torch.ones(1, 4)] * 8)):
            is_agreed = number >= 2  # ranks agree once on the bucket order, before the second window
            with NoHostRead() if is_agreed else nullcontext():
                for x in window:
                    sync.backward(forward(x).sum(), count=torch.tensor(2.0))
                sync.clip_grad_norm_(1.0)
                sync.step(optimizer)
            counts.append(len(records))
    assert [*counts, len(records)] == [0, 1, 2, 3, 4]


@on_ranks(3)
def test_a_bad_count_moves_nothing_and_is_an_error_on_every_rank_in_the_next_window():
    rank, world = me()
    model = Integers(torch.float32)
    sync, forward = _late("own", model, accumulate=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    before = model.matrix.detach().clone()

    def window(count: float) -> None:
        with sync.accumulate():
            sync.backward(forward(*integers(rank)), count=count)
        sync.step(optimizer)

    window(-1.0 if rank == world - 1 else 3.0)
    assert torch.equal(model.matrix, before)
    with pytest.raises(ValueError, match=r"count must be finite.*rank 2: count of micro-batch 0 is -1\.0"):
        window(3.0)
    sync.abandon()
    assert torch.equal(model.matrix, before)
    window(3.0)
    sync.synchronize()
    assert not torch.equal(model.matrix, before)


@pytest.mark.parametrize("num", [3, 1], ids=["data for all windows", "data for the first alone"])
@on_ranks(2)
def test_one_rank_may_look_at_the_outcome_alone_and_one_without_data_gets_it_with_the_others(num):
    """Rank 0 has data for `num` windows, and a loss of nan in its first one."""
    rank, _ = me()
    model = _model()
    sync, forward = _late("attach", model, accumulate=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    records = records_of(sync)
    for number, window in enumerate(sync.windows([torch.ones(1, 4)] * (3 if rank else num))):
        for x in window:
            sync.backward(forward(x).sum() * (math.nan if (number, rank) == (0, 0) else 1.0))
        stepped = sync.step(optimizer)
        if rank == 1:
            assert bool(stepped) == (number != 0)
    assert [bool(record.reason) for record in records] == [True, False, False]
    assert "rank 0, micro-batch 0 (its loss)" in records[0].reason


@pytest.mark.parametrize(
    ("make", "seen"),
    [(torch.optim.AdamW, [0, -1, 1, -1, 2, -1]), (torch.optim.SGD, [-1, 0, -1, 1, -1, 2])],
    ids=["AdamW", "SGD"],
)
@on_ranks(2)
def test_an_optimizer_whose_step_cannot_be_undone_makes_the_host_wait(make, seen):
    """With another optimizer, a record comes in the next window; -1 marks the end of each step."""
    model = _model()
    sync, forward = _late("own", model, accumulate=1)
    optimizer = make(model.parameters(), lr=0.1)
    events: list[int] = []
    sync.on_step(lambda record: events.append(record.step))
    for window in sync.windows([torch.ones(1, 4)] * 3):
        for x in window:
            sync.backward(forward(x).sum())
        sync.step(optimizer)
        events.append(-1)
    assert events == seen


def _sharded(model: nn.Module) -> pe.Sync:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return pe.attach(model, accumulate=1)


@pytest.mark.parametrize(
    ("make_engine", "make"),
    [
        (partial(pe.GradSync, accumulate=1), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
        (_sharded, torch.optim.AdamW),  # torch's fused SGD does not support DTensors
    ],
    ids=["SGD", "sharded AdamW"],
)
@on_ranks(2)
def test_a_fused_first_step_that_inf_on_one_rank_skips_creates_no_state(make_engine, make):
    rank, _ = me()
    model = _model()
    sync = make_engine(model)
    sync._engine.is_late = True
    params = list(model.parameters())
    optimizer = make(params, fused=True)
    for number, window in enumerate(sync.windows([torch.ones(1, 4)] * 2)):
        for x in window:
            sync.backward(model(x).sum() * (math.inf if (number, rank) == (0, 1) else 1.0))
        sync.step(optimizer)
        assert [param in optimizer.state for param in params] == [number == 1] * len(params)
    for param, state in optimizer.state.items():
        assert state.get("step", 1) == 1
        assert torch.equal(state.get("momentum_buffer", param.grad), param.grad)


@on_ranks(2)
def test_an_abandoned_window_does_not_hide_the_outcome_of_the_one_before():
    model = _model()
    sync, forward = _late("own", model, accumulate=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    records = records_of(sync)
    for number in range(3):
        with suppress(KeyError):
            for _ in range(2):
                with sync.accumulate():
                    if number == 1:
                        raise_key_error()
                    sync.backward(forward(torch.ones(1, 4)).sum())
            sync.step(optimizer)
    sync.synchronize()
    assert [record.step for record in records] == [0, 1]


class _Recorder:
    """A fake side stream, which records whether each of its runs begins inside the last backward."""

    def __init__(self) -> None:
        self.are_in_backward: list[bool] = []
        self.is_in_backward = False

    @contextmanager
    def run(self, tensors: list[Tensor]) -> Iterator[None]:
        self.are_in_backward.append(self.is_in_backward)
        yield


@pytest.mark.parametrize(
    ("kind", "dtype", "wire"),
    [
        ("own", torch.bfloat16, pe.wire.BF16()),
        ("attach", torch.bfloat16, pe.wire.FP32()),
        ("own", torch.float32, pe.wire.BF16(sum="fp32")),
        ("attach", torch.float32, pe.wire.BF16(sum="fp32")),
    ],
)
@on_ranks(2)
def test_where_streams_wait_every_bucket_starts_inside_the_last_backward(kind, dtype, wire):
    rank, world = me()
    model = Integers(dtype)
    options = {"bucket_cap_mb": 1e-5} if kind == "own" else {}
    sync, forward = engine(kind, model, accumulate=2, wire=wire, **options)
    comm, recorder = comm_of_buckets(sync), _Recorder()
    sync._engine.comm.is_stream_ordered = comm.is_stream_ordered = True
    comm._side_stream = recorder
    for window in sync.windows([integers(2 * rank + k) for k in range(2)]):
        for k, batch in enumerate(window):
            loss = forward(*batch)
            recorder.is_in_backward = k == 1
            sync.backward(loss, count=4)  # 1 / (8 world) is a power of two: exact also on a narrow wire
            recorder.is_in_backward = False
        sync.unscale_()
    assert_same(grads(model), mean_of_integers(model, [integers(k) for k in range(2 * world)], 8.0 * world))
    assert all(recorder.are_in_backward)
    assert len(recorder.are_in_backward) >= 2
