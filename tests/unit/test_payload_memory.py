"""Memory of payloads is reused by the next sum, and never used by two sums at once."""

from __future__ import annotations

import torch

from pyengine.wire.memory import PayloadMemory

CPU = torch.device("cpu")


def test_freed_memory_is_reused_by_name_and_size():
    memory = PayloadMemory()
    sent, received = memory.allocate("sent", 8, CPU), memory.allocate("received", 8, CPU)
    assert not sent.any() and not received.any()
    memory.free(sent=sent, received=received)
    assert memory.allocate("sent", 4, CPU).data_ptr() != sent.data_ptr()
    assert memory.allocate("received", 8, CPU) is received
    assert memory.allocate("sent", 8, CPU) is sent


def test_memory_that_is_not_freed_is_not_reused():
    memory = PayloadMemory()
    under_way = memory.allocate("sent", 8, CPU)
    under_way.fill_(7)
    other = memory.allocate("sent", 8, CPU)
    other.fill_(1)
    assert (under_way == 7).all()


def test_nothing_is_kept_of_a_device_whose_allocator_keeps_it():
    memory, device = PayloadMemory(), torch.device("meta")
    taken = memory.allocate("sent", 8, device)
    memory.free(sent=taken)
    assert memory.allocate("sent", 8, device) is not taken
