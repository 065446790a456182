"""`attach` with any settings of DDP: gradients of one big batch, buffers once per window, DDP restored."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases import Integers, engine, error_of, integers, me
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pyengine as pe

ACCUMULATE = 2


class Model(nn.Module):
    """Two layers; by `how`, the first is always used, used in some micro-batches, or checkpointed twice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)
        for layer in (self.first, self.last):
            nn.init.ones_(layer.weight)

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        if self.how == "checkpoints":
            for _ in range(2):
                x = checkpoint(self.first, x, use_reentrant=True)
        elif uses or self.how == "plain":
            x = self.first(x)
        return self.last(x).sum()


def _uses(rank: int, k: int) -> bool:
    return (rank + k) % 2 == 0


def _mean(how: str, world: int, window: int) -> list[Tensor]:
    """Return the mean of a window's gradients, computed by one process in float64."""
    twin = Model(how).double()
    for rank in range(world):
        for k in range(ACCUMULATE * window, ACCUMULATE * (window + 1)):
            twin(
                torch.full((1, 3), float(1 + k + 10 * rank), requires_grad=True).double(), _uses(rank, k)
            ).backward()
    return [param.grad / (ACCUMULATE * world) for param in twin.parameters()]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("how", ["plain", "some", "checkpoints"])
@on_ranks(2)
def test_every_setting_of_ddp_gives_the_gradients_of_one_big_batch(how, unused, static):
    rank, world = me()
    for views in (False, True):
        ddp = DistributedDataParallel(
            Model(how),
            bucket_cap_mb=1e-5,
            gradient_as_bucket_view=views,
            find_unused_parameters=unused,
            static_graph=static,
        )
        sync = pe.attach(ddp, accumulate=ACCUMULATE)
        xs = [torch.full((1, 3), float(1 + k + 10 * rank), requires_grad=True) for k in range(3 * ACCUMULATE)]
        for number, window in enumerate(sync.windows(enumerate(xs))):
            for k, x in window:
                sync.backward(ddp(x, _uses(rank, k)))
            sync.unscale_()
            for param, want in zip(ddp.parameters(), _mean(how, world, number), strict=True):
                assert torch.equal(param.grad.double(), want)  # sums of small integers, divided by 4
            sync.step(torch.optim.SGD(ddp.parameters(), lr=0.0))
        sync.close()


@on_ranks(2)
def test_a_ddp_inside_a_ddp_reduces_once_a_window_too():
    rank, world = me()
    inner = DistributedDataParallel(
        nn.Linear(3, 3, bias=False), gradient_as_bucket_view=True, bucket_cap_mb=1e-6
    )
    nn.init.ones_(inner.module.weight)
    ddp = DistributedDataParallel(
        nn.Sequential(inner, nn.Linear(3, 1, bias=False)), gradient_as_bucket_view=True, bucket_cap_mb=1e-6
    )
    sync = pe.attach(ddp, accumulate=3)
    for window in sync.windows([torch.full((1, 3), float(1 + k + rank)) for k in range(6)]):
        xs = []
        for x in window:
            xs.append(x)
            sync.backward(ddp(x).sum())
        sync.unscale_()
        mean = sum(x[0, 0].item() + r - rank for x in xs for r in range(world)) / (3 * world)
        want = ddp.module[1].weight.detach().T.expand(3, 3) * mean
        torch.testing.assert_close(inner.module.weight.grad, want)
        sync.step(torch.optim.SGD(ddp.parameters(), lr=0.0))
    sync.close()
    assert inner.require_backward_grad_sync and ddp.require_backward_grad_sync


class Counts(nn.Module):
    """A layer with a buffer that grows in every forward, by a different number on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1, bias=False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1 + me()[0]
        return (self.layer(x) * self.seen[0]).sum()


@pytest.mark.parametrize("broadcasts", [True, False])
@on_ranks(3)
def test_buffers_are_those_of_rank_0_behind_each_window_as_ddp_is_set(broadcasts):
    """Rank 2 has no data, and rank 1's last window is empty."""
    rank, _ = me()
    ddp = DistributedDataParallel(Counts(), broadcast_buffers=broadcasts)
    sync = pe.attach(ddp, accumulate=ACCUMULATE)
    data = [torch.ones(1, 3)] * (6, 3, 0)[rank]
    optimizer, found = torch.optim.SGD(ddp.parameters(), lr=0.1), []
    before = sync._engine.comm.traffic.collectives
    for window in sync.windows(data):
        for x in window:
            sync.backward(ddp(x))
        sync.step(optimizer)
        found.append(ddp.module.seen[0].item())
    assert found == ([2.0, 4.0, 6.0] if broadcasts or rank == 0 else [[4.0, 6.0, 6.0], [0.0] * 3][rank - 1])
    assert sync._engine.comm.traffic.collectives > before


def _trained_alone(ddp: DistributedDataParallel) -> Tensor:
    """Train with DDP alone; return the gradient, which is the mean of 1 and 2 over two ranks."""
    ddp.zero_grad()
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.full((1, 3), 1.0 + me()[0])).sum().backward()
    return ddp.module.weight.grad


