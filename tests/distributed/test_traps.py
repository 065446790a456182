"""Ways in which deferred gradients silently go wrong elsewhere, each checked against the exact answer."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from cases import (
    Integers,
    assert_alike,
    assert_same,
    engine,
    grads,
    integers,
    me,
    mean_of_integers,
)
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe


@pytest.mark.parametrize("kind", ["own", "attach", "attach-static"])
@on_ranks(2)
def test_forward_outside_the_sync_micro_batch(kind):
    """The forward of the last micro-batch runs outside of its block, before the micro-batch begins."""
    rank, world = me()
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=2)
    for number in range(3):
        loss = forward(*integers(10 * rank + 2 * number + 1))
        with sync.accumulate():
            sync.backward(forward(*integers(10 * rank + 2 * number)), count=3)
        with sync.accumulate():
            sync.backward(loss, count=3)
        sync.unscale_()
        batches = [integers(10 * r + 2 * number + k) for r in range(world) for k in range(2)]
        assert_same(grads(model), mean_of_integers(model, batches, 6 * world))
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))


@pytest.mark.parametrize("kind", ["own", "own-native", "attach", "attach-view"])
@on_ranks(2)
def test_gradients_left_in_place_add_up_without_being_averaged_again(kind):
    rank, _ = me()
    model = nn.Linear(1, 1, bias=False)
    sync, forward = engine(kind, model, accumulate=2)
    values = []
    for number, window in enumerate(sync.windows([torch.full((1, 1), float(rank + 1))] * 8)):
        for x in window:
            sync.backward(forward(x).sum())
        sync.unscale_()
        values.append(model.weight.grad.item())
        if number == 2:
            sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert values == [1.5, 3.0, 4.5, 1.5]


@on_ranks(2)
def test_the_bare_hook_divides_before_a_narrow_cast():
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    ddp.register_comm_hook(pe.HookState(wire=pe.wire.FP16()), pe.comm_hook)
    ddp(torch.full((1, 1), 40000.0)).sum().backward()  # the sum over two ranks is beyond 65504
    assert ddp.module.weight.grad.item() == 40000.0


@on_ranks(2)
def test_the_bare_hook_leaves_deferral_to_no_sync():
    rank, _ = me()
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    ddp.register_comm_hook(pe.HookState(wire=pe.wire.FP32()), pe.comm_hook)
    values = []
    for k in range(4):
        with ddp.no_sync() if k % 2 == 0 else torch.enable_grad():
            ddp(torch.full((1, 1), float((rank + 1) * 10**k))).sum().backward()
        values.append(ddp.module.weight.grad.item())
    assert (values[0], values[1], values[3]) == (1.0 + rank, 16.5, 16.5 + 1650.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["own", "attach", "attach-view"])
@on_ranks(2)
def test_channels_last_parameters_keep_their_strides(kind, dtype):
    rank, world = me()
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(dtype, memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    sync, forward = engine(kind, model, accumulate=2)
    data = [[torch.ones(1, 3, 5, 5, dtype=dtype) * (r + k) for k in range(2)] for r in range(world)]
    for window in sync.windows(data[rank]):
        for x in window:
            sync.backward(forward(x).sum().float())
        sync.unscale_()
        assert model.weight.grad.stride() == model.weight.stride()
    for x in itertools.chain.from_iterable(data):
        twin(x).sum().float().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad / (2 * world))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", ["sparse", "strided", "expanded", "negated"])
@on_ranks(2)
def test_gradients_with_other_layouts_than_their_parameters_are_summed(dtype, odd):
    rank, world = me()
    embedding = nn.Embedding(6, 2, sparse=odd == "sparse", dtype=dtype)
    linear = nn.Linear(2, 2, bias=False, dtype=dtype)
    if odd == "strided":
        linear.weight.register_hook(lambda grad: grad.t().contiguous().t())
    if odd == "expanded":
        linear.weight.register_hook(lambda grad: grad[:1, :1].expand(2, 2))
    if odd == "negated":
        linear.weight.register_hook(lambda grad: torch._neg_view(-grad))
    params = [*embedding.parameters(), *linear.parameters()]
    sync = pe.GradSync(params, accumulate=2)
    for window in sync.windows([torch.tensor([0, rank]), torch.tensor([3, 3])]):
        for index in window:
            sync.backward(
                linear(torch.ones(1, 2, dtype=dtype)).sum().float() + embedding(index).sum().float()
            )
        sync.unscale_()
    rows = torch.zeros(6)
    for r in range(world):
        for index in (0, r, 3, 3):
            rows[index] += 1
    assert torch.equal(embedding.weight.grad.float(), rows[:, None].expand(6, 2) / (2 * world))
    assert torch.equal(linear.weight.grad, torch.ones(2, 2, dtype=dtype))


@on_ranks(1)
def test_flat_views_survive_zero_grad_set_to_none():
    model = nn.Linear(3, 2)
    sync = pe.GradSync(model, accumulate=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    places = []
    for window in sync.windows([torch.randn(1, 3)] * 6):
        optimizer.zero_grad(set_to_none=True)
        for x in window:
            sync.backward(model(x).sum())
            places.append(model.weight.grad.data_ptr())
        sync.step(optimizer)
    assert len(set(places)) == 1
    assert dist.is_initialized()


@pytest.mark.parametrize(("kind", "world"), [("attach", 3), ("attach-view", 2), ("attach-static", 2)])
@on_ranks()
def test_ranks_without_data_take_part_in_buffer_broadcasts(kind):
    rank, world = me()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    sync, forward = engine(kind, model, accumulate=2)
    means = []
    for window in sync.windows([torch.randn(4, 3) for _ in range(2 + 3 * rank)]):
        for x in window:
            sync.backward(forward(x).square().sum(), count=4)
        sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
        means.append(model[0].weight.sum().item())
    assert_alike(means)
    assert len(means) == {2: 3, 3: 4}[world]
