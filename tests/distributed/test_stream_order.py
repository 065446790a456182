"""The engine's streams: sums are right whatever arrives late and whatever reuses freed memory.

Here the CPU plays the device, and races are found by the order of events; on a GPU they show in the sums.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from cases import Breaks, Integers, assert_same, grads, integers, mean_of_integers
from delayed import Delayed, overwrite
from stream_races import Machine, machine
from torch import nn

import pyengine as pe
from pyengine.engine import engine_ranks

CASES = {
    "native": {"accumulator": "native"},
    "native, bf16 wire": {"accumulator": "native", "wire": pe.wire.BF16()},
    "fp32 sums": {},
    "fp32 sums, bf16 wire": {"wire": pe.wire.BF16()},
    "exact": {"accumulator": pe.Exact(micro_batches=4)},
    "raise": {"nonfinite": "raise"},
}


@pytest.fixture(params=[False, True], ids=["events are late", "events are done"])
def races(request) -> Iterator[Machine]:
    """Fail a test whose operations race, or whose memory is freed while a stream may use it."""
    with machine(events_are_done=request.param) as made:
        yield made
    assert not made.races, "\n".join(made.races)


def _engine(model: nn.Module, monkeypatch: pytest.MonkeyPatch, sleep, **options) -> pe.Sync:
    device = next(model.parameters()).device
    monkeypatch.setattr(engine_ranks, "comm_for", lambda *_: Delayed(device, sleep))
    return pe.GradSync(model, accumulate=2, bucket_cap_mb=1e-5, **options)


def _train(model: Integers, sync: pe.Sync, num: int = 3) -> None:
    """Train windows of two micro-batches, the same on both ranks, and compare each with one big batch."""
    device = model.matrix.device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    twin = copy.deepcopy(model).cpu()
    for number in range(num):
        mine = [integers(10 * number + k, 4) for k in range(2)]
        for k, (x, t) in enumerate(mine):
            loss_of = [model(x.to(device), t.to(device))]
            with sync.accumulate(), overwrite(model) if k == 1 else nullcontext():
                sync.backward(loss_of.pop(), count=4)
        sync.clip_grad_norm_(1e9)
        sync.unscale_()
        with torch.utils._python_dispatch._disable_current_modes():
            assert_same(grads(model), mean_of_integers(twin, mine, 8.0))
        sync.step(optimizer)
    sync.synchronize()


@pytest.mark.parametrize("case", CASES)
def test_no_operation_races_with_one_on_another_stream(races, monkeypatch, case):
    # Every kind of sum and wire with only one dtype, because each case takes a third of a second.
    model = Integers(torch.float32 if case in ("native", "exact", "raise") else torch.bfloat16)
    sync = _engine(model, monkeypatch, lambda: None, **CASES[case])
    _train(model, sync)
    sync.close()


def _narrow() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).bfloat16()


def test_a_window_that_was_given_up_leaves_no_race(races, monkeypatch):
    model = _narrow()
    sync = _engine(model, monkeypatch, lambda: None)
    for number in range(3):
        for k in range(2):
            Breaks.now = fails = (number, k) == (1, 1)  # after the last layer's gradients, which were sent
            with pytest.raises(MemoryError) if fails else nullcontext(), sync.accumulate():
                sync.backward(model[1](Breaks.apply(model[0](torch.ones(2, 3).bfloat16()))).sum())
        if number != 1:
            sync.unscale_()
    sync.close()


def test_an_engine_that_is_closed_while_its_buckets_travel_leaves_no_race(races, monkeypatch):
    model = _narrow()
    sync = _engine(model, monkeypatch, lambda: None)
    window = next(iter(sync.windows([torch.ones(2, 3).bfloat16()] * 4)))
    for _ in range(2):  # do not ask for a third micro-batch, which would wait for the buckets
        sync.backward(model(next(window)).sum())
    sync.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_sums_are_right_however_late_they_come(monkeypatch, case, dtype):
    model = Integers(dtype).cuda()
    _train(model, _engine(model, monkeypatch, lambda: torch.cuda._sleep(2**23), **CASES[case]))
