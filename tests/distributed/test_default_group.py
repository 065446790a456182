"""The threads of a gloo group end with it: a thread left at the end of the process may abort or hang it."""

import gc
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import engine
from torch import nn

from pyengine.comm import launching
from pyengine.comm.launching import destroy_default_group


@pytest.mark.skipif(sys.platform != "linux", reason="reads names of threads from /proc")
@pytest.mark.parametrize("kind", ["own", "attach"])
def test_no_thread_of_the_group_is_left_after_training(kind: str) -> None:
    before = _threads()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _train(kind)
        assert _threads() > before
    finally:
        destroy_default_group()
    end = time.monotonic() + 10  # a thread that has been joined stays listed for a moment
    while _threads() != before and time.monotonic() < end:
        time.sleep(0.01)
    assert _threads() == before


def test_what_would_keep_the_group_has_been_imported_before_there_is_one() -> None:
    kept = sys.modules["torch.distributed.nn.functional"].all_reduce.__defaults__
    assert not any(isinstance(value, dist.ProcessGroup) for value in kept)


def test_what_holds_the_group_in_a_cycle_is_collected() -> None:
    class Holder:
        def __init__(self) -> None:
            self.me, self.group = self, dist.group.WORLD

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.disable()
    try:
        left = weakref.ref(Holder())
        destroy_default_group()
        assert left() is None
    finally:
        gc.enable()


def test_it_waits_for_a_thread_that_would_be_the_last_to_hold_the_group(monkeypatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # a real collection outlasts the thread
    monkeypatch.setattr(launching, "_WITHIN_S", 30.0)  # enough on a busy machine
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    held = [dist.group.WORLD]

    def let_go() -> None:
        time.sleep(0.02)
        held.clear()

    thread = threading.Thread(target=let_go)
    thread.start()
    destroy_default_group()
    is_held = bool(held)
    thread.join()
    assert not is_held


def _train(kind: str) -> None:
    sync, model = engine(kind, nn.Linear(4, 4), accumulate=2)
    optimizer = torch.optim.AdamW(model.parameters())
    for window in sync.windows([torch.ones(2, 4)] * 4):
        for batch in window:
            sync.backward(model(batch).sum(), count=2)
        sync.step(optimizer)


def _threads() -> int:
    num = 0
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            num += "gloo" in (task / "comm").read_text()
    return num
