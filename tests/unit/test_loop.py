"""`Lookahead` reads one micro-batch ahead, or as many as `peek` asks for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyengine.engine.loop import Lookahead


def _counted(num: int, read: list[int]) -> Iterator[int]:
    for item in range(num):
        read.append(item)
        yield item


def _dies() -> Iterator[int]:
    yield 0
    raise OSError("gone")


@pytest.mark.parametrize("asked", [0, 1, 2, 3, 5])
def test_items_that_were_shown_are_returned_in_order(asked):
    read: list[int] = []
    source = Lookahead(_counted(3, read))
    assert source.peek(asked) == list(range(min(asked, 3)))
    assert read == list(range(max(1, min(asked, 3))))  # one is read ahead
    assert [source.pop() for _ in range(3)] == [0, 1, 2]
    assert (source.has_next, source.peek(2)) == (False, [])


def test_has_next_is_false_behind_the_last_item_shown():
    source = Lookahead(range(3))
    source.peek(2)
    source.pop()
    assert source.has_next
    source.pop()
    assert (source.has_next, source.peek(2)) == (True, [2])
    source.pop()
    assert (source.has_next, source.peek(2)) == (False, [])


def test_a_loader_that_goes_on_after_an_error_loses_no_other_item():
    """`map` raises for the second item, and continues with the third."""
    source = Lookahead(map([1, 2, 3, 4].__getitem__, [0, 9, 2, 3]))
    with pytest.raises(IndexError):
        source.pop()
    assert [source.pop() for _ in range(3)] == [1, 3, 4]
    assert not source.has_next


def test_a_loader_that_ends_after_an_error_is_warned_of_once():
    source = Lookahead(_dies())
    with pytest.raises(OSError, match="gone"):
        source.peek(2)
    assert source.peek(1) == [0]
    with pytest.warns(RuntimeWarning, match=r"ended after raising OSError\('gone'\)"):
        assert source.pop() == 0
    assert source.peek(2) == []
