"""Residuals of wires follow their parameters to a new bucket layout; the memory of payloads."""

from __future__ import annotations

import torch

import pyengine as pe
from pyengine.wire.bucket_wire import BucketWire, WireMemory
from pyengine.wire.memory import BucketSlice, PayloadMemory

CPU = torch.device("cpu")
FEEDBACK = pe.wire.ErrorFeedback(pe.wire.Int8())


def _bucket(memory: WireMemory, *places: tuple[str, int, int], wire: pe.wire.Wire = FEEDBACK) -> BucketWire:
    numel = max(offset + numel for _, offset, numel in places) + 5
    bound = memory.wire_for(wire, [BucketSlice(*place) for place in places], numel, CPU)
    assert isinstance(bound, BucketWire)
    return bound


def _fill(wire: BucketWire, key: str, value: float) -> None:
    assert wire.memory.residual.numel() > 0  # allocates the residual
    part = wire.memory.part(key)
    assert part is not None
    part.fill_(value)


def _kept(memory: WireMemory) -> dict[object, float]:
    return {key: float(part.unique()) for key, part in memory.parts().items()}


def test_residuals_follow_their_parameters_into_other_buckets():
    memory = WireMemory()
    first, second = _bucket(memory, ("a", 0, 3), ("b", 64, 2)), _bucket(memory, ("c", 0, 4))
    for wire, key, value in ((first, "a", 1.0), (first, "b", 2.0), (second, "c", 3.0)):
        _fill(wire, key, value)
    # DDP hands out one bucket at a time: parameters of later buckets keep their residuals.
    _bucket(memory, ("c", 0, 4), ("a", 64, 3))
    assert _kept(memory) == {"a": 1.0, "b": 2.0, "c": 3.0}
    _bucket(memory, ("b", 0, 2))
    assert _kept(memory) == {"a": 1.0, "b": 2.0, "c": 3.0}


def test_loaded_residuals_are_kept_until_their_bucket_is_made():
    memory, saved = WireMemory(), {"a": torch.full((3,), 7.0)}
    memory.load(saved)
    assert _kept(memory) == {"a": 7.0}
    wire = _bucket(memory, ("a", 0, 3), ("b", 64, 2))
    assert _kept(memory) == {"a": 7.0, "b": 0.0}
    memory.load({})
    assert not wire.memory.residual.any()
    without = WireMemory()
    without.load(saved)
    wire = _bucket(without, ("a", 0, 3), wire=pe.wire.Int8(rounding="stochastic"))
    assert wire.memory.part("a") is None and without.parts() == {}


def test_every_window_has_turns_of_its_own():
    memory = WireMemory()
    wire = _bucket(memory, ("a", 0, 3))
    memory.begin(0)
    early = [wire.memory.next_turn() for _ in range(3)]
    memory.begin(1)
    late = [wire.memory.next_turn() for _ in range(3)]
    assert len({*early, *late}) == 6
    memory.begin(1)  # like a run that resumes from a state
    assert [wire.memory.next_turn() for _ in range(3)] == late
    assert _bucket(memory, ("b", 0, 3)).memory.turn == wire.memory.turn - 3


def test_residuals_follow_the_loss_scale_and_a_window_that_is_not_used_leaves_none():
    """This also holds for loaded residuals without a bucket, for example of a frozen parameter."""
    memory, state = WireMemory(), torch.full((3,), 8.0)
    residual = _bucket(memory, ("a", 0, 3)).memory.residual
    memory.load({"b": state})
    residual.fill_(3.0)
    memory.scale_(torch.tensor(0.25))
    memory.drop(torch.tensor(0.0))
    assert _kept(memory) == {"a": 0.75, "b": 2.0}
    assert residual.eq(0.75).all() and state.eq(8).all()
    memory.drop(torch.tensor(1.0))
    assert _kept(memory) == {"a": 0.0, "b": 0.0}
    assert residual.eq(0).all() and state.eq(8).all()


def test_payloads_are_not_kept_of_a_device_whose_allocator_keeps_them():
    payloads, device = PayloadMemory(), torch.device("meta")
    sent = payloads.allocate("sent", 8, device)
    payloads.free(sent=sent)
    assert payloads.allocate("sent", 8, device) is not sent
