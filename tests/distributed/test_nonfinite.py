"""inf and nan on one rank are handled on every rank, and the report names where they came from."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from cases import Inject, engine, me, records_of
from ranks import on_ranks
from torch import Tensor, nn

import pyengine as pe


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2, dtype=dtype), nn.Linear(2, 1, dtype=dtype)

    def forward(self, x: Tensor, inject: float) -> Tensor:
        return self.second(Inject.apply(self.first(x), inject)).float().sum()


def _train(kind: str, policy: str, dtype: torch.dtype, where: tuple[int, int], value: float, loss_too: bool):
    rank, _ = me()
    torch.manual_seed(0)
    model = Net(dtype)
    sync, forward = engine(kind, model, accumulate=3, nonfinite=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = records_of(sync)
    before = [p.detach().clone() for p in model.parameters()]
    error = ""
    for number, window in enumerate(sync.windows([torch.ones(1, 3, dtype=dtype)] * 6)):
        try:
            for k, x in enumerate(window):
                bad = number == 0 and (rank, k) == where
                loss = forward(x, value if bad else 1.0)
                sync.backward(loss * value if bad and loss_too else loss)
            assert sync.step(optimizer) == (number == 1)
        except FloatingPointError as caught:
            error = str(caught)
            sync.abandon()
        moved = any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert moved == (number == 1)
    return error or records[0].reason


@pytest.mark.parametrize(
    ("kind", "world", "value"),
    [
        ("own", 1, math.inf),
        ("own-native", 3, math.nan),
        ("attach", 2, math.nan),
        ("attach-view", 3, math.inf),
    ],
)
def test_skip_leaves_every_ranks_parameters_alone_and_goes_on(ranks, kind, world, value):
    reasons = ranks(world).run(_train, kind, "skip", torch.float32, (world - 1, 1), value, True)
    assert len(set(reasons)) == 1
    assert "'first.weight'" in reasons[0] and f"rank {world - 1}, micro-batch 1 (its loss)" in reasons[0]


@pytest.mark.parametrize(("kind", "k"), [("own", 0), ("own-native", 1), ("attach", 2)])
def test_raise_names_parameter_rank_and_micro_batch_on_every_rank(ranks, kind, k):
    errors = ranks(3).run(_train, kind, "raise", torch.float32, (1, k), math.inf, True)
    assert len(set(errors)) == 1
    assert "window 0: inf or nan in the gradient of 'first.weight'" in errors[0]
    assert f"rank 1, micro-batch {k} (its loss)" in errors[0]


@pytest.mark.parametrize(("dtype", "k"), [(torch.float32, 0), (torch.float32, 2), (torch.bfloat16, 1)])
def test_a_backward_that_breaks_under_a_finite_loss_is_named_by_raise(ranks, dtype, k):
    errors = ranks(2).run(_train, "own", "raise", dtype, (1, k), math.inf, False)
    assert len(set(errors)) == 1
    assert "gradient of 'first.weight', 'first.bias', from" in errors[0]
    assert errors[0].endswith(f"rank 1, micro-batch {k}")


@pytest.mark.parametrize("kind", ["own", "attach"])
def test_fp32_sums_name_the_micro_batch_under_skip_for_free(ranks, kind):
    for reason in ranks(2).run(_train, kind, "skip", torch.bfloat16, (0, 1), math.nan, False):
        assert "rank 0, micro-batch 1" in reason


@pytest.mark.parametrize("kind", ["own", "attach"])
@on_ranks(2)
def test_a_sum_that_overflows_on_an_fp16_wire_is_skipped_everywhere(kind):
    model = nn.Linear(1, 1, bias=False)
    sync, forward = engine(kind, model, accumulate=1, wire=pe.wire.FP16())
    records = records_of(sync)
    for window in sync.windows([torch.full((1, 1), 40000.0)]):
        for x in window:
            sync.backward(forward(x).sum(), count=0.5)  # 40000 on each rank, 80000 / 1 on two: beyond 65504
        assert not sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert "inf or nan in the gradient of 'weight'" in records[0].reason


def _scaled(fused: bool, stock: bool, worlds_inf: int) -> tuple[list[Tensor], list[float]]:
    """Train one process with a GradScaler, ours or torch's, through an inf in window `worlds_inf`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    data = [torch.randn(2, 4) for _ in range(10)]
    options = {"init_scale": 2.0**10, "growth_interval": 3}
    scaler = torch.amp.GradScaler("cpu", **options) if stock else pe.GradScaler("cpu", **options)
    scales = []
    if stock:
        for k in range(0, 10, 2):
            for x in data[k : k + 2]:
                loss = model(x).square().sum() * (math.inf if k // 2 == worlds_inf else 1.0)
                scaler.scale(loss / 2).backward()  # the window's mean, as stock users write it
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return [p.detach().clone() for p in model.parameters()], scales
    sync = pe.GradSync(model, accumulate=2)
    sync.scaler = scaler
    for number, window in enumerate(sync.windows(data)):
        for x in window:
            sync.backward(model(x).square().sum() * (math.inf if number == worlds_inf else 1.0))
        sync.step(optimizer)
        scales.append(scaler.get_scale())
    return [p.detach().clone() for p in model.parameters()], scales


@pytest.mark.parametrize(("fused", "when"), [(False, 2), (True, 2), (True, -1)])
def test_parameters_and_scale_stay_bit_equal_to_the_stock_scalers(ranks, fused, when):
    (ours, our_scales), (stock, stock_scales) = (
        ranks(1).run(_scaled, fused, is_stock, when)[0] for is_stock in (False, True)
    )
    assert our_scales == stock_scales
    assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))


