"""Runs of micro-batches: where a run ends, and which flags its micro-batches have."""

from __future__ import annotations

import pytest

from pyengine.window.counter import Runs


def _after(size: int, places: list[int]) -> Runs:
    runs = Runs(size)
    for place in places:
        runs.add(ends=runs.ends_at(place))
    return runs


@pytest.mark.parametrize(
    ("size", "places", "is_open"), [(1, [0], False), (3, [3, 4], True), (3, [3, 4, 5], False)]
)
def test_a_run_is_open_until_its_last_place(size, places, is_open):
    assert _after(size, places).is_open == is_open


def test_flags_of_a_run_are_those_of_all_its_micro_batches():
    runs = _after(2, [4, 5, 6])
    runs.end()
    runs.add(ends=True)
    assert not runs.is_open
    assert runs.blame(lambda param: [0, 2] if param else None)(1) == [0, 1, 3]
    assert runs.blame(lambda param: None)(0) is None
    tell = [0].copy
    assert _after(1, [0, 1]).blame(tell) is tell
