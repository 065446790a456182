"""Ctrl-C in function calls all over a window.

A single process continues with clean windows after `abandon`, or in a new loop. If the interrupt comes
between the reduction and the step, a new loop raises an error, and `abandon` drops the window. Several ranks
continue with equal parameters, or every rank raises an error; no process dies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import rest
from torch import Tensor, nn

import pyengine as pe
from pyengine.comm import watch

PACKAGE = Path(pe.__file__).parent  # the full path: the folder of a clone may be named pyengine, too


class Interrupt:
    """Raises KeyboardInterrupt once, in the `at`-th call of a function in `files` of the package."""

    def __init__(self, at: int, files: str = "") -> None:
        self.at, self.seen, self.files = at, 0, f"{PACKAGE}/{files}"

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self.files in frame.f_code.co_filename:
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


@pytest.mark.parametrize(
    ("how", "every"),
    [("abandon", 17), ("a new loop", 29), *rest(("abandon", 3), ("a new loop", 7))],
)
@pytest.mark.parametrize(
    ("options", "first"), [({}, 1), ({"accumulator": "exact"}, 6), ({"wire": "int8-ef"}, 12)], ids=str
)
def test_one_process_goes_on_after_an_interrupt_at_calls_all_over_a_window(options, first, how, every):
    want = _goes_on(*_made(options))
    counting = Interrupt(0)
    model, sync, optimizer = _made(options)
    _windows(model, sync, optimizer, torch.randn(4, 1, 3))  # warm-up
    sys.setprofile(counting)
    _windows(model, sync, optimizer, torch.randn(2, 1, 3))
    sys.setprofile(None)
    wrong: list[str] = []
    for at in range(first, counting.seen, every):
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


def _interrupted(options: dict[str, Any], at: int, files: str) -> tuple[list[float], str, int]:
    """Train on two ranks, of which rank 0 catches an interrupt; return (parameters, error, calls seen)."""
    watch.WAIT_S = 0.2
    rank, group = dist.get_rank(), dist.new_group(timeout=timedelta(seconds=2))
    small = {"process_group": group, "bucket_cap_mb": 1e-5, "stall_after_s": 0.3}
    model, sync, optimizer = _made(small | options)
    steps: list[pe.StepRecord] = []
    sync.on_step(steps.append)
    xs = torch.randn(8, 1, 3, generator=torch.Generator().manual_seed(rank))
    interrupt, error = Interrupt(at if rank == 0 else 0, files), ""
    try:
        _windows(model, sync, optimizer, xs[:2])
        try:
            sys.setprofile(interrupt)
            _windows(model, sync, optimizer, xs[2:4])
        except KeyboardInterrupt:
            sync.abandon()
            _windows(model, sync, optimizer, xs[2 * len(steps) : 4])
        finally:
            sys.setprofile(None)
        _windows(model, sync, optimizer, xs[4:])
    except RuntimeError as raised:
        error = str(raised)
    return (
        torch.cat([param.detach().flatten() for param in model.parameters()]).tolist(),
        error,
        interrupt.seen,
    )


@pytest.mark.parametrize(
    ("options", "files", "places"),
    [
        ({"accumulator": "exact"}, "comm/staged.py", (5, 14)),
        *rest(
            ({"accumulator": "exact"}, "", range(1, 1334, 41)),
            ({"wire": "int8-ef"}, "", range(1, 2000, 61)),
        ),
    ],
    ids=str,
)
def test_ranks_go_on_alike_or_all_raise_after_an_interrupt_on_one(ranks, options, files, places):
    outcomes = set()
    for at in places:
        ends = ranks(2).ends(60, _interrupted, options, at, files)
        assert all(end.exit_code is None and not end.error for end in ends), (at, ends)
        (mine, error, seen), (theirs, its_error, _) = (end.value for end in ends)
        assert seen >= at  # it was interrupted
        assert bool(error) == bool(its_error), (at, error, its_error)
        assert error or mine == theirs, at
        outcomes.add(error[:30])
    assert any("collective failed" in error for error in outcomes)
