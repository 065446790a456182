"""The engine on a CUDA device: the oracle, inf, clipping, streams, and steps that do not wait for the device.

All ranks share one device and communicate over gloo. NCCL needs one device per rank, so it has one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import (
    PLANS,
    WIRES,
    Integers,
    Training,
    assert_alike,
    clip_and_step,
    engine,
    me,
    records_of,
    train_integers,
    windows_of_integers,
)
from ranks import on_ranks
from torch import Tensor, nn

import pyengine as pe
from pyengine.step.stepper import PlainStepper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KINDS = ("own", "own-native", "attach")
WORLDS = (1, 2, 3)
DEVICE = "cuda"


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_over_nccl_equals_one_big_batch_exactly(ranks, kind, wire):
    ranks(1).over("nccl").run(train_integers, Training(kind, [8], wire=WIRES[wire], device=DEVICE))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_integer_gradients_equal_one_big_batch_exactly(ranks, kind, world, plan):
    ranks(world).run(train_integers, Training(kind, PLANS[plan], device=DEVICE))


@pytest.mark.parametrize(
    ("kind", "world", "options"),
    [
        ("own", 3, {"dtype": torch.float16}),
        ("attach", 3, {"dtype": torch.bfloat16}),
        ("own", 2, {"mixed": True}),
        ("attach", 2, {"mixed": True}),
        ("own", 3, {"wire": WIRES["bf16"]}),
        ("own-native", 2, {"wire": WIRES["fp16"]}),
        ("attach", 2, {"wire": WIRES["fp16"]}),
    ],
    ids=str,
)
def test_every_type_and_wire_equals_one_big_batch_exactly(ranks, kind, world, options):
    """With a narrow wire, every window's count is a power of two."""
    plan = [8, 8, 8] if "wire" in options else PLANS["short last window"]
    ranks(world).run(train_integers, Training(kind, plan, device=DEVICE, **options))


# ---- the step ----


