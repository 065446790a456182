"""Copies of small values between the host and a device, without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyengine.ops import capture

HOST = torch.device("cpu")  # the host reads this device's memory without waiting


def runs_ahead(device: torch.device) -> bool:
    """Whether this device runs asynchronously, so that the host has to wait to read a value."""
    return device.type != HOST.type


def is_lazy(device: torch.device) -> bool:
    """Whether this device records operations, and runs them only at a launch or a read."""
    return device.type == "xla"


def flush(device: torch.device) -> None:
    """Launch the recorded operations of a lazy device, without waiting."""
    if is_lazy(device):
        import torch_xla

        torch_xla.sync()


def has_events(device: torch.device) -> bool:
    """Whether this device has streams and events.

    With events, a copy to the host can run while the host continues.
    """
    return runs_ahead(device) and not is_lazy(device)


def bucket_cap_mb(device: torch.device) -> float:
    """Return the default size of a gradient bucket in MiB.

    Between GPUs, a collective needs about 64 MiB to reach the bandwidth of the links, and every bucket costs
    kernel launches. Between hosts, 8 MiB are enough, and smaller buckets overlap with more of the backward.
    """
    return 100 if has_events(device) else 8


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the current stream of this device, or None if the device has no streams."""
    return torch.accelerator.current_stream(device) if has_events(device) else None


def is_on_default_stream(device: torch.device) -> bool:
    """Whether the current stream of a CUDA device is its default stream, which graphs cannot capture."""
    return device.type == "cuda" and torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


def send(
    values: Sequence[float], dtype: torch.dtype, device: torch.device, *, refills: bool = False
) -> Tensor:
    """Copy host values to a new tensor on `device`, in order with the other work of the device.

    If the work is captured as a graph and `refills` is set, the caller fills the tensor before every run
    (`refill`). Without `refills`, the values have to be the same in every window.

    Cost: one small copy, from pinned memory if the device supports it; the host does not wait.
    """
    section = capture.section()
    if section is not None and section.is_capture:
        return section.find(values, dtype, device, refills=refills)
    if not runs_ahead(device):
        return torch.tensor(values, dtype=dtype, device=device)
    with capture.own_copy():
        made = _staged(values, dtype, device).to(device, non_blocking=True)
    if section is not None:
        section.rehearse(values, made, refills=refills)
    return made


def refill(tensor: Tensor, values: Sequence[float]) -> None:
    """Overwrite a tensor that `send` returned in a capture, in order with the other work of its device."""
    tensor.copy_(_staged(values, tensor.dtype, tensor.device), non_blocking=True)


def _staged(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=HOST, pin_memory=_can_pin(device))


def recorded_event(device: torch.device, *, enable_timing: bool) -> torch.Event:
    """Record and return an event on the current stream of `device`, which need not be the current device."""
    event = torch.Event(device, enable_timing=enable_timing)
    event.record(torch.accelerator.current_stream(device))
    return event


class Readback:
    """A copy of values from a device to the host; only `get` waits for the copy.

    The tensor is copied immediately, so it may change afterwards; on a lazy device the copy stays on the
    device until `get`. If the work is captured as a graph, the tensor is copied on the device, and `start`
    copies it to the host after the graph has run.
    """

    def __init__(self, tensor: Tensor) -> None:
        section = capture.section()
        if section is not None and section.is_capture:
            self.captured = tensor.clone()
            section.readbacks.append(self)
        else:
            self.start(tensor)

    def start(self, tensor: Tensor) -> None:
        device = tensor.device
        if not has_events(device):  # on a lazy device the copy stays on the device until `get`
            self._host, self._event = tensor.clone(), None
            return
        with capture.own_copy():
            self._host = torch.empty(
                tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=_can_pin(device)
            )
            self._host.copy_(tensor, non_blocking=True)
        self._event = recorded_event(device, enable_timing=False)

    def get(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


def _can_pin(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type
