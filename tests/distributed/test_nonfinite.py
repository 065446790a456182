"""inf and nan on one rank are handled on every rank, and the report names where they came from."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from cases import Inject, assert_alike, engine, me, recorded_warnings, records_of
from ranks import on_ranks
from torch import Tensor, nn
from window_errors import noted

import pyengine as pe


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2, dtype=dtype), nn.Linear(2, 1, dtype=dtype)

    def forward(self, x: Tensor, inject: float) -> Tensor:
        return self.second(Inject.apply(self.first(x), inject)).float().sum()


F32, BF16, INF, NAN = torch.float32, torch.bfloat16, math.inf, math.nan


@pytest.mark.parametrize(
    ("kind", "world", "policy", "dtype", "value", "where", "has_loss"),
    [
        ("own", 1, "skip", F32, INF, (0, 1), True),
        ("own-native", 3, "skip", F32, NAN, (2, 1), True),
        ("attach", 2, "skip", F32, NAN, (1, 1), True),
        ("attach-view", 3, "skip", F32, INF, (2, 1), True),
        # With fp32 sums of bf16 parameters, the micro-batch is known without "raise".
        ("own", 2, "skip", BF16, NAN, (0, 1), False),
        ("attach", 2, "skip", BF16, NAN, (0, 1), False),
        ("own-native", 3, "raise", F32, INF, (1, 1), True),
        ("attach", 3, "raise", F32, INF, (1, 2), True),
        ("own", 2, "raise", F32, INF, (1, 0), False),
        ("own", 2, "raise", BF16, INF, (1, 1), False),
    ],
)
@on_ranks()
def test_a_window_with_inf_or_nan_leaves_parameters_alone_and_names_where_it_came_from(
    kind, policy, dtype, value, where, has_loss
):
    """The gradient of `where` (rank, micro-batch), and with `has_loss` also its loss, is not finite."""
    rank, _ = me()
    torch.manual_seed(0)
    model = Net(dtype)
    sync, forward = engine(kind, model, accumulate=3, nonfinite=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = records_of(sync)
    before = [p.detach().clone() for p in model.parameters()]
    errors: list[str] = []
    for number, window in enumerate(sync.windows([torch.ones(1, 3, dtype=dtype)] * 6)):
        with noted(errors, sync):
            for k, x in enumerate(window):
                bad = number == 0 and (rank, k) == where
                loss = forward(x, value if bad else 1.0)
                sync.backward(loss * value if bad and has_loss else loss)
            assert sync.step(optimizer) == (number == 1)
        moved = any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert moved == (number == 1)
    assert [bool(error) for error in errors] == [policy == "raise", False]
    reason = errors[0] or records[0].reason
    assert "inf or nan in the gradient of 'first.weight', 'first.bias'" in reason
    assert reason.endswith("rank {}, micro-batch {}".format(*where) + " (its loss)" * has_loss)
    assert_alike(reason)


@pytest.mark.parametrize(("fused", "when"), [(False, 2), (True, 2), (True, -1)])
@on_ranks(1)
def test_parameters_and_scale_stay_bit_equal_to_the_stock_scalers(fused, when):
    """The loss of window `when` is inf; -1 stands for no window."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    ours, stock = (torch.optim.AdamW(each.parameters(), lr=0.01, fused=fused) for each in (model, twin))
    options = {"init_scale": 2.0**10, "growth_interval": 3}
    scaler = torch.amp.GradScaler("cpu", **options)
    sync = pe.GradSync(model, accumulate=2)
    sync.scaler = pe.GradScaler("cpu", **options)
    for number, window in enumerate(sync.windows([torch.randn(2, 4) for _ in range(10)])):
        factor = math.inf if number == when else 1.0
        for x in window:
            sync.backward(model(x).square().sum() * factor)
            scaler.scale(twin(x).square().sum() * factor / 2).backward()  # the mean, by hand
        sync.step(ours)
        scaler.step(stock)
        scaler.update()
        stock.zero_grad()
        assert sync.scaler.get_scale() == scaler.get_scale()
        assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize(("kind", "hands_over"), [("own-native", False), ("attach", False), ("own", True)])
@on_ranks(2)
def test_an_inf_on_one_rank_backs_every_ranks_scale_off(kind, hands_over):
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
        assert number == 1 or norm.item() == pytest.approx(3**0.5)  # without the loss scale
        if hands_over:
            sync.unscale_()
        if hands_over and number != 2:  # in window 2, sync.step must not update the scale again
            if torch.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
            steps.append(bool(torch.isfinite(norm)))
        else:
            steps.append(sync.step(optimizer))
        scales.append(sync.scaler.get_scale())
    assert scales == [8.0, 4.0, 4.0, 8.0, 8.0]
    assert steps == [True, False, True, True, True]


@pytest.mark.parametrize("how", ["update", "load_state_dict", "another", "none"])
def test_a_loss_scale_that_changes_within_a_window_is_refused(how):
    weight = nn.Parameter(torch.ones(2))
    sync, scaler = pe.GradSync([weight], accumulate=2), pe.GradScaler("cpu", init_scale=4.0)
    sync.scaler = scaler

    def change() -> None:
        if how == "update":
            scaler.update(2.0)
        elif how == "load_state_dict":
            scaler.load_state_dict(scaler.state_dict())
        else:
            sync.scaler = None if how == "none" else pe.GradScaler("cpu")

    with pytest.raises(RuntimeError, match="in the middle of window 0"), sync.accumulate(last=False):
        with sync.micro_batch():
            scaler.scale(weight.sum()).backward()
        change()
    sync.abandon()
    scaler.scale(weight.sum())  # a loss without a backward
    change()
    for _ in range(2):
        with sync.accumulate():
            sync.backward(weight.sum())
    sync.unscale_()
    assert weight.grad.tolist() == [1.0, 1.0]


def _skipped(values: list[float], *, is_scaled: bool = False) -> list[str]:
    """Train one window per value, by which the loss is multiplied; return the warnings."""
    weight = nn.Parameter(torch.ones(2))
    sync = pe.GradSync([weight])
    optimizer = sync.wrap(torch.optim.SGD([weight], lr=0.1))
    if is_scaled:
        sync.scaler = pe.GradScaler("cpu", init_scale=1.0)
    with recorded_warnings() as texts:
        for value in values:
            with sync.accumulate():
                sync.backward((weight * value).sum())
                optimizer.step()
            assert optimizer.step_was_skipped == (not math.isfinite(value))
    return texts


def test_the_first_skipped_step_warns_with_parameter_and_rank_and_the_next_ones_do_not():
    (text,) = _skipped([1, math.nan, math.nan, 1, math.inf])
    assert text.startswith("window 1: the step was skipped on every rank: inf or nan in the gradient of")
    assert "'param0'" in text and "rank 0, micro-batch 0" in text


def test_steps_skipped_in_a_row_warn_rarely():
    texts = _skipped([math.nan] * 101)
    assert [text.partition(":")[0] for text in texts] == ["window 0", "window 9", "window 99"]
    assert "the last 100 steps were skipped" in texts[-1]


def test_under_a_loss_scale_only_many_skipped_steps_in_a_row_warn():
    (text,) = _skipped([*[math.nan] * 9, 1, *[math.nan] * 10], is_scaled=True)
    assert text.startswith("window 19: the last 10 steps were skipped")