@pytest.mark.parametrize(
    ("kind", "world", "fused", "value"),
    [("own", 1, False, math.nan), ("own-native", 2, True, math.inf), ("attach", 3, True, math.nan)],
)
@on_ranks()
def test_one_rank_that_is_not_finite_skips_the_step_of_every_rank(kind, fused, value):
    """In window 0, the last rank's loss is inf or nan."""
    rank, world = me()
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(DEVICE)
    sync, forward = engine(kind, model, accumulate=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    records = records_of(sync)
    before = [p.detach().clone() for p in model.parameters()]
    for number, window in enumerate(sync.windows([torch.ones(1, 3, device=DEVICE)] * 4)):
        for k, x in enumerate(window):
            is_bad = (number, rank, k) == (0, world - 1, 1)
            sync.backward(forward(x).sum() * (value if is_bad else 1.0))
        sync.clip_grad_norm_(1.0)
        sync.step(optimizer)
        moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
        assert moved == [number == 1] * 2
    assert [record.skipped for record in records] == [True, False]
    assert f"rank {world - 1}, micro-batch 1 (its loss)" in records[0].reason
    assert_alike([records[0].reason, *(p.tolist() for p in model.parameters())])


@pytest.mark.parametrize(
    ("kind", "world", "max_norm"), [("own", 1, 1e9), ("own-native", 2, 0.05), ("attach", 2, 0.05)]
)
def test_clip_and_fused_adamw_equal_a_float64_loop(ranks, kind, world, max_norm):
    ranks(world).run(clip_and_step, kind, partial(torch.optim.AdamW, lr=0.01, fused=True), max_norm, DEVICE)


# ---- host and streams ----


def _steps_without_the_host(accumulator: str, dtype: torch.dtype, wire: str, unused: bool) -> None:
    """Train; let PyTorch raise if an operation of a steady window waits for the device."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(DEVICE, dtype)
    if unused:
        model.register_parameter("nowhere", nn.Parameter(torch.ones(3, device=DEVICE, dtype=dtype)))
    sync = pe.GradSync(model, accumulate=2, accumulator=accumulator, wire=WIRES[wire])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    data = [torch.randn(4, 64, device=DEVICE, dtype=dtype) for _ in range(16)]
    try:
        for number, window in enumerate(sync.windows(data)):
            for x in window:
                sync.backward(model(x).float().square().sum(), count=4)
            sync.clip_grad_norm_(1.0)
            sync.step(optimizer)
            # The first windows fix the bucket order and create the optimizer's state; the last one may wait.
            torch.cuda.set_sync_debug_mode("error" if 3 <= number < 6 else "default")
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Over NCCL, because gloo waits for its own copies to and from the device.
@pytest.mark.parametrize(
    ("accumulator", "dtype", "wire"),
    [
        ("native", torch.float32, "fp32"),
        ("native", torch.float32, "bf16"),
        ("fp32", torch.bfloat16, "fp32"),
        ("fp32", torch.bfloat16, "bf16"),
    ],
)
@pytest.mark.parametrize("unused", [False, True])
def test_a_steady_window_never_waits_for_the_device(ranks, accumulator, dtype, wire, unused):
    """Flags of unused parameters need no wait either: hosts exchange them, and here there is one host."""
    ranks(1).over("nccl").run(_steps_without_the_host, accumulator, dtype, wire, unused)


def _skips_without_the_host(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[bool]:
    """Train, check that a step of an optimizer that is not fused does not wait, and return what stepped."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False)).to(DEVICE)
    sync = pe.GradSync(model, accumulate=2)
    optimizer = make(list(model.parameters()))
    tensors: list[Tensor] = []
    stepped = []
    for number, window in enumerate(sync.windows([torch.randn(4, 64, device=DEVICE) for _ in range(16)])):
        for x in window:
            sync.backward(model(x).square().sum() * (torch.inf if number == 4 else 1), count=4)
        before = [tensor.clone() for tensor in tensors]
        sync.step(optimizer)
        if before:
            same = [torch.equal(a, b) for a, b in zip(tensors, before, strict=True)]
            assert all(same) or not any(same[: len(list(model.parameters()))])
            stepped.append(not all(same))
        tensors = [t for p in model.parameters() for t in (p, *optimizer.state[p].values())]
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.zero_grad()
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        stepper = PlainStepper()
        assert not stepper.needs_host(optimizer)
        final: Any = SimpleNamespace(found_inf=torch.zeros((), device=DEVICE))  # a stepper reads nothing else
        stepper.step(optimizer, final)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return stepped


def _momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def _capturable(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, capturable=True)


@pytest.mark.parametrize("make", [_momentum, _capturable, torch.optim.Muon])
def test_an_optimizer_that_is_not_fused_skips_without_the_host(ranks, make):
    (stepped,) = ranks(1).over("nccl").run(_skips_without_the_host, make)
    assert stepped == [True, True, True, False, True, True, True]


def _on_the_second_device() -> tuple[list[float], list[float]]:
    """Train on cuda:1 while cuda:0 is the current device; return the engine's norms and torch's."""
    torch.manual_seed(0)
    model = nn.Linear(64, 8).to("cuda:1")
    sync = pe.GradSync(model, accumulate=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    records = records_of(sync)
    expected = []
    for window in sync.windows([torch.randn(4, 64, device="cuda:1") for _ in range(8)]):
        for x in window:
            with torch.cuda.device(1):
                torch.cuda._sleep(2**24)
            sync.backward(model(x).square().sum())
        sync.unscale_()
        norms = [p.grad.double().norm() for p in model.parameters()]
        expected.append(torch.stack(norms).norm().item())
        sync.step(optimizer)
    assert torch.cuda.current_device() == 0
    assert all(record.step_s > record.backward_s > 0 for record in records)
    return [record.grad_norm for record in records], expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_parameters_may_lie_on_another_device_than_the_current_one(ranks, backend):
    ((ours, torchs),) = ranks(1).over(backend).run(_on_the_second_device)
    assert ours == pytest.approx(torchs, rel=1e-6)


class _Slow(torch.autograd.Function):
    """Identity whose backward first keeps its stream busy for some milliseconds."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        torch.cuda._sleep(2**23)
        return grad.clone()


class _TwoStreams(Integers):
    """Half of the forward, and so of the backward, runs on a side stream, slowly."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.side = torch.cuda.Stream()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        main = torch.cuda.current_stream()
        x, t = x.to(DEVICE), t.to(DEVICE)
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            slow = (_Slow.apply(self.bias) * t).sum() + (_Slow.apply(self.long) * x[:, :1]).sum()
        fast = ((x @ self.matrix) * t).sum() + self.scalar * t.sum()
        main.wait_stream(self.side)
        for tensor, stream in ((x, self.side), (t, self.side), (slow, main)):
            tensor.record_stream(stream)
        return fast + slow


def _two_streams(kind: str) -> None:
    model = _TwoStreams(torch.float32).to(DEVICE)
    sync, forward = engine(kind, model, accumulate=2)
    windows_of_integers(sync, forward, model, num=3)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("kind", ["own", "own-native"])
def test_a_forward_on_two_streams_gives_the_same_gradients(ranks, kind, backend):
    ranks(1).over(backend).run(_two_streams, kind)
