"""`Lookahead` reads one micro-batch ahead, or as many as `peek` asks for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyengine.engine.loop import Lookahead


def _counted(num: int, read: list[int]) -> Iterator[int]:
    for item in range(num):
        read.append(item)
        yield item


def _take(source: Lookahead[int]) -> int:
    item = source.next_item()
    source.remove()
    return item


def _dies() -> Iterator[int]:
    yield 0
    raise OSError("gone")


@pytest.mark.parametrize("asked", [0, 1, 2, 3, 5])
def test_items_that_were_shown_are_returned_in_order(asked):
    read: list[int] = []
    source = Lookahead(_counted(3, read))
    assert source.peek(asked) == list(range(min(asked, 3)))
    assert read == list(range(max(1, min(asked, 3))))  # one is read ahead
    assert [_take(source) for _ in range(3)] == [0, 1, 2]
    assert (source.has_next, source.peek(2)) == (False, [])


def test_has_next_is_false_behind_the_last_item_shown():
    source = Lookahead(range(3))
    source.peek(2)
    _take(source)
    assert source.has_next
    _take(source)
    assert (source.has_next, source.peek(2)) == (True, [2])
    _take(source)
    assert (source.has_next, source.peek(2)) == (False, [])


def test_a_loader_that_goes_on_after_an_error_loses_no_other_item():
    """`map` raises for the second item, and goes on with the third."""
    source = Lookahead(map([1, 2, 3, 4].__getitem__, [0, 9, 2, 3]))
    with pytest.raises(IndexError):
        _take(source)
    assert [_take(source) for _ in range(3)] == [1, 3, 4]
    assert not source.has_next


def test_a_loader_that_ends_after_an_error_is_warned_of_once():
    source = Lookahead(_dies())
    with pytest.raises(OSError, match="gone"):
        source.peek(2)
    assert source.peek(1) == [0]
    with pytest.warns(RuntimeWarning, match=r"ended after it had raised OSError\('gone'\)"):
        assert _take(source) == 0
    assert source.peek(2) == []


def test_an_item_that_an_interrupt_has_kept_from_the_loop_stays_the_next():
    source = Lookahead(range(3))
    assert source.next_item() == 0  # and the interrupt comes
    assert [_take(source) for _ in range(3)] == [0, 1, 2]


def test_a_generator_that_an_interrupt_has_ended_is_warned_of_too():
    def interrupted() -> Iterator[int]:
        yield 0
        raise KeyboardInterrupt

    source = Lookahead(interrupted())
    with pytest.raises(KeyboardInterrupt):
        source.next_item()
    with pytest.warns(RuntimeWarning, match=r"ended after it had raised KeyboardInterrupt\(\)"):
        assert _take(source) == 0
