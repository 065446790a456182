"""The counter."""

from __future__ import annotations

import pytest

from pyengine.window import State, Window, check_accumulate


def _syncs(window: Window) -> bool:
    syncs = window.next_backward_syncs
    window.count_backward()
    return syncs


@pytest.mark.parametrize("size", [1, 2, 5])
def test_only_the_last_backward_of_a_window_syncs(size):
    window = Window(size)
    window.open()
    flags = []
    for k in range(size):
        window.hand_out(k, last=k + 1 == size)
        flags.append(_syncs(window))
    assert flags == [False] * (size - 1) + [True]


def test_forwards_first_leaves_the_sync_to_the_last_backward():
    window = Window(3)
    window.open()
    for k in range(3):
        window.hand_out(k, last=k == 2)
    assert [_syncs(window) for _ in range(3)] == [False, False, True]


def test_a_skipped_backward_leaves_the_window_unsynced():
    window = Window(2)
    window.open()
    window.hand_out(0, last=False)
    window.hand_out(0, last=True)
    assert not _syncs(window)


def test_more_backwards_than_micro_batches_never_sync_too_early():
    window = Window(3)
    window.open()
    window.hand_out(0, last=False)
    assert not _syncs(window) and not _syncs(window)


def test_a_backward_outside_a_window_is_refused():
    with pytest.raises(RuntimeError, match="outside a window"):
        Window(2).count_backward()


def test_a_backward_after_the_window_was_sent_is_refused():
    window = Window(2)
    window.open()
    window.state = State.SYNCED
    with pytest.raises(RuntimeError, match="after window 0 was sent"):
        window.count_backward()


@pytest.mark.parametrize("completed, index", [(True, 1), (False, 0)])
def test_only_a_completed_window_counts(completed, index):
    window = Window(2)
    window.open()
    window.close(completed=completed)
    assert window.index == index and window.state is State.IDLE


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_a_bad_window_length_is_named(value):
    assert f"accumulate={value!r}" in check_accumulate(value)[0]


def test_what_replaces_a_dropped_resumed_window_takes_its_places_until_one_is_completed_or_loaded():
    window = Window(3, share=range(3, 6))
    window.resume([0, 7], [4])
    window.close(completed=False)
    window.open()
    assert window.due == [0, 7, 4]
    window.go_to(5)
    window.open()
    assert (window.index, window.due) == (5, [3, 4, 5])
