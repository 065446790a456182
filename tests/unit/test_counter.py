"""`WindowCounter`: which backward syncs, and which micro-batches of a window are due."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.window.counter import State, WindowCounter, check_accumulate, share


def _syncs(counter: WindowCounter) -> bool:
    syncs = counter.next_backward_syncs
    counter.count_backward()
    return syncs


@pytest.mark.parametrize(
    ("accumulate", "handed_out", "backwards"), [(2, 2, 1), (3, 1, 2)], ids=["one skipped", "one too many"]
)
def test_a_window_without_as_many_backwards_as_micro_batches_is_not_synced(accumulate, handed_out, backwards):
    counter = WindowCounter(accumulate)
    counter.open()
    for number in range(handed_out):
        counter.hand_out(0, last=number == accumulate - 1)
    assert [_syncs(counter) for _ in range(backwards)] == [False] * backwards


@pytest.mark.parametrize(
    ("state", "message"), [(State.IDLE, "outside a window"), (State.SENT, "after window 0 was sent")]
)
def test_a_backward_that_belongs_to_no_window_is_refused(state, message):
    counter = WindowCounter(2)
    counter.open()
    counter.state = state
    with pytest.raises(RuntimeError, match=message):
        counter.count_backward()


@pytest.mark.parametrize("completed, index", [(True, 1), (False, 0)])
def test_only_a_completed_window_counts(completed, index):
    counter = WindowCounter(2)
    counter.open()
    counter.close(completed=completed)
    assert counter.index == index and counter.state is State.IDLE


@pytest.mark.parametrize("value", [0, 1.0, True])
def test_a_bad_window_length_is_named(value):
    assert f"accumulate={value!r}" in check_accumulate(value)[0]


def _run(counter: WindowCounter, data: st.DataObject, most: int) -> list[int]:
    """Hand out up to `most` due places, with backwards at random times; return those whose backward ran."""
    syncs: list[bool] = []
    due = counter.due[:most]
    for place in due:
        counter.hand_out(place, last=place == due[-1])
        while counter.has_micro_batch_out and (place == due[-1] or data.draw(st.booleans())):
            syncs.append(_syncs(counter))
    assert syncs == [False] * (len(due) - 1) + [True] * bool(due)
    return counter.places


@settings(max_examples=30, deadline=None)
@given(data=st.data(), num=st.integers(1, 9), world=st.integers(1, 4))
def test_a_window_flushed_short_leaves_the_next_one_whole(data, num, world):
    for rank in range(world):
        mine = share(num, rank=rank, world_size=world)
        counter = WindowCounter(num, share=mine)
        for index in range(3):
            counter.open()
            most = data.draw(st.integers(0, len(mine)))
            assert _run(counter, data, most) == [*mine[:most]]
            counter.close(completed=True)
            assert counter.index == index + 1
