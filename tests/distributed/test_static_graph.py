"""DDP's static_graph with `attach`: ranks may begin with different numbers of micro-batches."""

from __future__ import annotations

import pytest
import torch
from cases import (
    Integers,
    Training,
    assert_same,
    engine,
    grads,
    integers,
    me,
    mean_of_integers,
    train_integers,
)
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pyengine as pe


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ([10, 12, 12], {}),
        ([12, 1, 4], {"mixed": True}),
        ([0, 12, 0], {}),
        ([1, 12, 7], {"options": {"accumulator": "exact"}}),
        ([3, 1, 0], {"options": {"accumulator": "exact"}}),
    ],
    ids=str,
)
def test_ranks_may_begin_with_different_numbers_of_micro_batches(ranks, plan, options):
    ranks(3).run(train_integers, Training("attach-static", plan, **options))


@on_ranks(2)
def test_a_rank_without_data_learns_the_graph_when_it_gets_some():
    """Windows without a micro-batch anywhere, then data on one rank only, then on both."""
    rank, _ = me()
    model = Integers(torch.float32)
    sync, forward = engine("attach-static", model, accumulate=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number in range(6):
        with sync.accumulate():
            if number >= 2 + 2 * rank:
                sync.backward(forward(*integers(10 * rank + number)), count=3)
        if number >= 2:
            sync.unscale_()
            batches = [integers(10 * r + number) for r in range(2) if number >= 2 + 2 * r]
            assert_same(grads(model), mean_of_integers(model, batches, 3 * len(batches)))
        assert sync.step(optimizer) == (number >= 2)


class Twice(nn.Module):
    """A layer used twice in two reentrant checkpoints: one backward accumulates its gradient twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)
        for layer in (self.layer, self.last):
            nn.init.ones_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return self.last(x).sum()


@pytest.mark.parametrize("short", [False, True])
@on_ranks(2)
def test_a_layer_in_two_reentrant_checkpoints_is_reduced_when_both_have_run(short):
    rank, world = me()
    ddp = DistributedDataParallel(Twice(), static_graph=True, bucket_cap_mb=1e-5)
    sync = pe.attach(ddp, accumulate=2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    size = 2 if short and rank == 1 else 8
    data = [torch.full((1, 3), float(k + rank), requires_grad=True) for k in range(size)]
    for number, window in enumerate(sync.windows(data)):
        for x in window:
            sync.backward(ddp(x))
        sync.unscale_()
        total, count = 0.0, 0
        for r in range(world):
            for k in range(2 * number, 2 * number + 2):
                if k < (2 if short and r == 1 else 8):
                    total, count = total + k + r, count + 1
        # d/dW of 1ᵀ W W x, W = 1: outer(1, W x) + outer(Wᵀ 1, x) = 3 x + 3 x in every element
        assert torch.equal(ddp.module.layer.weight.grad, torch.full((3, 3), 6 * total / count))
        assert torch.equal(ddp.module.last.weight.grad, torch.full((1, 3), 9 * total / count))
        sync.step(optimizer)


def _fails_between_layers(module: nn.Module, args: object, output: Tensor) -> None:
    def fail(_: Tensor) -> None:
        raise KeyError("in the backward")

    output.register_hook(fail)


@pytest.mark.parametrize(("at", "where"), [(0, 0), (3, 0), (0, 1), (1, 1)])
@on_ranks(2)
def test_a_failure_in_an_earlier_backward_is_made_up_for_and_one_in_the_last_voids_its_window(at, where):
    """Rank 0 fails in backward `where` of window `at`, after the last layer's gradient."""
    rank, world = me()
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False))
    for param in model.parameters():
        nn.init.ones_(param)
    ddp = DistributedDataParallel(model, static_graph=True, bucket_cap_mb=1e-5)
    sync = pe.attach(ddp, accumulate=2)
    stepped = []
    for number in range(5):
        failed = done = 0
        while done < 2 and not (failed and where == 1):
            is_bad = (rank, number, done, failed) == (0, at, where, 0)
            hook = model[0].register_forward_hook(_fails_between_layers) if is_bad else None
            try:
                with sync.accumulate():
                    sync.backward(ddp(torch.full((1, 3), float(rank + 1))).sum())
                done += 1
            except KeyError:
                failed, done = 1, 0  # the window is dropped here only, and no other rank notices
            if hook is not None:
                hook.remove()
        stepped.append(done == 2 and bool(sync.step(torch.optim.SGD(ddp.parameters(), lr=0.0))))
        if stepped[-1]:
            assert torch.equal(model[0].weight.grad, torch.full((3, 3), (world + 1) / 2))
    assert stepped == [where == 0 or number != at for number in range(5)]
