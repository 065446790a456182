"""`Lookahead` reads one micro-batch ahead, or as many as `peek` asks for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyengine.engine.loop import Lookahead


def _counted(num: int, read: list[int]) -> Iterator[int]:
    for item in range(num):
        read.append(item)
        yield item


def test_one_item_is_read_ahead():
    read: list[int] = []
    source = Lookahead(_counted(3, read))
    assert (source.has_next, read) == (True, [0])
    assert (source.pop(), read) == (0, [0, 1])


@pytest.mark.parametrize("asked", [0, 1, 2, 3, 5])
def test_items_that_were_shown_are_returned_in_order(asked):
    read: list[int] = []
    source = Lookahead(_counted(3, read))
    assert source.peek(asked) == list(range(min(asked, 3)))
    assert read == list(range(max(1, min(asked, 3))))
    assert [source.pop() for _ in range(3)] == [0, 1, 2]
    assert not source.has_next


def test_has_next_is_false_behind_the_last_item_shown():
    source = Lookahead(range(3))
    source.peek(2)
    source.pop()
    assert source.has_next
    source.pop()
    assert (source.has_next, source.peek(2)) == (True, [2])
    source.pop()
    assert (source.has_next, source.peek(2)) == (False, [])


def test_an_empty_loader_shows_nothing():
    source = Lookahead([])
    assert (source.has_next, source.peek(2)) == (False, [])


def test_an_error_of_the_loader_comes_when_it_is_read_and_leaves_what_was_read():
    def items() -> Iterator[int]:
        yield 0
        raise OSError("gone")

    source = Lookahead(items())
    with pytest.raises(OSError, match="gone"):
        source.peek(2)
    assert source.peek(1) == [0]
