"""Optimizers that step at different intervals with one engine: a gradient is kept until it is used."""

from __future__ import annotations

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
    """It steps every `every` windows, with the same result as in one process; window `bad` is skipped."""
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


@on_ranks(2)
def test_ranks_that_keep_different_gradients_are_refused():
    rank, _ = me()
    model = Pair()
    sync = pe.GradSync(model, accumulate=1)
    fast = torch.optim.SGD([model.fast], lr=1.0)
    refused = pytest.raises(RuntimeError, match="ranks keep different gradients of the previous window")
    with recorded_warnings(), refused:
        for window in range(2):
            with sync.accumulate():
                sync.backward(model(_data(window, rank)), count=2)
            sync.step(fast)
            if rank == 0:
                model.slow.grad = None