@pytest.mark.parametrize("kind", ["own-native", "attach"])
@on_ranks(2)
def test_an_inf_on_one_rank_backs_every_ranks_scale_off(kind):
    rank, _ = me()
    model = nn.Linear(2, 1)
    sync, forward = engine(kind, model, accumulate=2)
    sync.scaler = pe.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales, steps = [], []
    for number, window in enumerate(sync.windows([torch.ones(1, 2)] * 10)):
        for k, x in enumerate(window):
            bad = (number, rank, k) == (1, 1, 0)
            sync.backward(forward(x).sum() * (math.inf if bad else 1.0))
        norm = sync.clip_grad_norm_(1.0)
        assert bool(torch.isfinite(norm)) != (number == 1)
        assert number == 1 or norm.item() == pytest.approx(3**0.5)  # the loss scale is out of it
        steps.append(sync.step(optimizer))
        scales.append(sync.scaler.get_scale())
    assert scales == [8.0, 4.0, 4.0, 8.0, 8.0]
    assert steps == [True, False, True, True, True]


def _skipped(values: list[float], *, is_scaled: bool = False) -> list[str]:
    """Return what windows of one micro-batch warn of, whose losses are multiplied by these values."""
    weight = nn.Parameter(torch.ones(2))
    sync, optimizer = pe.GradSync([weight]), torch.optim.SGD([weight], lr=0.1)
    if is_scaled:
        sync.scaler = pe.GradScaler("cpu", init_scale=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for value in values:
            with sync.accumulate():
                sync.backward((weight * value).sum())
            sync.step(optimizer)
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


def test_the_first_skipped_step_warns_with_parameter_and_rank_and_the_next_ones_do_not():
    (text,) = _skipped([1, math.nan, math.nan, 1, math.inf])
    assert text.startswith(
        "window 1: the step was skipped on every rank: inf or nan in the gradient of 'param0'"
    )
    assert "rank 0, micro-batch 0" in text


def test_steps_skipped_in_a_row_warn_rarely():
    texts = _skipped([math.nan] * 101)
    assert [text.partition(":")[0] for text in texts] == ["window 0", "window 9", "window 99"]
    assert "the last 100 steps were skipped" in texts[-1]


def test_under_a_loss_scale_only_many_skipped_steps_in_a_row_warn():
    (text,) = _skipped([*[math.nan] * 9, 1, *[math.nan] * 10], is_scaled=True)
    assert text.startswith("window 19: the last 10 steps were skipped")
