"""Loops in the manner of DDP and FSDP: `no_sync` and `set_requires_gradient_sync` say where windows end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from cases import (
    Collectives,
    Integers,
    assert_same,
    engine,
    grads,
    integers,
    me,
    mean_of_integers,
    raise_key_error,
)
from ranks import on_ranks
from sharded_cases import loss_of, own_batches, right_window, sharded, whole_grads
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

# Number of micro-batches in each window, by rank: unequal, a single one, or longer on another rank.
PLAN = [[3, 1, 2], [1, 3, 1], [2, 2, 4], [4, 1, 1]]


def _seeds(rank: int, window: int) -> list[int]:
    return [100 * rank + 10 * window + k for k in range(PLAN[rank][window])]


def _no_sync(sync: pe.Sync, forward: nn.Module, seeds: list[int]) -> None:
    """Run DDP's loop with a block per micro-batch."""
    for seed in seeds:
        with nullcontext() if seed == seeds[-1] else sync.no_sync():
            sync.backward(forward(*integers(seed)), count=3)


def _one_block(sync: pe.Sync, forward: nn.Module, seeds: list[int]) -> None:
    """Run the example in DDP.no_sync's docstring: one block around all micro-batches but the last."""
    with sync.no_sync():
        for seed in seeds[:-1]:
            sync.backward(forward(*integers(seed)), count=3)
    sync.backward(forward(*integers(seeds[-1])), count=3)


def _setter(sync: pe.Sync, forward: nn.Module, seeds: list[int]) -> None:
    """Run FSDP2's loop."""
    for seed in seeds:
        sync.set_requires_gradient_sync(seed == seeds[-1])
        sync.backward(forward(*integers(seed)), count=3)


def _late(sync: pe.Sync, forward: nn.Module, seeds: list[int]) -> None:
    """Run forwards outside of the block, because only backwards matter."""
    losses = [forward(*integers(seed)) for seed in seeds]
    with sync.no_sync():
        for loss in losses[:-1]:
            sync.backward(loss, count=3)
    sync.backward(losses[-1], count=3)


def _flushed(sync: pe.Sync, forward: nn.Module, seeds: list[int]) -> None:
    """End the window with `flush`, as if the end of the data had not been known before."""
    sync.set_requires_gradient_sync(False)
    for seed in seeds:
        sync.backward(forward(*integers(seed)), count=3)
    sync.flush()


LOOPS: dict[str, Callable[[pe.Sync, nn.Module, list[int]], None]] = {
    "no_sync": _no_sync,
    "one block": _one_block,
    "setter": _setter,
    "late": _late,
    "flushed": _flushed,
}


@pytest.mark.parametrize(
    ("kind", "world", "loop", "wrapped"),
    [
        ("own", 1, "no_sync", True),
        ("own", 2, "one block", False),
        ("own", 2, "flushed", False),
        ("own-exact", 3, "setter", True),
        ("attach", 2, "setter", False),
        ("attach", 3, "late", False),
        ("attach", 2, "flushed", True),
        ("attach-view", 3, "no_sync", True),
    ],
)
@on_ranks()
def test_a_loop_of_torchs_manner_gives_the_mean_of_its_windows(kind, loop, wrapped):
    rank, world = me()
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=5)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = sync.wrap(sgd) if wrapped else None
    if PLAN[rank][0] == 1:
        sync.set_requires_gradient_sync(True)  # else a first window of one micro-batch looks like a mistake
    for window in range(3):
        LOOPS[loop](sync, forward, _seeds(rank, window))
        assert sync.is_sync_step and sync.window == window
        sync.unscale_()
        seeds = [seed for r in range(world) for seed in _seeds(r, window)]
        assert_same(grads(model), mean_of_integers(model, list(map(integers, seeds)), 3 * len(seeds)))
        if optimizer is None:
            sync.step(sgd)
        else:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_with_one_micro_batch_a_window_a_bare_backward_is_one():
    rank, world = me()
    model = Integers(torch.float32)
    sync = pe.GradSync(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number in range(3):
        sync.backward(model(*integers(10 * rank + number)), count=3)
        sync.unscale_()
        batches = [integers(10 * r + number) for r in range(world)]
        assert_same(grads(model), mean_of_integers(model, batches, 3 * world))
        sync.step(optimizer)
    for window in sync.windows([integers(rank)]):
        for x, t in window:
            sync.backward(model(x, t), count=3)
        sync.step(optimizer)
        with pytest.raises(RuntimeError, match="backward after window 3 was sent"):
            sync.backward(model(x, t), count=3)
    sync.backward(model(*integers(rank)), count=3)
    sync.step(optimizer)
    assert sync.window == 4


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_nothing_crosses_the_network_inside_no_sync(kind):
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=3)
    seen = []
    for window in range(4):
        for k in range(3):
            with nullcontext() if k == 2 else sync.no_sync(), Collectives() as collectives:
                sync.backward(forward(*integers(k)))
            if window != 1:  # in window 1, DDP rebuilds its buckets before its first forward
                seen.append(collectives.names)
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert [bool(names) for names in seen] == [False, False, True] * 3


