"""What crosses the network: per window a header and one reduction of each bucket, and nothing before them."""

from __future__ import annotations

import pytest
import torch
from cases import Collectives, engine, me, records_of, rings_only
from ranks import on_ranks
from torch import nn

import pyengine as pe


def _model(batch_norm: bool) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6) if batch_norm else nn.Identity()
    return nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, 2))


def _counted(kind: str, batch_norm: bool, accumulate: int) -> list[list[list[str]]]:
    """Return the collectives of every micro-batch (its forward included), by window, after three windows.

    The first three are left out because DDP rebuilds its buckets early in the second or (static_graph) third.
    """
    model = _model(batch_norm)
    options = {"bucket_cap_mb": 1e-5} if kind == "own" else {}
    sync, forward = engine(kind, model, accumulate=accumulate, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    windows = []
    for window in sync.windows([torch.randn(3, 4) for _ in range(5 * accumulate)]):
        counts = []
        for x in window:
            with rings_only(), Collectives() as seen:
                sync.backward(forward(x).sum())
            counts.append(seen.names)
        with Collectives() as seen:
            sync.clip_grad_norm_(1.0)
            sync.step(optimizer)
        assert seen.names == []
        windows.append(counts)
    return windows[3:]


@pytest.mark.parametrize(
    ("kind", "accumulate"), [("own", 1), ("own", 3), ("attach", 3), ("attach-view", 1), ("attach-static", 3)]
)
def test_only_the_last_micro_batch_sends_header_and_buckets(ranks, kind, accumulate):
    for windows in ranks(2).run(_counted, kind, False, accumulate):
        for *earlier, last in windows:
            assert earlier == [[]] * (accumulate - 1)
            assert set(last) == {"allreduce_"}
            # The header and more than one bucket, the same in every window.
            assert len(last) == len(windows[0][-1]) > 2


def test_batch_norm_buffers_travel_once_a_window_and_find_unused_adds_one(ranks):
    plain = ranks(2).run(_counted, "attach", False, 3)[0][0][-1]
    for windows in ranks(2).run(_counted, "attach-unused", True, 3):
        for *earlier, last in windows:
            assert earlier == [[], []]
            assert last.count("broadcast_") == 2  # one int64 and one float32 coalesced buffer
            assert last.count("allreduce_") >= len(plain) + 1


@pytest.mark.parametrize(
    ("world", "accumulate", "dtype", "wire"),
    [
        (1, 2, torch.float32, pe.wire.FP32()),
        (2, 2, torch.float32, pe.wire.BF16()),
        (2, 1, torch.bfloat16, pe.wire.FP32()),
        (3, 2, torch.bfloat16, pe.wire.BF16()),
        (4, 2, torch.float32, pe.wire.FP32()),
    ],
    ids=str,
)
@on_ranks()
def test_step_record_counts_the_collectives_and_bytes_that_really_travel(world, accumulate, dtype, wire):
    model = _model(False).to(dtype)
    sync = pe.GradSync(model, accumulate=accumulate, wire=wire)
    records = records_of(sync)
    # Count the second window, because ranks exchange the order of gradients after the first one's buckets.
    for window in sync.windows([torch.randn(3, 4, dtype=dtype)] * 2 * accumulate):
        with rings_only(), Collectives() as seen:
            for x in window:
                sync.backward(model(x).sum().float())
            sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    with rings_only(), Collectives() as behind:
        sync.synchronize()
    assert behind.names == ["allreduce_"] * (me()[1] > 1)  # ranks compare how the last window was used
    record, collectives, nbytes = records[1], len(seen.names), seen.nbytes
    # Header and bucket; used flags only if no micro-batch before the header has shown that all are used.
    assert record.collectives == collectives == 2 + (world > 1 and accumulate == 1)
    assert record.bytes_on_wire in _ring(nbytes, world)


def _ring(nbytes: int, world: int) -> range:
    """Return 2 (W - 1) / W of the bytes, give or take the rounding of each collective."""
    exact = 2 * (world - 1) * nbytes // world
    return range(exact - 3, exact + 1)


@on_ranks(2)
def test_buckets_leave_during_the_first_windows_backward():
    model = _model(False)
    sync = pe.GradSync(model, accumulate=1, bucket_cap_mb=1e-6)
    traffic = sync._engine.comm.traffic
    launched, before = [], traffic.collectives

    def note(*_: object) -> None:
        sync._engine.window.header.vector()  # no bucket is launched before the header is received
        launched.append(traffic.collectives - before)

    for layer in (model[2], model[0]):
        layer.register_full_backward_hook(note)
    with sync.accumulate():
        sync.backward(model(torch.randn(3, 4, requires_grad=True)).sum())
    assert launched[-1] > 1  # more than the header had been sent before the first layer's backward ended


class Backwards(nn.Module):
    """Layers used in reverse registration order, so that the first guess at the bucket order is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


@on_ranks(2)
def test_buckets_follow_the_observed_order_from_the_second_window_on():
    torch.manual_seed(0)
    model = Backwards()
    sync = pe.GradSync(model, accumulate=2, bucket_cap_mb=1e-6)
    orders, norms = [], []
    for window in sync.windows([torch.ones(1, 4)] * 6):
        for x in window:
            sync.backward(model(x).sum())
        orders.append([bucket.slots[0].name for bucket in sync.layout.buckets])
        norms.append(sync.grad_norm().item())
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
    names = [f"layers.{i}.weight" for i in range(4)]
    assert orders == [names[::-1], names, names]
    assert norms == [norms[0]] * 3
