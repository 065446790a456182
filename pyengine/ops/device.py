"""Small values between the host and a device that it runs ahead of, without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

HOST = torch.device("cpu")  # whose memory the host reads without waiting


def runs_ahead(device: torch.device) -> bool:
    """Whether the host runs ahead of this device, so that reading a value from it means waiting."""
    return device.type != HOST.type


def is_lazy(device: torch.device) -> bool:
    """Whether this device's tensors are recorded programs,
    which run when somebody launches them or reads a value.
    """
    return device.type == "xla"


def flush(device: torch.device) -> None:
    """Let a lazy device begin with what has been recorded for it; nobody waits.
    Any other has begun already.
    """
    if is_lazy(device):
        import torch_xla

        torch_xla.sync()


def has_events(device: torch.device) -> bool:
    """Whether this device has streams and events, so that a copy to the host can be under way while the host
    goes on.
    """
    return runs_ahead(device) and not is_lazy(device)


def bucket_cap_mb(device: torch.device) -> float:
    """Return the size of a bucket of gradients in MiB where nobody has named one.

    Between GPUs a collective reaches the links' bandwidth from some 64 MiB on, and every bucket costs
    launches; between hosts' memories 25 are enough, and overlap more of the backward.
    """
    return 100 if has_events(device) else 25


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream that this device's work is given to now; None where there are no streams."""
    return torch.accelerator.current_stream(device) if has_events(device) else None


def as_current(device: torch.device) -> AbstractContextManager[Any]:
    """Make an accelerator's device the current one during the body, for calls that take no device."""
    return torch.accelerator.device_index(device.index) if has_events(device) else nullcontext()


def send(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host values as a tensor on `device`; the copy is ordered with the device's other work.

    Args:
        values: n numbers.
        dtype: of the result, which is new memory: dtype [n].

    Cost: one small copy, from pinned memory where the device takes it; nobody waits.
    """
    if not runs_ahead(device):
        return torch.tensor(values, dtype=dtype, device=device)
    staged = torch.tensor(values, dtype=dtype, device=HOST, pin_memory=_can_pin(device))
    return staged.to(device, non_blocking=True)


def recorded_event(device: torch.device, *, enable_timing: bool) -> torch.Event:
    """Return an event behind what the device's current stream has been given,
    whichever device is the current one.
    """
    event = torch.Event(device, enable_timing=enable_timing)
    event.record(torch.accelerator.current_stream(device))
    return event


class Readback:
    """Values on their way from a device to the host.

    Args:
        tensor: any dtype [n], read; copied at once into memory of the host (on a lazy device: of the device)
            that this object owns, so it may change afterwards.

    Cost: one small copy; only `get` waits.
    """

    def __init__(self, tensor: Tensor) -> None:
        device = tensor.device
        if not has_events(device):  # on a lazy device the copy stays there until somebody asks
            self._host, self._event = tensor.clone(), None
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=_can_pin(device))
        self._host.copy_(tensor, non_blocking=True)
        self._event = recorded_event(device, enable_timing=False)

    def get(self) -> list[float]:
        """Wait for the values, if need be, and return the n of them."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


def _can_pin(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type