def _no_sync_over(sync: pe.Sync, forward: nn.Module, batches: list[torch.Tensor]) -> None:
    for index, x in enumerate(batches):
        with nullcontext() if index + 1 == len(batches) else sync.no_sync():
            sync.backward(forward(x).square().sum(), count=len(x))


@on_ranks(2)
def test_buffers_of_ddp_travel_in_such_a_loop_too():
    """DDP's buffers are broadcast once per window, even if no forward was known to be the last."""
    rank, world = me()
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ddp = DistributedDataParallel(model)
    sync = pe.attach(ddp, accumulate=4)
    for _ in range(3):
        _no_sync_over(sync, ddp, [torch.randn(4, 2) + rank for _ in range(2 + rank)])
        sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
    means = [torch.zeros(2) for _ in range(world)]
    torch.distributed.all_gather(means, next(model[0].parameters())[0].detach())
    assert all(torch.equal(mean, means[0]) for mean in means)


@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks(2)
def test_sync_is_on_again_behind_a_block_that_raised(where):
    model = nn.Linear(1, 1, bias=False)
    sync = pe.GradSync(model, accumulate=4)

    def backward(value: float, *, fails: bool = False) -> None:
        loss = model(torch.full((1, 1), value)).sum()
        if fails:
            loss.register_hook(raise_key_error)
        sync.backward(loss)

    with sync.no_sync():
        backward(1.0)
    with pytest.raises(KeyError), sync.no_sync():
        if where == "forward":
            raise KeyError
        backward(50.0, fails=True)
    backward(3.0)
    sync.unscale_()
    # An exception in a forward leaves the window as it is, one in a backward drops it, as under accumulate().
    assert model.weight.grad.item() == (2.0 if where == "forward" else 3.0)
    sync.step(torch.optim.SGD(model.parameters(), lr=0.0))


@pytest.mark.parametrize("loop", ["no_sync", "setter"])
@on_ranks(2)
def test_such_loops_over_a_sharded_model(loop):
    """FSDP2 reduces only in the window's last backward."""
    sync, model = sharded("nested")
    sync.set_requires_gradient_sync(True)
    for _ in range(2):
        for k, data in enumerate(own_batches(3)):
            if loop == "setter":
                sync.set_requires_gradient_sync(k == 2)
            with sync.no_sync() if loop == "no_sync" and k < 2 else nullcontext():
                sync.backward(loss_of(model, data), count=3)
        sync.unscale_()
        assert_same(whole_grads(model), right_window())
        model.zero_grad()


# What is refused.


def _engine(**options: object) -> tuple[nn.Module, pe.Sync]:
    model = nn.Linear(2, 1)
    return model, pe.GradSync(model, **options)


@pytest.mark.parametrize(
    ("accumulate", "message"),
    [
        (2, r"last micro-batch of window 0 \(accumulate=2\): sync in this"),
        (1, r"\(accumulate=1\): .* of your longest window"),
    ],
)
def test_no_sync_in_the_windows_last_micro_batch_is_refused_and_the_window_goes_on(accumulate, message):
    model, sync = _engine(accumulate=accumulate)
    with sync.no_sync():
        for _ in range(accumulate - 1):
            sync.backward(model(torch.ones(1, 2)).sum())
        with pytest.raises(RuntimeError, match=message):
            sync.backward(model(torch.ones(1, 2)).sum())
    sync.backward(model(torch.ones(1, 2)).sum())
    assert sync.step(torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize("loop", ["windows", "accumulate"])
def test_inside_a_loop_that_knows_the_last_micro_batch_both_are_refused(loop):
    model, sync = _engine(accumulate=2)
    message = "inside a micro-batch of sync.windows or sync.accumulate"
    window = next(sync.windows([0, 1])) if loop == "windows" else range(2)
    for _ in window:
        with sync.accumulate() if loop == "accumulate" else nullcontext():
            with pytest.raises(RuntimeError, match=message), sync.no_sync():
                pass
            with pytest.raises(RuntimeError, match=message):
                sync.set_requires_gradient_sync(True)
            sync.backward(model(torch.ones(1, 2)).sum())
    assert sync.step(torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize("loop", ["windows", "accumulate"])
def test_a_loop_of_ours_is_refused_while_sync_is_off_and_runs_where_it_is_on(loop):
    model, sync = _engine(accumulate=2)
    with sync.no_sync(), pytest.raises(RuntimeError, match=f"^{loop} while gradient sync is off"):
        sync.windows([0]) if loop == "windows" else sync.accumulate()
    for window in sync.windows([0, 1, 2]):
        for _ in window:
            sync.backward(model(torch.ones(1, 2)).sum())
        sync.step(torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(RuntimeError, match=r"backward outside a window.*no_sync"):
        sync.backward(model(torch.ones(1, 2)).sum())


@pytest.mark.parametrize("value", [None, 1, 0, "True", torch.tensor(True)], ids=repr)
def test_what_is_no_bool_is_refused(value):
    _, sync = _engine()
    with pytest.raises(TypeError, match="^requires_gradient_sync="):
        sync.set_requires_gradient_sync(value)