@pytest.mark.parametrize("end", ["close", "collected"])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}],
    ids=str,
)
@on_ranks(2)
def test_ddp_works_by_itself_before_and_behind_an_engine(options, before, end):
    ddp = DistributedDataParallel(nn.Linear(3, 1, bias=False), **options)
    want = torch.full((1, 3), 1.5)
    if before:
        assert torch.equal(_trained_alone(ddp), want)
    for _ in range(2):
        sync = pe.attach(ddp, accumulate=ACCUMULATE)
        for window in sync.windows([torch.full((1, 3), 1.0 + me()[0])] * 4):
            for x in window:
                sync.backward(ddp(x).sum())
            sync.step(torch.optim.SGD(ddp.parameters(), lr=0.0))
            assert torch.equal(ddp.module.weight.grad, want)
        if end == "close":
            sync.close()
        del sync
        gc.collect()
        assert ddp.require_backward_grad_sync and ddp.require_forward_param_sync
    assert torch.equal(_trained_alone(ddp), want)


@on_ranks(2)
def test_no_sync_and_settings_left_in_the_loop_change_nothing():
    ddp = DistributedDataParallel(nn.Linear(3, 1, bias=False), static_graph=True)
    leaving = ddp.no_sync()
    leaving.__enter__()
    sync = pe.attach(ddp, accumulate=ACCUMULATE)
    leaving.__exit__(None, None, None)  # sets require_backward_grad_sync
    for window in sync.windows([torch.full((1, 3), 1.0 + me()[0])] * 6):
        for k, x in enumerate(window):
            with ddp.no_sync() if k == 0 else nullcontext():
                sync.backward(ddp(x).sum())
        sync.unscale_()
        assert torch.equal(ddp.module.weight.grad, torch.full((1, 3), 1.5))
        sync.step(torch.optim.SGD(ddp.parameters(), lr=0.0))


@on_ranks(2)
def test_several_ddps_have_an_engine_each():
    ddps = [DistributedDataParallel(nn.Linear(3, 1, bias=False)) for _ in range(2)]
    syncs = [pe.attach(ddp, accumulate=1) for ddp in ddps]
    for number in range(3):
        for sync, ddp in zip(syncs, ddps, strict=True):
            with sync.accumulate():
                sync.backward(ddp(torch.full((1, 3), 1.0 + me()[0] + number)).sum())
            sync.step(torch.optim.SGD(ddp.parameters(), lr=0.0))
            assert torch.equal(ddp.module.weight.grad, torch.full((1, 3), 1.5 + number))


@on_ranks(2)
def test_what_ddp_had_frozen_or_sums_sparsely_is_reduced():
    model = nn.Sequential(nn.Embedding(2, 3, sparse=True), nn.Linear(3, 1, bias=False))
    model[1].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    model[1].requires_grad_(True)  # in none of DDP's buckets
    sync = pe.attach(ddp, accumulate=1)
    with sync.accumulate():
        sync.backward(ddp(torch.tensor([me()[0]])).sum())
    sync.unscale_()
    assert torch.equal(model[0].weight.grad, (model[1].weight.detach() / 2).expand(2, 3))
    torch.testing.assert_close(model[1].weight.grad, model[0].weight.detach().mean(0, keepdim=True))


@on_ranks(1)
def test_a_copy_of_a_ddp_that_an_engine_drives_is_refused_and_one_of_its_module_is_not():
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    sync = pe.attach(ddp)
    assert error_of(lambda: copy.deepcopy(ddp)).startswith("copy or save ddp_model.module")
    assert isinstance(copy.deepcopy(ddp.module), nn.Linear)
    sync.close()
    assert copy.deepcopy(ddp).require_backward_grad_sync


@pytest.mark.parametrize(
    ("saves", "loads"), [("attach", "own"), ("own", "attach"), ("attach-unused", "attach-static")]
)
@pytest.mark.parametrize("wire", ["fp32", "int8-ef"])
@on_ranks(2)
def test_a_state_fits_gradsync_and_attach_alike(saves, loads, wire):
    def windows(
        kind: str, state: dict[str, Any] | None, model: Integers, num: int
    ) -> tuple[Any, list[Tensor]]:
        options = {"bucket_cap_mb": 1e-5} if kind == "own" else {}  # as small as DDP's
        sync, forward = engine(kind, model, accumulate=2, wire=wire, **options)
        if state is not None:
            sync.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(num):
            for k in range(2):
                with sync.accumulate():
                    sync.backward(forward(*integers(10 * me()[0] + k)) / 3, count=1)
            sync.step(optimizer)
        found = [param.detach().clone() for param in model.parameters()]
        saved = sync.state_dict()
        sync.close()
        return saved, found

    torch.manual_seed(0)
    first = Integers(torch.float32)
    whole = copy.deepcopy(first)
    state, _ = windows(saves, None, first, 2)
    _, got = windows(loads, state, first, 2)
    _, want = windows(saves, None, whole, 4)
    assert all(map(torch.equal, got, want))
