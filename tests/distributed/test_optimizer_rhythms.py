"""Optimizers of different rhythm over one engine: a gradient is kept until an optimizer has used it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from cases import engine, me, recorded_warnings
from ranks import on_ranks
from torch import Tensor, nn

import pyengine as pe


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Parameter(torch.zeros(3))
        self.slow = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.fast * x[:, :3]).sum() + (self.slow * x[:, 3:]).sum()


def _data(window: int, rank: int, *, is_bad: bool = False) -> Tensor:
    x = torch.arange(5.0).repeat(2, 1) + 4 * window + rank
    return x * torch.nan if is_bad else x


@pytest.mark.parametrize(
    ("world", "kind", "wraps", "clears", "every", "bad"),
    [
        (1, "own", False, False, 2, -1),
        (2, "own", True, True, 2, -1),
        (3, "own-exact", False, False, 2, -1),
        (2, "attach", False, True, 2, -1),
        (2, "attach-view", True, False, 2, -1),
        (2, "own", False, False, 2, 2),
        (2, "own", False, False, 3, 1),
        (2, "attach", False, False, 2, 2),
    ],
)
@on_ranks()
def test_a_slow_optimizer_steps_on_all_windows_since_its_last_step(kind, wraps, clears, every, bad):
    """It steps in every second or third window, as in one process; the window `bad` is skipped."""
    rank, world = me()
    model, twin = Pair(), Pair()
    sync, forward = engine(kind, model, accumulate=1)
    fast, slow = torch.optim.SGD([model.fast], lr=1.0), torch.optim.SGD([model.slow], lr=1.0)
    plain_fast, plain_slow = torch.optim.SGD([twin.fast], lr=1.0), torch.optim.SGD([twin.slow], lr=1.0)
    due = sync.wrap(slow) if wraps else None
    for window in range(6):
        with recorded_warnings(), sync.accumulate():
            sync.backward(forward(_data(window, rank, is_bad=window == bad)), count=2)
        sync.step(fast)
        if window != bad:
            sum(twin(_data(window, r)) for r in range(world)).div(2 * world).backward()
            plain_fast.step()
        plain_fast.zero_grad()
        if window % every == every - 1:
            due.step() if due is not None else sync.step(slow)
            if window != bad:
                plain_slow.step()
                plain_slow.zero_grad()
        elif clears:
            (due or slow).zero_grad()
            plain_slow.zero_grad()
    assert torch.equal(model.fast, twin.fast)
    assert torch.equal(model.slow, twin.slow)


def test_gradients_that_no_optimizer_has_ever_used_are_named_once():
    model = Pair()
    sync = pe.GradSync(model, accumulate=1)
    fast = torch.optim.SGD([model.fast], lr=1.0)
    with recorded_warnings() as texts:
        for _ in range(4):
            with sync.accumulate():
                sync.backward(model(_data(0, 0)), count=2)
            sync.step(fast)
    (text,) = texts
    assert text.startswith("step 'slow' too, set .grad to None, or freeze")


CLIPPINGS: dict[str, Callable[[pe.Sync], object]] = {
    "norm": lambda sync: sync.clip_grad_norm_(0.5),
    "norm of each": lambda sync: sync.clip_grad_norm_(0.5, per="parameter"),
    "norm of a group": lambda sync: sync.clip_grad_norm_(0.5, per={"slow": ["slow"]}),
    "inf-norm": lambda sync: sync.clip_grad_norm_(0.5, math.inf),
    "values": lambda sync: sync.clip_grad_value_(0.5),
}


@pytest.mark.parametrize("name", CLIPPINGS)
@pytest.mark.parametrize("kind", ["own", "own-native", "own-exact"])
@on_ranks(2)
def test_what_one_optimizer_keeps_is_clipped_behind_the_step_of_another(kind, name):
    model = Pair()
    sync, forward = engine(kind, model, accumulate=1)
    fast, slow = torch.optim.SGD([model.fast], lr=1.0), torch.optim.SGD([model.slow], lr=1.0)
    for window in range(4):
        with sync.accumulate():
            sync.backward(forward(_data(window, me()[0])), count=2)
        sync.step(fast)
        CLIPPINGS[name](sync)
        if window % 2:
            sync.step(slow)
        else:
            assert model.slow.grad.abs().max() <= 0.5


@pytest.mark.parametrize("name", CLIPPINGS)
@on_ranks(2)
def test_a_bare_backward_in_front_of_a_clipping_is_still_refused(name):
    model = Pair()
    sync = pe.GradSync(model, accumulate=1)
    fast = torch.optim.SGD([model.fast], lr=1.0)
    with sync.accumulate():
        sync.backward(model(_data(0, me()[0])), count=2)
    sync.step(fast)
    model(_data(1, 0)).backward()
    CLIPPINGS[name](sync)
    with pytest.raises(ValueError, match="the gradient of 'fast' was written to between windows"):
        with sync.accumulate():
            sync.backward(model(_data(0, me()[0])), count=2)
        sync.step(fast)


@pytest.mark.parametrize("kind", ["own", "own-native"])
@on_ranks(2)
def test_one_optimizers_gradients_may_be_zeroed_in_place_between_windows(kind):
    model = Pair()
    sync, forward = engine(kind, model, accumulate=1)
    fast, slow = torch.optim.SGD([model.fast], lr=1.0), torch.optim.SGD([model.slow], lr=1.0)
    for window, zeroed in enumerate([fast, slow, fast, slow]):
        with sync.accumulate():
            sync.backward(forward(_data(window, me()[0])), count=2)
        sync.step(fast)
        if window % 2:
            sync.step(slow)
        zeroed.zero_grad(set_to_none=False)


@on_ranks(2)
def test_ranks_that_keep_different_gradients_are_refused():
    rank, _ = me()
    model = Pair()
    sync = pe.GradSync(model, accumulate=1)
    fast = torch.optim.SGD([model.fast], lr=1.0)
    refused = pytest.raises(RuntimeError, match="ranks keep different gradients of the window before")
    with recorded_warnings(), refused:
        for window in range(2):
            with sync.accumulate():
                sync.backward(model(_data(window, rank)), count=2)
            sync.step(fast)
            if rank == 0:
                model.slow.grad = None
