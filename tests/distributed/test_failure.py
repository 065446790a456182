"""Windows in which a rank fails, which it abandons, or for which it has no data: ranks never hang or diverge.

Exceptions in every phase of a window are tested in `tests/faults`.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from cases import Breaks, assert_alike, engine, me, raise_key_error
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe


class OneUnused(nn.Module):
    """Two layers, between which the backward may fail, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Breaks.apply(self.first(x))).sum()


@pytest.mark.parametrize(
    ("kind", "dtype", "accumulator"),
    [
        ("own", torch.float32, "fp32"),
        ("attach-unused", torch.float32, "exact"),
        ("attach-unused", torch.bfloat16, "fp32"),
        ("attach-unused", torch.float32, "fp32"),
    ],
)
@on_ranks(2)
def test_a_failed_backward_voids_a_window_in_which_no_rank_has_used_anything(kind, dtype, accumulator):
    """Only rank 1 has a third window, in which it fails before any parameter has a gradient."""
    rank, _ = me()
    model = nn.Linear(3, 1, dtype=dtype)
    sync, forward = engine(kind, model, accumulate=1, accumulator=accumulator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepped = []
    try:
        for number, window in enumerate(sync.windows([torch.ones(2, 3, dtype=dtype)] * (2 + rank))):
            for x in window:
                Breaks.now = number == 2
                sync.backward(Breaks.apply(forward(x)).sum())
            stepped.append(bool(sync.step(optimizer)))
    except MemoryError:
        Breaks.now = False
        sync.abandon()
        sync.synchronize()  # the other rank compares at the end of its loop
    assert stepped == ([True, True] if rank else [True, True, False])


CLIPS = {
    "2-norm": lambda sync: sync.clip_grad_norm_(1.0),
    "largest value": lambda sync: sync.clip_grad_norm_(1.0, norm_type=torch.inf),
    "parameters": lambda sync: sync.clip_grad_norm_(1.0, per="parameter"),
    "values": lambda sync: sync.clip_grad_value_(1.0),
}


def _with_experts() -> tuple[nn.Module, pe.Sync, torch.optim.Optimizer]:
    """Return model, engine and optimizer; experts differ between ranks, so a good norm is a collective."""
    rank, world = me()
    model = OneUnused()
    groups = [dist.new_group([each]) for each in range(world)]
    sync = pe.GradSync(model, accumulate=1, axes=pe.Axes(groups={"second.*": groups[rank]}))
    return model, sync, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("clip", CLIPS)
@on_ranks(2)
def test_clipping_a_window_that_another_rank_gave_up_waits_for_no_rank(clip):
    rank, _ = me()
    (model, sync, optimizer), stepped = _with_experts(), []
    for step in range(3):
        Breaks.now = (rank, step) == (0, 1)
        with contextlib.suppress(MemoryError), sync.accumulate():
            sync.backward(model(torch.ones(1, 3)))
        if not Breaks.now:
            CLIPS[clip](sync)
            assert (step == 1) == sync.grad_norm().isnan()
            stepped.append(bool(sync.step(optimizer)))
    assert stepped == ([True, True] if rank == 0 else [True, False, True])


@pytest.mark.parametrize("clip", CLIPS)
@on_ranks(2)
def test_clipping_a_window_that_another_rank_has_abandoned_raises_on_every_rank(clip):
    """The norm sends a header first, which is paired with rank 1's next header; the norm has another size."""
    rank, _ = me()
    model, sync, optimizer = _with_experts()
    with pytest.raises(RuntimeError, match="rank 0: clips .*; rank 1: sends a window"):
        for step in range(3):
            with sync.accumulate():
                sync.backward(model(torch.ones(1, 3)))
            if (rank, step) == (1, 1):
                sync.abandon()
                continue
            CLIPS[clip](sync)
            sync.step(optimizer)


@pytest.mark.parametrize("done", [1, 2])
@on_ranks(2)
def test_a_rank_without_data_sends_zeros_under_ddp_after_a_window_that_it_abandoned(done):
    """In backwards before the last one, DDP marks parameters as used."""
    rank, _ = me()
    model = nn.Linear(3, 1)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    sync = pe.attach(ddp, accumulate=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepped = 0
    for number, window in enumerate(sync.windows([torch.ones(1, 3)] * (3 if rank else 6))):
        for index, x in enumerate(window):
            if (rank, number, index) == (1, 0, done):
                sync.abandon()
                break
            sync.backward(ddp(x).sum())
        else:
            stepped += bool(sync.step(optimizer))
    assert stepped == 2


@pytest.mark.parametrize("case", ["abandons", "abandons, scaled", "fails", "has none"])
@on_ranks(2)
def test_a_rank_without_another_window_meets_the_others_and_has_their_loss_scale(case):
    """Rank 0 abandons its only window before it is sent, fails in it, or has none; rank 1 has more."""
    rank, _ = me()
    model = nn.Linear(2, 1)
    sync = pe.GradSync(model, accumulate=1)
    if case != "abandons":
        sync.scaler = pe.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    windows = 0
    for window in sync.windows([torch.ones(1, 2)] * (3 if rank else int(case != "has none"))):
        windows += 1
        for x in window:
            loss = model(x).sum()
            if rank == 0:
                if case == "fails":
                    loss.register_hook(raise_key_error)
                    with contextlib.suppress(KeyError):
                        sync.backward(loss)
                sync.abandon()
                break
            sync.backward(loss)
        else:
            sync.step(optimizer)
    assert windows >= 3
    assert sync.scaler is None or sync.scaler.get_scale() == (4.0 if case == "fails" else 8.0)
    assert_alike(model.weight.tolist())


def test_a_scaler_belongs_to_one_engine_until_that_is_closed_or_gives_it_back():
    scaler = pe.GradScaler("cpu")
    first, second, third = (pe.GradSync(nn.Linear(2, 1), accumulate=1) for _ in range(3))
    first.scaler = scaler
    first.scaler = scaler  # setting it again is allowed
    with pytest.raises(ValueError, match="create one GradScaler per engine"):
        second.scaler = scaler
    first.scaler = None
    second.scaler = scaler
    second.close()
    third.scaler = scaler
    assert third.scaler is scaler
