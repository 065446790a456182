"""Collectives in flight are known by group and number until they have completed."""

from __future__ import annotations

import pytest

from pyengine.comm.watch import Pending, listed


def test_oldest_is_the_first_collective_that_has_not_completed():
    pending, done = Pending(), set()
    for name in ("a", "b", "c"):
        pending.add((0, 1), name, lambda name=name: name in done)
    assert (pending.oldest().what, pending.oldest().number) == ("a", 1)
    done |= {"a", "b"}
    assert (pending.oldest().what, pending.oldest().number) == ("c", 3)
    done.add("c")
    assert pending.oldest() is None
    assert pending.launched == {(0, 1): 3}


def test_each_group_has_its_own_count():
    pending = Pending()
    for ranks in ((0, 1), (0, 2), (0, 1)):
        pending.add(ranks, "one", lambda: False)
    assert pending.launched == {(0, 1): 2, (0, 2): 1}


def test_a_collective_that_a_body_runs_ends_with_the_body():
    pending = Pending()
    with pytest.raises(KeyError), pending.running((0, 1), "a gather"):
        assert pending.oldest().what == "a gather"
        raise KeyError
    assert pending.oldest() is None


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 2], "ranks 0, 2"), (range(100), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more")],
)
def test_ranks_are_listed_in_words(ranks, text):
    assert listed(ranks) == text
