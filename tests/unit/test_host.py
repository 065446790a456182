"""What a kind of device can do is asked in one place, and every accelerator gets the same answer."""

from __future__ import annotations

import pytest
import torch

from pyengine.comm import Local, comm_for
from pyengine.host import has_events, is_lazy, runs_ahead

# torch-tpu's device "tpu" is a privateuseone that has been given a name.
ACCELERATORS = ["cuda", "mps", "xpu", "hpu", "mtia", "privateuseone"]


@pytest.mark.parametrize("name", ACCELERATORS)
def test_any_accelerator_runs_ahead_and_has_events(name):
    device = torch.device(name)
    assert (runs_ahead(device), has_events(device), is_lazy(device)) == (True, True, False)


@pytest.mark.parametrize("name", ["cpu", *ACCELERATORS])
def test_one_process_without_a_group_needs_no_transport_wherever_its_parameters_lie(name):
    assert isinstance(comm_for(torch.device(name), None), Local)


def test_the_host_does_what_it_is_told_at_once():
    device = torch.device("cpu")
    assert (runs_ahead(device), has_events(device), is_lazy(device)) == (False, False, False)


def test_an_xla_device_runs_ahead_and_has_no_events():
    device = torch.device("xla")
    assert (runs_ahead(device), has_events(device), is_lazy(device)) == (True, False, True)
