"""Slots of a window: where a slot ends, and which flags its micro-batches have."""

from __future__ import annotations

import pytest

from pyengine.window.counter import Slots


def _after(size: int, places: list[int]) -> Slots:
    slots = Slots(size)
    for place in places:
        slots.add(ends=slots.ends_at(place))
    return slots


@pytest.mark.parametrize(
    ("size", "places", "is_open"), [(1, [0], False), (3, [3, 4], True), (3, [3, 4, 5], False)]
)
def test_a_slot_is_open_until_its_last_place(size, places, is_open):
    assert _after(size, places).is_open == is_open


def test_flags_of_a_slot_are_those_of_all_its_micro_batches():
    slots = _after(2, [4, 5, 6])
    slots.end()
    slots.add(ends=True)
    assert not slots.is_open
    assert slots.blame(lambda param: [0, 2] if param else None)(1) == [0, 1, 3]
    assert slots.blame(lambda param: None)(0) is None
    tell = [0].copy
    assert _after(1, [0, 1]).blame(tell) is tell
