"""Pending collectives, heartbeats through the store, and futures that end with the ranks' verdict."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.futures import Future

from pyengine.comm.process_state import ProcessId
from pyengine.comm.watch import Board, Heartbeat, Pending, StallWatch, line_of, listed


def test_oldest_is_the_first_collective_that_has_not_completed():
    pending, done = Pending(), set()
    for name in ("a", "b", "c"):
        pending.add((0, 1), name, lambda name=name: name in done)
    assert (pending.oldest().what, pending.oldest().number) == ("a", 1)
    done |= {"a", "b"}
    assert (pending.oldest().what, pending.oldest().number) == ("c", 3)
    done.add("c")
    assert pending.oldest() is None
    pending.add((0, 2), "another group's", lambda: True)
    assert pending.launched == {(0, 1): 3, (0, 2): 1}


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


def _beat(number: int) -> Heartbeat:
    return Heartbeat(ProcessId.own(), number, "window 1", "train.py:3", "a gather", {"0,1": 7})


def test_all_ranks_have_the_verdict_that_came_first_and_a_later_engine_has_none():
    store = dist.HashStore()
    first, second = Board(store, 0), Board(store, 1)
    assert first.verdict() == second.verdict() == ""
    assert [first.publish("rank 2"), second.publish("rank 3")] == ["rank 2", "rank 2"]
    assert first.verdict() == second.verdict() == "rank 2"
    assert Board(store, 0).verdict() == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\\xff",
        "[1]",
        "{}",
        "[" * 100_000,
        _beat(1).to_json().replace('"beat": 1', '"beat": "1"'),
        _beat(1).to_json().replace('{"0,1": 7}', "7"),
        _beat(1).to_json().replace('"pid"', '"number"'),
    ],
    ids=["empty", "bytes", "list", "fields", "deep", "word", "launched", "other version"],
)
def test_ranks_read_each_others_last_heartbeats_and_one_that_cannot_be_read_hides_no_others(text):
    store = dist.HashStore()
    first, second = Board(store, 0), Board(store, 1)
    first.post(_beat(1))
    first.post(_beat(2))
    assert second.read([0, 1]) == {0: _beat(2)}
    second._store.set("beat/1", text)
    assert second.read([0, 1]) == {0: _beat(2)}


def test_a_line_is_the_users_own_innermost():
    waiting, done = threading.Event(), threading.Event()

    def users_function() -> None:
        waiting.set()
        done.wait()  # in threading.py, which is Python's library

    thread = threading.Thread(target=users_function)
    thread.start()
    waiting.wait()
    time.sleep(0.01)
    line = line_of(thread.ident)
    done.set()
    thread.join()
    number = inspect.getsourcelines(users_function)[1] + 2
    assert f"{__file__}:{number} in " in line
    assert line.endswith("users_function: done.wait()  # in threading.py, which is Python's library")
    assert line_of(-1) == "a thread that has ended"


@pytest.fixture
def watch() -> Iterator[StallWatch]:
    made = StallWatch(dist.HashStore(), 0, (0, 1), 30.0)
    yield made
    made.close()


def test_a_verdict_ends_every_guarded_future_that_has_no_value(watch):
    def guard(future: Future) -> Future:
        return watch.guard(future, lambda of, callback: of.then(callback))

    done, future = Future(), Future()
    has_value, guarded = guard(done), guard(future)
    done.set_result(7)
    watch._fail("rank 1 has died")
    assert has_value.wait() == 7
    with pytest.raises(RuntimeError, match=r"^a collective failed: rank 1 has died\. Restart all ranks from"):
        guarded.wait()
    future.set_result(7)  # too late to matter
    for wait in (guarded.wait, guard(Future()).wait, watch.check):
        with pytest.raises(RuntimeError, match="rank 1 has died"):
            wait()
