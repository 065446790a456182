"""Ctrl-C at every call of a window of one process: `abandon`, or a new loop, goes on with clean windows.

Between the reduction and the step a new loop says that the window was not used: `abandon` drops it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyengine as pe


class Interrupt:
    """Raises KeyboardInterrupt in the n-th call of a function of pyengine, once."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "/pyengine/" in frame.f_code.co_filename:
            self.seen += 1
            if self.seen == self.at:
                sys.setprofile(None)
                raise KeyboardInterrupt


def _made(options: dict[str, Any]) -> tuple[nn.Module, pe.Sync, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    sync = pe.GradSync(model, accumulate=2, **options)
    return model, sync, torch.optim.SGD(model.parameters(), lr=0.1)


def _windows(model: nn.Module, sync: pe.Sync, optimizer: torch.optim.Optimizer, xs: Tensor) -> None:
    for window in sync.windows(xs):
        for x in window:
            sync.backward(model(x).sum())
        sync.clip_grad_norm_(1.0)
        sync.step(optimizer)


def _goes_on(model: nn.Module, sync: pe.Sync, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    torch.manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape))
    _windows(model, sync, optimizer, torch.randn(4, 1, 3))
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("how", ["abandon", "a new loop"])
@pytest.mark.parametrize("options", [{}, {"accumulator": "exact"}, {"wire": "int8-ef"}], ids=str)
def test_one_process_goes_on_after_an_interrupt_at_any_call(options, how):
    want = _goes_on(*_made(options))
    counting = Interrupt(0)
    model, sync, optimizer = _made(options)
    _windows(model, sync, optimizer, torch.randn(4, 1, 3))  # warm
    sys.setprofile(counting)
    _windows(model, sync, optimizer, torch.randn(2, 1, 3))
    sys.setprofile(None)
    wrong: list[str] = []
    for at in range(1, counting.seen, 3 if how == "abandon" else 7):
        interrupt = Interrupt(at)
        try:
            sys.setprofile(interrupt)
            _windows(model, sync, optimizer, torch.randn(2, 1, 3))
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        if how == "abandon":
            _attempt(sync.abandon, wrong, at)
        try:
            try:
                got = _goes_on(model, sync, optimizer)
            except RuntimeError as error:  # between the reduction and the step
                if how == "abandon" or "or sync.abandon()" not in str(error):
                    raise
                sync.abandon()
                got = _goes_on(model, sync, optimizer)
        except Exception as error:  # noqa: BLE001 - all of them are listed
            wrong.append(f"{at}: {error!r}"[:150])
            model, sync, optimizer = _made(options)
            continue
        if not all(map(torch.equal, got, want)):
            wrong.append(f"{at}: other bits")
    assert not wrong, (counting.seen, wrong)


def _attempt(action: Callable[[], object], wrong: list[str], at: int) -> None:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - all of them are listed
        wrong.append(f"{at}: abandon {error!r}"[:150])
