"""A guarded future ends with its collective or with the ranks' verdict, whichever is first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.futures import Future

from pyengine.comm.watch import StallWatch


@pytest.fixture
def watch() -> Iterator[StallWatch]:
    made = StallWatch(dist.HashStore(), 0, (0, 1), 30.0)
    yield made
    made.close()


def test_a_guarded_future_has_what_its_collective_has(watch):
    future = Future()
    guarded = watch.guard(future, lambda of, callback: of.then(callback))
    future.set_result(7)
    assert guarded.wait() == 7


def test_a_verdict_ends_a_guarded_future_and_what_comes_later_is_no_matter(watch):
    future = Future()
    guarded = watch.guard(future, lambda of, callback: of.then(callback))
    watch._fail("rank 1 has died")
    with pytest.raises(RuntimeError, match=r"^a collective failed: rank 1 has died\. Restart all ranks from"):
        guarded.wait()
    future.set_result(7)
    with pytest.raises(RuntimeError, match="rank 1 has died"):
        guarded.wait()


def test_behind_a_verdict_no_future_is_waited_for(watch):
    watch._fail("rank 1 has died")
    with pytest.raises(RuntimeError, match="rank 1 has died"):
        watch.guard(Future(), lambda of, callback: of.then(callback)).wait()
    with pytest.raises(RuntimeError, match="rank 1 has died"):
        watch.check()
