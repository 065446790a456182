"""A parameter that is frozen after the engine was created is unused until it is trained again."""

from __future__ import annotations

import pytest
import torch
from cases import me
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe

ACCUMULATE = 2
# The frozen parameters of each window. The order of gradients is observed in the first window that is sent by
# a backward.
PLANS = {
    "from the first window": ["b", "b", "", "b", ""],
    "later": ["", "b", "", "a", "b"],
    "all but one": ["ab", "", "abc", "c", ""],
    "for good": ["b", "b", "b"],
}


class Sums(nn.Module):
    """Four parameters, each with the gradient `x.sum(0)`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name in "abcd":
            self.register_parameter(name, nn.Parameter(torch.zeros(3, dtype=dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((x.to(p.dtype) * p).sum().float() for p in self.parameters())


def _made(kind: str, model: Sums) -> tuple[pe.Sync, nn.Module]:
    how, _, accumulator = kind.partition("-")
    if how == "own":
        return pe.GradSync(model, accumulate=ACCUMULATE, accumulator=accumulator, bucket_cap_mb=1e-5), model
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-5, find_unused_parameters=kind == "attach-unused")
    if accumulator == "early":  # after DDP was created, before the engine
        _freeze(model, "b")
    accumulator = accumulator if accumulator == "exact" else "fp32"
    return pe.attach(ddp, accumulate=ACCUMULATE, accumulator=accumulator), ddp


def _freeze(model: Sums, frozen: str) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(name not in frozen)


@pytest.mark.parametrize(
    ("kind", "dtype", "plan", "end"),
    [
        ("own-fp32", torch.float32, "from the first window", "full"),
        ("own-fp32", torch.bfloat16, "later", "flush"),
        ("own-fp32", torch.float32, "all but one", "last"),
        ("own-native", torch.bfloat16, "later", "full"),
        ("own-exact", torch.float32, "from the first window", "flush"),
        ("attach-fp32", torch.float32, "from the first window", "full"),
        ("attach-early", torch.float32, "for good", "full"),
        ("attach-fp32", torch.float32, "later", "flush"),
        ("attach-exact", torch.float32, "all but one", "last"),
        ("attach-unused", torch.float32, "from the first window", "last"),
    ],
)
@on_ranks(2)
def test_frozen_parameters_are_unused_and_come_back(kind, dtype, plan, end):
    rank, world = me()
    model = Sums(dtype)
    sync, forward = _made(kind, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    num = ACCUMULATE if end == "full" else 1
    for window, frozen in enumerate(PLANS[plan]):
        _freeze(model, frozen)
        for k in range(num):
            with sync.accumulate(last=end == "last"):
                x = torch.full((1, 3), float(1 + window + k + rank))
                sync.backward(forward(x), count=1)
        if end == "flush":
            sync.flush()
        sync.unscale_()
        total = sum(1 + window + k + r for k in range(num) for r in range(world))
        mean = torch.full((3,), total / (num * world))
        for name, param in model.named_parameters():
            if name in frozen:
                assert param.grad is None or not param.grad.any(), (window, name, param.grad)
            else:
                torch.testing.assert_close(param.grad.float(), mean, rtol=2**-8, atol=0)
            assert param.requires_grad == (name not in frozen)
        sync.step(optimizer)


@pytest.mark.parametrize("where", ["inside a window", "on one rank"])
@pytest.mark.parametrize("kind", ["own-fp32", "own-exact", "attach-fp32"])
@on_ranks(2)
def test_a_gradient_from_where_a_parameter_is_not_frozen_counts(kind, where):
    rank, _ = me()
    model = Sums(torch.float32)
    sync, forward = _made(kind, model)
    for _ in range(2):
        _freeze(model, "b" if (where, rank) == ("on one rank", 1) else "")
        for k in range(ACCUMULATE):
            with sync.accumulate():
                sync.backward(forward(torch.full((1, 3), float(1 + k + rank))), count=1)
            if where == "inside a window":
                _freeze(model, "b")
        sync.unscale_()
        a, b = model.a.grad.clone(), model.b.grad.clone()
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert torch.equal(a, torch.full((3,), (1 + 2 + 2 + 3) / 4))
    assert torch.equal(b, torch.full((3,), (1 + 2) / 4))
