"""A heartbeat holds the line of the user's thread, and survives a round trip through the store."""

from __future__ import annotations

import inspect
import threading
import time

import pytest
import torch.distributed as dist

from pyengine.comm.process_state import ProcessId
from pyengine.comm.watch import Board, Heartbeat, line_of


def _beat(number: int) -> Heartbeat:
    return Heartbeat(ProcessId.own(), number, "window 1", "train.py:3", "a gather", {"0,1": 7})


def test_ranks_read_each_others_last_heartbeats():
    store = dist.HashStore()
    first, second = Board(store, 0), Board(store, 1)
    first.post(_beat(1))
    first.post(_beat(2))
    assert second.read([0, 1]) == {0: _beat(2)}


def test_all_ranks_have_the_verdict_that_came_first():
    store = dist.HashStore()
    first, second = Board(store, 0), Board(store, 1)
    assert first.verdict() == second.verdict() == ""
    assert [first.publish("rank 2"), second.publish("rank 3")] == ["rank 2", "rank 2"]
    assert first.verdict() == second.verdict() == "rank 2"


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
def test_a_heartbeat_that_cannot_be_read_hides_no_others(text):
    store = dist.HashStore()
    board = Board(store, 0)
    board.post(_beat(1))
    board._store.set("beat/1", text)
    assert board.read([0, 1]) == {0: _beat(1)}


def test_engines_over_one_group_do_not_meet():
    store = dist.HashStore()
    first, later = Board(store, 0), Board(store, 0)
    first.publish("rank 2")
    assert later.verdict() == ""


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


def test_a_thread_that_has_ended_has_no_line():
    assert line_of(-1) == "a thread that has ended"
