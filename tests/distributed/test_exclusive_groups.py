"""Buckets use a process group that nothing else uses, so it does not matter when they are sent."""

from __future__ import annotations

import gc
import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import comm_of_buckets, me
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

KINDS = pytest.mark.parametrize("kind", ["own", "attach"])
WINDOWS = 4
WIDTH = 520  # layers of more than 1 MiB, the size of DDP's first bucket, whatever its cap


class _Summed(torch.autograd.Function):
    """Identity whose backward sums over ranks, as in a part of a model that is shared between ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


def _layers(num: int) -> list[nn.Linear]:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num)]
    for layer in layers:
        nn.init.constant_(layer.weight, 1 / WIDTH)
    return layers


def _engine(kind: str, model: nn.Module, **options: Any) -> tuple[pe.Sync, nn.Module]:
    if kind == "attach":
        ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)
        return pe.attach(ddp, accumulate=1, **options), ddp
    return pe.GradSync(model, accumulate=1, bucket_cap_mb=1e-4, **options), model


def _be_late(loss: Tensor, number: int) -> None:
    """Let one rank in turn send its header late, for which the other ranks' first buckets wait."""
    rank, world = me()
    if rank == number % world:
        time.sleep(0.02)
        loss.register_hook(lambda _: time.sleep(0.02))


# Int8 buckets are exchanged point to point, without collectives; GradSync also sends flags with a collective.
@pytest.mark.parametrize(
    ("kind", "wire"),
    [("own", pe.wire.FP32()), ("own", pe.wire.Int8()), ("attach", pe.wire.FP32())],
    ids=str,
)
@on_ranks(3)
def test_a_collective_of_the_users_in_the_backward_meets_its_like(kind, wire):
    rank, world = me()
    first, second = _layers(2)
    model = nn.Sequential()
    model.first, model.second = first, second
    sync, forward = _engine(kind, model, wire=wire)
    model.forward = lambda x: second(_Summed.apply(first(x))).sum()
    want = {first: 8 * world * (1 + world) / 2, second: 8 * (1 + world) / 2}
    for number in range(WINDOWS):
        with sync.accumulate():
            loss = forward(torch.full((8, WIDTH), 1.0 + rank))
            _be_late(loss, number)
            sync.backward(loss)
        sync.unscale_()
        for layer, value in want.items():
            torch.testing.assert_close(
                layer.weight.grad, torch.full((WIDTH, WIDTH), value), rtol=1e-2, atol=0
            )
        model.zero_grad()


@KINDS
@on_ranks(2)
def test_engines_that_share_a_backward_do_not_meet(kind):
    rank, world = me()
    halves = [nn.ModuleList(_layers(3)) for _ in range(2)]
    engines = []
    for half in halves:
        half.forward = lambda x, half=half: (layer(x) for layer in half)
        engines.append(_engine(kind, half))
    (sync, first), (other, second) = engines
    for number in range(WINDOWS):
        with sync.accumulate(), other.accumulate(), sync.micro_batch() as one, other.micro_batch() as two:
            x = torch.full((8, WIDTH), 1.0 + rank)
            # Layers of both models alternate in the forward, and so in the backward; all gradients differ.
            both = zip(first(x), second(x), strict=True)
            loss = sum((10.0**k * (a + 3 * b)).sum() for k, (a, b) in enumerate(both))
            _be_late(loss, number)
            with one.last_backward(loss), two.last_backward(loss):
                loss.backward()
        sync.unscale_()
        other.unscale_()
        for half, factor in zip(halves, (1, 3), strict=True):
            for k, layer in enumerate(half):
                want = factor * 10.0**k * 8 * (1 + world) / 2
                torch.testing.assert_close(layer.weight.grad, torch.full((WIDTH, WIDTH), want))
            half.zero_grad()


def _number() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def _run_a_window(sync: pe.GradSync, model: nn.Module) -> None:
    with sync.accumulate():
        sync.backward(model(torch.ones(1, 2)).sum())


@pytest.mark.parametrize("how", ["close", "free", "fail"])
@on_ranks(2)
def test_an_engine_makes_a_group_and_destroys_it_with_itself(how):
    rank, _ = me()
    numbers = []
    for _ in range(3):
        model = nn.Linear(2, 2)
        if how == "fail":
            with pytest.raises(ValueError, match="rank 1: wire='none'"):
                pe.GradSync(model, wire="none" if rank else "fp32")
            continue
        sync = pe.GradSync(model)
        _run_a_window(sync, model)
        numbers.append(_number())
        if how == "close":
            sync.close()
        del sync
        gc.collect()
        assert _number() == 1
    assert numbers == ([] if how == "fail" else [2] * 3) and _number() == 1


