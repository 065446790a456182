"""Runs of micro-batches: where a run ends, and which flags its micro-batches have."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.window.counter import Runs, share_of_rest


def _after(size: int, places: list[int], *, done: int = 0) -> Runs:
    runs = Runs(size, done=done)
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
    assert runs.spread(torch.tensor([0, 1, 2])).tolist() == [0, 0, 1, 2]
    assert runs.blame(lambda param: [0, 2] if param else None)(1) == [0, 1, 3]
    assert runs.blame(lambda param: None)(0) is None
    loaded = _after(2, [4, 5], done=2)
    assert loaded.spread(torch.tensor([7, 8, 9])).tolist() == [7, 8, 9, 9]
    assert loaded.blame(lambda _: [1, 2])(0) == [1, 2, 3]
    tell = [0].copy
    assert _after(1, [0, 1]).blame(tell) is tell


@settings(max_examples=50, deadline=None)
@given(data=st.data(), run=st.integers(1, 4), slots=st.integers(1, 6), world=st.integers(1, 4))
def test_the_rest_of_a_window_is_dealt_out_in_whole_runs(data, run, slots, world):
    ended = data.draw(st.sets(st.integers(0, slots - 1)))
    done = [place for place in range(slots * run) if place // run in ended]
    dealt = [
        share_of_rest(range(slots * run), done, rank=rank, world_size=world, run=run) for rank in range(world)
    ]
    assert sorted(sum(dealt, done)) == [*range(slots * run)]
    for mine in dealt:
        assert mine == [i * run + k for i in sorted({place // run for place in mine}) for k in range(run)]
