"""The pool of ranks reports how each rank ended, and replaces dead ones."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist
from ranks import Ended, RankError, _part


def _ends(how: str) -> str:
    if dist.get_rank() == 1:
        if how == "silent":
            time.sleep(60)
        elif how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
    return how


def test_a_rank_that_is_stopped_is_continued_once_the_others_have_ended(ranks):
    assert ranks(2).ends(60, _ends, "stopped") == [Ended("stopped"), Ended("stopped", was_stopped=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "end"), [("killed", Ended(exit_code=-signal.SIGKILL)), ("silent", Ended(is_silent=True))]
)
def test_a_rank_that_dies_or_hangs_is_reported_and_replaced(ranks, how, end):
    assert ranks(2).ends(5, _ends, how) == [Ended(how), end]
    assert ranks(2).run(_ends, "well") == ["well", "well"]


@pytest.mark.slow
def test_a_rank_that_dies_ends_a_run_that_does_not_expect_it(ranks):
    with pytest.raises(RankError, match="rank 1 ---\nits process ended, exit code -9"):
        ranks(2).run(_ends, "killed")


class _Store:
    """A store in which the other of two ranks is done at this rank's third look."""

    def __init__(self) -> None:
        self.looks = 0

    def add(self, key: str, number: int) -> int:
        assert key == "parting"
        self.looks += number == 0
        return 1 + (self.looks > 2)


@pytest.mark.parametrize(("within_s", "looks"), [(60, 3), (0, 0)])
def test_a_rank_that_is_done_parts_when_the_others_are_or_its_time_is_over(within_s, looks):
    store = _Store()
    _part(store, 2, within_s)
    assert store.looks == looks
