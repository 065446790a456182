"""ops/device.py: what a kind of device can do; all accelerators get the same answers."""

from __future__ import annotations

import pytest
import torch

from pyengine.comm import Local, comm_for
from pyengine.ops import device as devices
from pyengine.ops.device import Readback, bucket_cap_mb, has_events, is_lazy, runs_ahead
from pyengine.step import step_record
from pyengine.step.step_record import Clock

# The device "tpu" of torch-tpu is a renamed privateuseone.
ACCELERATORS = ["cuda", "mtia", "privateuseone"]


@pytest.mark.parametrize(
    ("name", "answers"),
    [("cpu", (False, False, False, 8)), ("xla", (True, False, True, 8))]
    + [(name, (True, True, False, 100)) for name in ACCELERATORS],
)
def test_what_a_kind_of_device_can_do(name, answers):
    device = torch.device(name)
    assert (runs_ahead(device), has_events(device), is_lazy(device), bucket_cap_mb(device)) == answers


@pytest.mark.parametrize("name", ["cpu", *ACCELERATORS])
def test_one_process_without_a_group_needs_no_transport_on_any_device(name):
    assert isinstance(comm_for(torch.device(name), None), Local)


class FakeEvent:
    """An accelerator's event, which remembers the stream on which it was recorded.

    The default is the stream of the current device, not of the event's device.
    """

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        self.device, self.enable_timing, self.stream = device, enable_timing, "the current device's"

    def record(self, stream: object = "the current device's") -> None:
        self.stream = stream

    def synchronize(self) -> None:
        assert self.stream == f"of {self.device}"


@pytest.fixture
def events(monkeypatch):
    """Treat tensors of any device like those of an accelerator; return the events that are created."""
    made: list[FakeEvent] = []

    def make(device: torch.device, *, enable_timing: bool = True) -> FakeEvent:
        made.append(FakeEvent(device, enable_timing=enable_timing))
        return made[-1]

    for module in (devices, step_record):
        monkeypatch.setattr(module, "has_events", lambda device: True)
    monkeypatch.setattr(torch, "Event", make)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"of {device}")
    return made


def test_a_copy_to_the_host_is_awaited_on_its_own_device(events):
    assert Readback(torch.tensor([1.0, 2.0])).get() == [1.0, 2.0]
    assert [(event.stream, event.enable_timing) for event in events] == [("of cpu", False)]


def test_phases_are_timed_on_the_device_that_computes_them(events):
    clock = Clock(torch.device("privateuseone", 1))
    with clock.phase("backward"):
        pass
    clock.stop()
    assert [(event.stream, event.enable_timing) for event in events] == [("of privateuseone:1", True)] * 4
