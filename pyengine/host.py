"""Small values between the host and a device that it runs ahead of, without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def runs_ahead(device: torch.device) -> bool:
    """Whether the host runs ahead of this device, so that reading a value from it means waiting."""
    return device.type != "cpu"


def is_lazy(device: torch.device) -> bool:
    """Whether this device's tensors are recorded programs, which run when somebody launches them or reads a value."""
    return device.type == "xla"


def has_events(device: torch.device) -> bool:
    """Whether this device has streams and events, so that a copy to the host can be under way while the host goes on."""
    return runs_ahead(device) and not is_lazy(device)


def send(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host values as a 1-D tensor on `device`; the copy is ordered with the device's other work."""
    if not runs_ahead(device):
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=_can_pin(device)).to(device, non_blocking=True)


class Readback:
    """Values on their way from a device to the host.

    Args:
        tensor: 1-D; copied at once, so it may change afterwards.
    """

    def __init__(self, tensor: Tensor) -> None:
        device = tensor.device
        if not has_events(device):  # on a lazy device the copy stays there until somebody asks
            self._host, self._event = tensor.clone(), None
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=_can_pin(device))
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.Event(device)
        self._event.record()

    def get(self) -> list[float]:
        """Wait for the values, if need be, and return them."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


def _can_pin(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type
