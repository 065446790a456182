"""The engine neither reads nor writes parameters that DDP ignores (experts, sharded tables)."""

from __future__ import annotations

import math

import pytest
import torch
from cases import me
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

ACCUMULATE = 2


class WithExpert(nn.Module):
    """A layer that all ranks share, and an expert that belongs to one rank."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 1, bias=False, dtype=dtype)
        self.expert = nn.Linear(3, 1, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x).sum() + self.expert(x).sum()


def _ddp(dtype: torch.dtype, **options: object) -> DistributedDataParallel:
    model = WithExpert(dtype)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["expert.weight"])
    return DistributedDataParallel(model, bucket_cap_mb=1e-5, **options)


def _x(rank: int, k: int) -> Tensor:
    return torch.full((1, 3), float(1 + k + 10 * rank))


@pytest.mark.parametrize(
    ("world", "accumulator", "dtype", "unused"),
    [
        (1, "fp32", torch.float32, True),
        (3, "fp32", torch.float32, False),
        (3, "fp32", torch.bfloat16, True),
        (3, "exact", torch.float32, False),
    ],
)
@on_ranks()
def test_norm_clipping_and_finite_check_are_of_the_shared_parameters_alone(accumulator, dtype, unused):
    """The engine steps the shared layer only; an inf in one rank's expert gradient does not affect it."""
    rank, world = me()
    ddp = _ddp(dtype, find_unused_parameters=unused)
    model = ddp.module
    nn.init.zeros_(model.shared.weight)
    sync = pe.attach(ddp, accumulate=ACCUMULATE, accumulator=accumulator)
    shared = torch.optim.SGD([model.shared.weight], lr=1.0, fused=True)
    mine = sum(_x(rank, k).double() for k in range(ACCUMULATE)).to(dtype)
    total = sum(_x(r, k).double() for r in range(world) for k in range(ACCUMULATE)) / (ACCUMULATE * world)
    step = torch.zeros(1, 3, dtype=torch.float64)
    for number, window in enumerate(sync.windows([_x(rank, k) for k in range(ACCUMULATE)] * 3)):
        model.expert.weight.grad = None
        for k, x in enumerate(window):
            sync.backward(ddp(x.to(dtype)).float())
            if (number, rank, k) == (1, world - 1, 1):
                model.expert.weight.grad.fill_(math.inf)
        norm = sync.clip_grad_norm_(1.0)
        assert norm.item() == pytest.approx(total.norm().item(), rel=1e-2)
        assert sync.step(shared)
        step = step - total / (total.norm() + 1e-6)
        assert torch.allclose(model.shared.weight.double(), step, rtol=2e-2)
        if (number, rank) != (1, world - 1):
            assert torch.equal(model.expert.weight.grad, mine)


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_an_optimizer_over_ignored_parameters_too_steps_only_after_unscale(fused):
    rank, _ = me()
    ddp = _ddp(torch.float32)
    sync, expert = pe.attach(ddp, accumulate=1), ddp.module.expert.weight
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0, fused=fused)
    before = expert.detach().clone()
    with sync.accumulate():
        sync.backward(ddp(_x(rank, 0)), count=4)
    with pytest.raises(ValueError, match=r"that DDP ignores.*sync\.unscale_\(\)"):
        sync.step(optimizer)
    assert torch.equal(expert, before)
    sync.unscale_()
    sync.step(optimizer)
    assert torch.equal(before - expert, _x(rank, 0))


@on_ranks(2)
def test_an_ignored_table_may_have_sparse_gradients():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    ddp = DistributedDataParallel(model)
    sync = pe.attach(ddp, accumulate=1)
    with sync.accumulate():
        sync.backward(ddp(torch.tensor([1, 2])).sum())
    assert sync.step(torch.optim.SGD(model[1].parameters(), lr=1.0))
    assert model[0].weight.grad.layout is torch.sparse_coo
