"""N ranks × K micro-batches equals one big batch: bit for bit, or within a derived bound."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import KINDS, PLANS, WIRES, WORLDS, Training, assert_alike, engine, me, train_integers
from ranks import on_ranks
from torch import nn

import pyengine as pe


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_integer_gradients_equal_one_big_batch_exactly(ranks, kind, world, plan):
    ranks(world).run(train_integers, Training(kind, PLANS[plan]))


@pytest.mark.parametrize(
    ("kind", "world", "options"),
    [
        ("own", 3, {"dtype": torch.float16, "how": "none"}),
        ("attach", 2, {"dtype": torch.bfloat16, "how": "zero"}),
        ("attach-view", 3, {"dtype": torch.float16}),
        ("own", 2, {"mixed": True}),
        ("attach-view", 3, {"mixed": True, "how": "none"}),
        ("own", 2, {"how": "zero"}),
        ("attach-view", 2, {"how": "zero"}),
        ("attach-unused", 2, {"how": "none"}),
    ],
    ids=str,
)
def test_any_type_and_any_zero_grad_between_windows_equal_one_big_batch_exactly(ranks, kind, world, options):
    ranks(world).run(train_integers, Training(kind, PLANS["unequal"], **options))


@pytest.mark.parametrize(
    ("kind", "world", "wire"),
    [
        ("own", 2, "bf16"),
        ("own", 3, "fp16"),
        ("own-native", 2, "bf16"),
        ("attach", 1, "fp16"),
        ("attach", 3, "bf16"),
    ],
)
def test_integer_gradients_cross_a_narrow_wire_exactly_when_the_count_is_a_power_of_two(
    ranks, kind, world, wire
):
    ranks(world).run(train_integers, Training(kind, [8, 8, 8], wire=WIRES[wire]))


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_bf16_gradients_do_not_stop_growing(kind):
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    sync, forward = engine(kind, model, accumulate=300)
    for window in sync.windows([torch.ones(1, 1, dtype=torch.bfloat16)] * 300):
        for x in window:
            sync.backward(forward(x).sum().float())
        sync.unscale_()
        assert model.weight.grad.item() == 1.0  # 300 / 300; a sum in bf16 stops at 256, which gives 0.852


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("kind", ["own", "attach"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
@on_ranks()
def test_real_gradients_stay_within_the_derived_bound_and_have_the_same_bits_on_every_rank(kind, dtype, wire):
    rank, world = me()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5)).to(dtype)
    twin = copy.deepcopy(model)
    sync, forward = engine(kind, model, accumulate=4, wire=wire)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(world, 4, 3, 7, generator=generator).to(dtype)
    for window in sync.windows(data[rank]):
        for x in window:
            sync.backward(forward(x).float().square().sum(), count=3)
        norm = sync.grad_norm()
        sync.unscale_()
    terms = [_gradient(twin, x) for x in data.flatten(0, 1)]
    count = 3 * 4 * world
    squares = torch.zeros((), dtype=torch.float64)
    for index, p in enumerate(model.parameters()):
        want = sum(term[index] for term in terms) / count
        size = sum(term[index].abs() for term in terms) / count
        assert ((p.grad.double() - want).abs() <= _bound(size, wire, dtype, world)).all()
        squares += p.grad.double().square().sum()
    # the norm was taken before the last rounding of the gradients to `dtype`
    torch.testing.assert_close(norm, squares.sqrt(), rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert_alike([p.grad.tolist() for p in model.parameters()])


def _gradient(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).float().square().sum().backward()
    return [p.grad.double() for p in model.parameters()]


def _bound(size: torch.Tensor, wire: pe.wire.Wire, dtype: torch.dtype, world: int) -> torch.Tensor:
    """Bound |error| elementwise: every rounding is at most u times the sum of the terms' magnitudes (`size`).

    fp32: 4 * world - 1 additions, 1/count, and the product with it. Wire: one cast per rank and world - 1
    additions. Last: one rounding to the parameters' dtype. eps = 2 u covers the second-order terms; the
    smallest subnormal number covers underflow in fp16.
    """
    roundings = (4 * world + 1) * torch.finfo(torch.float32).eps
    if wire.dtype != torch.float32:
        roundings += (world + 1) * torch.finfo(wire.dtype).eps
    if dtype != torch.float32:
        roundings += torch.finfo(dtype).eps
    return size * roundings + world * torch.finfo(wire.dtype).smallest_normal * torch.finfo(wire.dtype).eps
