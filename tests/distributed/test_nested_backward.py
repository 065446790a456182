"""Parameters with several gradients in one backward: no bucket is launched before the last gradient."""

from __future__ import annotations

import copy
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from cases import me
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import pyengine as pe
from pyengine.gradients.exact_sums import ExactOverRanks

WIDTH = 32


class Twice(nn.Module):
    """A layer used in two reentrant checkpoints, like ALBERT's; with `tied` a third time outside of them.

    Its second gradient comes late: without a check, its bucket would have been launched by then.
    """

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._tied = tied

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self._slow, x, use_reentrant=True)
        x = checkpoint(self._slow, x, use_reentrant=True)
        return (self.layer(self.head(x)) if self._tied else self.head(x)).float().square().sum()

    def _slow(self, x: Tensor) -> Tensor:
        return self.layer(_Slow.apply(x))


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        time.sleep(0.002)
        return grad


class Sharded(nn.Module):
    """A layer whose backward runs a backward for each piece of its input, like TiledMLP's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_Pieces.apply(x, self.layer, self.layer.weight)).float().square().sum()


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, layer: nn.Module, weight: Tensor) -> Tensor:
        ctx.x, ctx.layer = x.detach(), layer
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        found = []
        for x, piece in zip(ctx.x.chunk(4), grad.chunk(4), strict=True):
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.layer(x)
            torch.autograd.backward(out, piece)
            time.sleep(0.001)
            found.append(x.grad)
        return torch.cat(found), None, None


MODELS = {"checkpoints": Twice, "checkpoints, tied": partial(Twice, tied=True), "pieces": Sharded}
EXACT = {"accumulator": "exact"}


@pytest.mark.parametrize(
    ("case", "world", "accumulate", "dtype", "options"),
    [
        ("checkpoints", 1, 1, torch.float32, EXACT),
        ("checkpoints", 3, 2, torch.float32, {}),
        ("checkpoints", 2, 1, torch.bfloat16, {"wire": pe.wire.BF16()}),
        ("checkpoints, tied", 2, 1, torch.float32, {}),
        ("checkpoints, tied", 3, 2, torch.float32, EXACT),
        ("pieces", 3, 2, torch.float32, {}),
        ("pieces", 2, 1, torch.float32, EXACT),
        ("pieces", 2, 1, torch.bfloat16, {"wire": pe.wire.BF16()}),
    ],
    ids=str,
)
@on_ranks()
def test_gradients_that_come_twice_are_summed_before_their_bucket_leaves(case, options, accumulate, dtype):
    rank, world = me()
    # float32 rounds sums of some hundred terms; bfloat16 rounds a few times, by 2^-8.
    bound = 1e-5 if dtype == torch.float32 else 0.05
    torch.manual_seed(0)
    model = MODELS[case]().to(dtype)
    truth = copy.deepcopy(model).double()
    sync = pe.GradSync(model, accumulate=accumulate, bucket_cap_mb=1e-6, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for window in range(3):
        truth.zero_grad()
        for r in range(world):
            for k in range(accumulate):
                x = _input(window, r, k)
                (truth(x.double().requires_grad_()) / (world * accumulate)).backward()
                if r == rank:
                    with sync.accumulate():
                        sync.backward(model(x.to(dtype).requires_grad_()))
        sync.unscale_()
        for p, t in zip(model.parameters(), truth.parameters(), strict=True):
            assert t.grad is None or (p.grad - t.grad).norm() < bound * t.grad.norm()
        sync.step(optimizer)


def _input(window: int, rank: int, micro_batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * window + 10 * rank + micro_batch)
    return torch.randn(8, WIDTH, generator=generator)


class Sometimes(nn.Module):
    """A layer that, only if `nests` is set, is also used in two nested reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.nests = False

    def forward(self, x: Tensor) -> Tensor:
        if self.nests:
            x = checkpoint(self.layer, checkpoint(self.layer, x, use_reentrant=True), use_reentrant=True)
        return self.layer(x).square().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
@on_ranks(2)
def test_a_gradient_that_comes_again_after_its_bucket_left_is_an_error_once(accumulator, dtype):
    torch.manual_seed(0)
    model = Sometimes().to(dtype)
    sync = pe.GradSync(model, accumulate=1, accumulator=accumulator, bucket_cap_mb=1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for window in range(4):
        model.nests = window >= 2
        before = model.layer.weight.detach().clone()
        says = r"'layer\.weight'.*accumulated again after its bucket may have been launched"
        with pytest.raises(RuntimeError, match=says) if window == 2 else nullcontext():
            with sync.accumulate():
                sync.backward(model(torch.ones(2, WIDTH, dtype=dtype, requires_grad=True)).float())
            assert sync.step(optimizer)
        assert torch.equal(before, model.layer.weight) == (window == 2)


@on_ranks(1)
def test_an_exact_sum_takes_one_deposit_a_micro_batch_also_of_gradients_that_come_twice():
    model = Twice()
    sync = pe.GradSync(model, accumulate=3, accumulator="exact", bucket_cap_mb=1e-6)
    taken: Counter[int] = Counter()
    deposit = ExactOverRanks.deposit_

    def counted(self, *args, **kwargs):
        taken[id(self)] += 1
        deposit(self, *args, **kwargs)

    most = []
    with mock.patch.object(ExactOverRanks, "deposit_", counted):
        for _ in range(3):
            taken.clear()
            for k in range(3):
                with sync.accumulate():
                    sync.backward(model(_input(0, 0, k).requires_grad_()))
            sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
            most.append(max(taken.values()))
    assert most == [3, 3, 3]


@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
@on_ranks(2)
def test_a_sharded_unit_in_two_reentrant_checkpoints_is_summed_exactly_or_refused(accumulator):
    """FSDP2 itself reduces the first gradient and omits the second one."""
    torch.manual_seed(0)
    model = Twice()
    truth = copy.deepcopy(model).double()
    fully_shard(model.layer)
    sync = pe.attach(fully_shard(model), accumulate=1, accumulator=accumulator)
    rank, world = me()
    is_refused = pytest.raises(RuntimeError, match="use_reentrant=False")
    with nullcontext() if accumulator == "exact" else is_refused:
        with sync.accumulate():
            sync.backward(model(_input(0, rank, 0).requires_grad_()))
        for r in range(world):
            (truth(_input(0, r, 0).double().requires_grad_()) / world).backward()
        for p, t in zip(model.parameters(), truth.parameters(), strict=True):
            assert (p.grad.full_tensor() - t.grad).norm() < 1e-5 * t.grad.norm()
