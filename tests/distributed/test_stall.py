"""A rank that waits is warned which ranks are missing and where they are; the watch ends with its engine.

`tests/faults` has cases of ranks that are stopped or killed in every phase of a window.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time

import pytest
import torch
from cases import me, recorded_warnings
from ranks import strike
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyengine as pe
from pyengine.comm.process_state import ProcessId

AFTER_S = 0.2


def _watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pyengine-stall"]


def _elsewhere() -> None:
    time.sleep(4 * AFTER_S)


def _alone(what: str) -> list[str]:
    """Let rank 0 call `what` before the other ranks do; return this rank's stall warnings."""
    rank, _ = me()
    model = nn.Linear(2, 2)
    with recorded_warnings(RuntimeWarning) as texts:
        if rank and what == "GradSync":
            _elsewhere()
        sync = pe.GradSync(model, stall_after_s=AFTER_S)
        if rank and what == "load_state_dict":
            _elsewhere()
        sync.load_state_dict(sync.state_dict())
        with sync.accumulate():
            sync.backward(model(torch.ones(1, 2)).sum())
        sync.step(torch.optim.SGD(model.parameters(), lr=0.1))
        sync.close()
    return [text for text in texts if "a sync has stalled" in text]


def test_a_rank_that_alone_loads_a_state_is_told_who_has_not_come_and_where_it_stands(ranks):
    warned = ranks(3).run(_alone, "load_state_dict")
    assert [len(texts) for texts in warned] == [1, 0, 0]
    late = "ranks 1, 2 of 3 have not launched an all-reduce of 184 bytes"
    assert f"{late}: rank 0 has waited for 0." in warned[0][0]
    assert re.search(r"rank 1 .*step 0, window 0, .* in _elsewhere: time.sleep\(4 \* AFTER_S\)", warned[0][0])
    assert re.search(
        r"rank 0 .*waits in an all-reduce.* in _alone \(in pyengine's .*load_state_dict\)", warned[0][0]
    )


def test_a_rank_that_has_made_no_engine_is_told_as_such(ranks):
    warned = ranks(2).run(_alone, "GradSync")
    assert "rank 1 has not created this engine" in warned[0][0]


def _stopped() -> list[str]:
    """Stop rank 1 before rank 0 waits for it, and continue it a second later; return the stall warnings."""
    rank, _ = me()
    sync = pe.GradSync(nn.Linear(2, 2), stall_after_s=AFTER_S)
    other = sync._engine.comm.all_gather_object(ProcessId.own())[1]
    if rank == 1:
        time.sleep(AFTER_S)  # a heartbeat reports its position
        strike(signal.SIGSTOP)
    else:
        while other.state(ProcessId.own()) != "stopped":
            time.sleep(0.01)
        threading.Timer(1.0, os.kill, (other.pid, signal.SIGCONT)).start()
    with recorded_warnings(RuntimeWarning) as texts:
        sync.load_state_dict(sync.state_dict())
    return [text for text in texts if "a sync has stalled" in text]


def test_a_stopped_rank_is_told_as_stopped_with_the_line_where_it_was(ranks):
    warned = ranks(2).run(_stopped)
    assert [len(texts) for texts in warned] == [1, 0]
    was = r"rank 1 \(process \d+ on .*\), is stopped \(SIGSTOP, or a debugger\), and was last at "
    assert re.search(f"{was}.* in _stopped", warned[0][0])


def _threads() -> list[int]:
    """Return how many watch threads are added while each kind of engine exists, and after its end."""
    made = [len(_watchers())]
    for after_s in (30, None, 0):
        sync = pe.GradSync(nn.Linear(2, 2), stall_after_s=after_s)
        made.append(len(_watchers()))
        sync.close()
        made.append(len(_watchers()))
    sync = pe.attach(DistributedDataParallel(nn.Linear(2, 2)))
    made.append(len(_watchers()))
    del sync
    gc.collect()
    made.append(len(_watchers()))
    # Differences, because DDP may hold engines that other tests dropped here after a failed collective.
    return [num - made[0] for num in made]


def test_an_engine_has_one_thread_that_ends_with_it(ranks):
    assert ranks(2).run(_threads) == [[0, 1, 0, 0, 0, 0, 0, 1, 0]] * 2
    assert ranks(1).run(_threads) == [[0] * 9]


@pytest.mark.parametrize("value", [-1, float("inf"), "30", True])
def test_seconds_that_are_none_are_refused(value):
    with pytest.raises(ValueError, match=r"^stall_after_s=.*: expected the number of seconds after which"):
        pe.GradSync(nn.Linear(2, 2), stall_after_s=value)
