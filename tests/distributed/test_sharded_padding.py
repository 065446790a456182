"""Padding changes neither buffers nor gradients of the caller's own parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import assert_same, me
from ranks import on_ranks
from sharded_cases import batch, loss_of, own_batches, right_grads, sharded, whole_grads
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard

import pyengine as pe

NUMBERS = [3, 1]  # micro-batches by rank; rank 1 has none in the second window


class Beside(nn.Module):
    """A sharded layer, a parameter that belongs to the caller, and a buffer that counts forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        self.own = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))
        nn.init.ones_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) + (self.own * x).sum(1, keepdim=True)


def _data(rank: int) -> list[Tensor]:
    return [torch.full((1, 2), float(1 + k + 10 * rank)) for k in range(NUMBERS[rank])]


def _backward(sync: pe.Sync, loss: Tensor, how: str) -> None:
    if how == "backward":
        sync.backward(loss, count=1)
    elif how == "block":
        with sync.micro_batch(count=1) as mb:
            mb.backward(loss)
    elif how == "plain":
        with sync.micro_batch(count=1):
            loss.backward()
    elif how == "autograd":
        with sync.micro_batch(count=1):
            torch.autograd.backward([loss])
    else:
        with sync.micro_batch(count=1) as mb, mb.last_backward(loss):
            loss.backward()


@pytest.mark.parametrize(
    ("kind", "how", "accumulator"),
    [
        ("fsdp", "backward", "fp32"),
        ("fsdp", "block", "exact"),
        ("fsdp", "plain", "fp32"),
        ("replicate", "marked", "exact"),
        ("replicate", "autograd", "fp32"),
    ],
)
@on_ranks(2)
def test_padding_adds_nothing_to_buffers_and_gradients_of_the_caller(kind, how, accumulator):
    rank, _ = me()
    model, head = Beside(), nn.Parameter(torch.full((), 2.0))
    shard = replicate if kind == "replicate" else fully_shard
    shard(model, ignored_params={model.own})
    sync = pe.attach(model, accumulate=2, accumulator=accumulator)
    seen = []
    for window in sync.windows(_data(rank)):
        model.own.grad = head.grad = None
        for x in window:
            _backward(sync, (model(x) * head).sum(), how)
        sync.unscale_()
        seen.append([None if p.grad is None else p.grad.clone() for p in (model.own, head)])
        assert sync.step(torch.optim.SGD([model.layer.weight], lr=0.0))
    assert model.calls == NUMBERS[rank]
    for number, (own, of_head) in enumerate(seen):
        mine = _data(rank)[2 * number : 2 * number + 2]
        if not mine:
            assert own is None and of_head is None
            continue
        assert torch.equal(own, 2 * sum(x[0] for x in mine))
        assert torch.equal(of_head, sum(4 * x[0, 0] for x in mine))


@on_ranks(2)
def test_a_flush_gives_an_ignored_parameter_no_gradient():
    """A flush makes FSDP reduce in one more backward."""
    model = Beside()
    fully_shard(model, ignored_params={model.own})
    sync = pe.attach(model, accumulate=2)
    with sync.accumulate():
        sync.backward(model(torch.ones(1, 2)).sum(), count=1)
    model.own.grad = None
    sync.flush()
    assert model.own.grad is None


class _Unpicklable:
    """A batch that cannot be sent to other ranks."""

    def __init__(self, rank: int) -> None:
        self.data = batch(rank)

    def __reduce__(self) -> Any:
        raise TypeError("not to be sent")


@pytest.mark.parametrize("can", [True, False])
@on_ranks(2)
def test_a_rank_without_any_batch_pads_with_a_copy_of_another_one_s(can):
    rank, _ = me()
    sync, model = sharded("nested")
    own: list[Any] = own_batches(3) if can else [_Unpicklable(0)]
    try:
        for window in sync.windows([] if rank else own):
            for data in window:
                assert sync.is_padding == (rank == 1)
                sync.backward(loss_of(model, data if can else data.data), count=3)
            sync.unscale_()
    except ValueError as error:
        assert not can
        assert str(error).startswith("rank 1 has no micro-batch, and needs a copy of another rank's")
        return
    assert can
    assert_same(whole_grads(model), right_grads([batch(number) for number in range(3)], 9))
