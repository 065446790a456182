"""nonfinite="drop_micro_batch": what is not finite leaves sum and count, and the window lives."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from cases import (
    Inject,
    Integers,
    assert_alike,
    assert_same,
    engine,
    error_of,
    grads,
    integers,
    me,
    mean_of_integers,
    recorded_warnings,
    records_of,
)
from ranks import on_ranks
from sharded_cases import Chain, batch, items, right_grads, shard, whole_grads
from torch import Tensor, nn

import pyengine as pe
from pyengine.gradients import dropping

ACCUMULATE = 3
Place = tuple[int, int]  # rank, micro-batch


def _poison(at: int, value: float, grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad.view(-1)[at] = value
    return grad


def _window(
    sync: pe.Sync, model: Integers, forward: nn.Module, bad: dict[Place, tuple[str, int, float]]
) -> None:
    """Run one window's backwards; a `bad` micro-batch has a value at an element of a parameter's gradient."""
    rank, _ = me()
    for window in sync.windows([integers(10 * rank + k) for k in range(ACCUMULATE)]):
        for k, (x, t) in enumerate(window):
            handle = None
            if (rank, k) in bad:
                name, at, value = bad[rank, k]
                handle = model.get_parameter(name).register_hook(partial(_poison, at, value))
            sync.backward(forward(x, t), count=3)
            if handle is not None:
                handle.remove()
        break


def _dropped(kind: str, dtype: torch.dtype, bad: dict[Place, tuple[str, int, float]]) -> str:
    _, world = me()
    model = Integers(dtype)
    sync, forward = engine(kind, model, accumulate=ACCUMULATE, nonfinite="drop_micro_batch")
    records = records_of(sync)
    with recorded_warnings() as messages:
        _window(sync, model, forward, bad)
        sync.unscale_()
    kept = [(r, k) for r in range(world) for k in range(ACCUMULATE) if (r, k) not in bad]
    want = mean_of_integers(model, [integers(10 * r + k) for r, k in kept], 3 * len(kept))
    assert_same(grads(model), want)
    assert bool(sync.step(torch.optim.SGD(model.parameters(), lr=0.0)))
    (record,) = records
    assert not record.skipped and record.dropped == len(bad) and record.count == 3 * len(kept)
    assert any(record.reason in message for message in messages)
    sync.close()
    return record.reason


@pytest.mark.parametrize(
    ("kind", "dtype", "world", "k", "at"),
    [
        ("own", torch.bfloat16, 1, 1, 65),
        ("own", torch.float32, 2, 0, 0),
        ("own", torch.bfloat16, 3, 2, 130),
        ("own-exact", torch.float32, 2, 0, 0),
        ("own-exact", torch.bfloat16, 3, 2, 130),
        ("attach", torch.bfloat16, 1, 0, 0),
        ("attach", torch.float32, 3, 2, 130),
        ("attach-view", torch.bfloat16, 2, 0, 0),
        ("attach-unused", torch.bfloat16, 3, 2, 130),
        ("attach-static", torch.float32, 2, 1, 65),
    ],
)
def test_a_window_goes_on_as_if_a_bad_micro_batch_had_not_been(ranks, kind, dtype, world, k, at):
    where = (world - 1, k)
    reasons = ranks(world).run(_dropped, kind, dtype, {where: ("long", at, math.inf)})
    reason = f"dropped for inf or nan: rank {world - 1}, micro-batch {k} (the gradient of 'long')"
    assert set(reasons) == {reason}


@pytest.mark.parametrize("kind", ["own", "attach"])
def test_every_bad_micro_batch_of_a_window_is_named_with_its_parameter(ranks, kind):
    bad = {(0, 0): ("matrix", 0, math.nan), (1, 2): ("scalar", 0, -math.inf), (1, 0): ("bias", 2, math.nan)}
    reasons = ranks(2).run(_dropped, kind, torch.float32, bad)
    for (rank, k), (name, *_) in bad.items():
        assert f"rank {rank}, micro-batch {k} (the gradient of '{name}')" in reasons[0]
    assert reasons[0] == reasons[1]


def _items(rank: int, k: int) -> int:
    return 1 + k + 2 * rank


@pytest.mark.parametrize(
    ("kind", "ahead", "stop"),
    [
        ("own", True, None),
        ("own", False, 2),
        ("own-exact", True, 2),
        ("attach", True, None),
        ("attach", True, 2),
    ],
)
@on_ranks(2)
def test_a_dropped_count_leaves_a_divisor_that_was_read_ahead_and_one_that_was_loaded(kind, ahead, stop):
    """With `stop`, go on from a state behind so many micro-batches."""
    rank, world = me()
    batches = [integers(10 * rank + k, _items(rank, k)) for k in range(ACCUMULATE)]
    count = (lambda batch: {"loss": len(batch[0])}) if ahead else None
    state: dict[str, Any] | None = None
    for first, end in [(0, stop), (stop, None)] if stop else [(0, None)]:
        model = Integers(torch.float32)
        sync, forward = engine(kind, model, accumulate=ACCUMULATE, nonfinite="drop_micro_batch")
        if state is not None:
            sync.load_state_dict(state)
        for window in sync.windows(batches[first:], count=count):
            for k, (x, t) in enumerate(window, first):
                loss = forward(x, t) * (math.nan if (rank, k) == (1, 0) else 1)
                sync.backward(loss, **({} if ahead else {"count": len(x)}))
                if k + 1 == end:
                    state = sync.state_dict()
                    break
            break
        if end is not None:
            sync.close()
    sync.unscale_()
    kept = [(r, k) for r in range(world) for k in range(ACCUMULATE) if (r, k) != (1, 0)]
    want = [integers(10 * r + k, _items(r, k)) for r, k in kept]
    assert_same(grads(model), mean_of_integers(model, want, sum(_items(r, k) for r, k in kept)))
    records = records_of(sync)
    with recorded_warnings():
        assert sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert records[0].dropped == 1


@on_ranks(2)
def test_counts_of_several_losses_are_refused_on_every_rank():
    model = Integers(torch.float32)
    sync, _ = engine("own", model, accumulate=2, nonfinite="drop_micro_batch")
    rank, _ = me()
    loader = [] if rank == 1 else [integers(0)]
    assert error_of(lambda: next(iter(sync.windows(loader, count=lambda _: {"ce": 3, "aux": 1})))).startswith(
        "rank 0: count: use nonfinite='skip' or 'raise' with counts of several losses"
    )


@on_ranks(2)
def test_a_window_of_bad_micro_batches_only_is_skipped():
    rank, _ = me()
    model = Integers(torch.float32)
    sync, forward = engine("own", model, accumulate=ACCUMULATE, nonfinite="drop_micro_batch")
    records = records_of(sync)
    before = [p.detach().clone() for p in model.parameters()]
    _window(sync, model, forward, {(rank, k): ("long", 1, math.nan) for k in range(ACCUMULATE)})
    assert not sync.step(torch.optim.SGD(model.parameters(), lr=1.0))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    sync.close()
    reason, dropped = records[0].reason, records[0].dropped
    assert reason.startswith("dropped for inf or nan: rank 0, micro-batch 0")
    assert dropped == 2 * ACCUMULATE


@on_ranks(2)
def test_a_loss_scale_backs_off_for_what_was_dropped_before_a_narrow_wire():
    model = Integers(torch.float32)
    options = {"wire": pe.wire.BF16(), "nonfinite": "drop_micro_batch"}
    sync, forward = engine("own", model, accumulate=ACCUMULATE, **options)
    sync.scaler = pe.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scales = []
    for bad in ({(1, 1): ("long", 5, math.inf)}, {}):
        with recorded_warnings():
            _window(sync, model, forward, bad)
            assert sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
        scales.append(sync.scaler.get_scale())
    sync.close()
    assert scales == [4.0, 8.0]


@pytest.mark.filterwarnings("ignore:window 0. dropped")
def test_a_loss_that_is_not_finite_is_dropped_with_finite_gradients():
    weight = nn.Parameter(torch.ones(3))
    sync = pe.GradSync([("weight", weight)], accumulate=2, nonfinite="drop_micro_batch")
    records = records_of(sync)
    for window in sync.windows([0.0, math.inf]):
        for offset in window:
            sync.backward(weight.sum() + offset)
        sync.step(torch.optim.SGD([weight], lr=1.0))
    assert torch.equal(weight, torch.zeros(3)) and records[0].loss == 3.0
    assert records[0].reason.endswith("micro-batch 1 (its loss)")
    sync.close()


@pytest.mark.filterwarnings("ignore:window 0. dropped")
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_block_of_several_backwards_is_dropped_whole(monkeypatch, runs_ahead):
    monkeypatch.setattr(dropping, "runs_ahead", lambda device: runs_ahead)
    weight = nn.Parameter(torch.ones(3))
    sync = pe.GradSync([("weight", weight)], accumulate=2, nonfinite="drop_micro_batch")
    for window in sync.windows([math.nan, 1.0]):
        for factor in window:
            with sync.micro_batch(count=2) as micro_batch:
                weight.sum().backward()
                with micro_batch.last_backward():
                    (weight * factor).sum().backward()
        sync.unscale_()
    assert torch.equal(weight.grad, torch.ones(3))
    sync.close()


def test_exact_sums_replay_no_statistics_of_a_dropped_micro_batch():
    def run(batches: list[Tensor]) -> nn.BatchNorm1d:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        exact = pe.Exact(micro_batches=3)
        sync = pe.GradSync(model, accumulate=3, accumulator=exact, nonfinite="drop_micro_batch")
        for window in sync.windows(batches):
            for x in window:
                sync.backward(model(x).square().sum(), count=len(x))
            sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
        sync.close()
        return model[0]

    good = [torch.randn(4, 2, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    with pytest.warns(UserWarning, match="micro-batch 1"):
        got = run([good[0], torch.full((4, 2), math.nan), good[1]])
    want = run(good)
    for name, value in want.state_dict().items():
        assert torch.equal(got.state_dict()[name], value), name
    assert torch.equal(got.weight, want.weight)


@pytest.mark.parametrize(
    ("kind", "world", "narrow", "k", "accumulator"),
    [
        ("flat", 1, False, 0, "exact"),
        ("flat", 3, True, 2, "fp32"),
        ("nested", 2, True, 1, "exact"),
        ("hsdp", 4, False, 2, "fp32"),
        ("replicate", 2, False, 0, "fp32"),
    ],
)
@on_ranks()
def test_windows_of_sharded_models_go_on_without_a_bad_micro_batch(kind, narrow, k, accumulator):
    rank, world = me()
    where = world - 1, k
    model = shard(Chain(), kind, narrow=narrow)
    sync = pe.attach(model, accumulate=ACCUMULATE, accumulator=accumulator, nonfinite="drop_micro_batch")
    records = records_of(sync)
    for window in sync.windows([batch(10 * rank + k, items(rank, k)) for k in range(ACCUMULATE)]):
        for number, (x, t) in enumerate(window):
            output = model(x)
            if (rank, number) == where:
                output = Inject.apply(output, math.nan)
            sync.backward((output.to(t.dtype) * t).sum(), count=len(x))
        sync.unscale_()
        got = whole_grads(model)
        with recorded_warnings():
            assert sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    kept = [(r, number) for r in range(world) for number in range(ACCUMULATE) if (r, number) != where]
    count = sum(items(*place) for place in kept)
    assert_same(got, right_grads([batch(10 * r + number, items(r, number)) for r, number in kept], count))
    assert (records[0].dropped, records[0].count) == (1, count)
    sync.close()
    reason = records[0].reason
    assert_alike(reason)
    assert f"rank {world - 1}, micro-batch {k} (" in reason and "'first.weight'" in reason


@on_ranks(2)
def test_sums_that_cannot_be_taken_back_cannot_drop():
    options = {"accumulate": 2, "nonfinite": "drop_micro_batch"}
    with pytest.raises(ValueError, match="from which it cannot be removed again: use accumulator='fp32'"):
        pe.GradSync(Integers(torch.float32), accumulator="native", **options)
    with pytest.raises(ValueError, match="before it is known to be finite.*use 'all'"):
        pe.attach(shard(Chain(), "flat"), defer="none", **options)