@on_ranks(2)
def test_a_rank_that_closes_in_a_window_neither_hangs_nor_disturbs_other_engines():
    """Rank 0 has launched a bucket in which rank 1 does not take part."""
    rank, _ = me()
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    sync, second = pe.GradSync(model), pe.GradSync(other)
    begin = time.monotonic()
    if rank == 0:
        dist.all_reduce(torch.ones(4), group=comm_of_buckets(sync).group, async_op=True)
        sync.close()
    for _ in range(2):
        _run_a_window(second, other)
        second.step(torch.optim.SGD(other.parameters(), lr=0.1))
    dist.barrier()  # the default group still works, too
    pe.GradSync(nn.Linear(2, 2)).close()
    sync.close()
    assert time.monotonic() - begin < 30  # the timeout is minutes


@on_ranks(3)
def test_a_rank_may_close_its_engine_while_others_are_still_in_its_last_collective():
    rank, world = me()
    for number in range(6):
        model = nn.Linear(2, 300, bias=False)
        with pe.GradSync(model, bucket_cap_mb=1e-3) as sync:
            with sync.accumulate():
                loss = (model.weight * (1.0 + rank)).sum()
                _be_late(loss, number)
                sync.backward(loss, count=1)
            sync.unscale_()
        assert torch.equal(model.weight.grad, torch.full((300, 2), (1 + world) / 2))


@on_ranks(2)
def test_an_engine_that_one_rank_has_closed_does_not_change_the_names_of_torchs_groups():
    rank, _ = me()
    sync = pe.GradSync(nn.Linear(2, 2))
    if rank == 0:
        sync.close()
    group = dist.new_group([0, 1], use_local_synchronization=True, timeout=timedelta(seconds=20))
    flat = torch.ones(1)
    dist.all_reduce(flat, group=group)
    assert float(flat) == 2
    dist.destroy_process_group(group)


@on_ranks(2)
def test_a_fork_leaves_the_group_of_its_parent_alone():
    sync = pe.GradSync(nn.Linear(2, 2))
    comm = comm_of_buckets(sync)
    group = comm.group
    pid = os.fork()
    if pid == 0:
        comm.handle.release()
        os._exit(group not in dist.distributed_c10d._world.pg_map)
    assert os.waitpid(pid, 0)[1] == 0
    flat = torch.ones(1)
    comm.all_reduce(flat).wait()
    assert float(flat) == 2


@on_ranks(2)
def test_ddp_goes_on_by_its_own_group_behind_an_attach_that_failed():
    rank, _ = me()
    model = nn.Linear(2, 2, bias=False)
    ddp = DistributedDataParallel(model)
    pe.attach(ddp, accumulate=1).close()
    (alone, _) = dist.new_subgroups(1)
    with pytest.raises(ValueError, match="the hook averages over 1 ranks"):
        pe.attach(ddp, accumulate=1, wire=pe.wire.FromHook(allreduce_hook, alone))
    other = nn.Linear(2, 2, bias=False)
    found = []
    with pe.GradSync(other, accumulate=1) as sync:
        with sync.accumulate():
            sync.backward((other.weight * (1.0 + rank)).sum(), count=1)
        (ddp(torch.ones(1, 2)).sum() * (1.0 + rank)).backward()  # DDP reduces again, with its own group
        sync.unscale_()
    found += [float(model.weight.grad.mean()), float(other.weight.grad.mean())]
    assert ddp.require_backward_grad_sync
    with pe.attach(ddp, accumulate=1) as again:
        model.zero_grad()
        with again.accumulate():
            again.backward(ddp(torch.ones(1, 2)).sum() * (1.0 + rank), count=1)
        again.unscale_()
        found.append(float(model.weight.grad.mean()))
    assert found == [1.5] * 3


@on_ranks(3)
def test_ranks_may_have_unequal_numbers_of_process_groups():
    rank, _ = me()
    pairs = [dist.new_group(pair) for pair in ([0, 1], [1, 2])]
    found = []
    for group in [dist.group.WORLD, pairs[0]] if rank < 2 else [dist.group.WORLD]:
        model = nn.Linear(2, 2, bias=False)
        with pe.GradSync(model, accumulate=1, process_group=group) as sync:
            with sync.accumulate():
                sync.backward((model.weight * (rank + 1.0)).sum(), count=1)
            sync.unscale_()
        found.append(float(model.weight.grad.mean()))
    assert found == [[2.0, 1.5], [2.0, 1.5], [2.0]][me()[0]]


@on_ranks(2)
def test_it_ends_with_the_default_group_and_has_its_timeout():
    _, world = me()
    model = nn.Linear(2, 2)
    pe.GradSync(model, accumulate=1).close()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=33))
    sync = pe.GradSync(model, accumulate=1)
    group = comm_of_buckets(sync).group
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=33)
    del group
    comm = comm_of_buckets(sync)
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="make a new engine.*has been destroyed"):
        comm.all_reduce(torch.ones(2))
    with pytest.raises(RuntimeError, match="make a new engine.*has been destroyed"):
        comm.all_to_all(torch.ones(world), torch.ones(world))
