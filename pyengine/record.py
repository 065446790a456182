"""What the engine reports of each optimizer step, and the clock behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pyengine.host import has_events
from pyengine.trace import span


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as every rank saw it.

    Seconds are of the device's own clock where the parameters lie on an accelerator, and the host's on an XLA device,
    where they tell how long it took to record the work.

    Attributes:
        step: optimizer steps attempted before this one.
        micro_batches: micro-batches in the window, over all ranks.
        count: items in the window, over all ranks: the divisor of the gradient.
        loss: sum of the window's losses over all ranks, divided by `count`; None when nothing was counted.
        grad_norm: 2-norm of the mean gradient before clipping, loss scale removed; inf or nan when skipped for it.
        skipped: whether the parameters were left alone.
        reason: why they were; empty otherwise.
        bytes_on_wire: bytes this rank sent for the window.
        collectives: collectives this rank launched for the window, header included.
        backward_s: seconds inside the window's backwards.
        exposed_sync_s: seconds in which this rank only waited for, or worked on, the reduction.
        step_s: seconds from the window's first backward to the end of the optimizer step.
    """

    step: int
    micro_batches: int
    count: float
    loss: float | None
    grad_norm: float
    skipped: bool
    reason: str
    bytes_on_wire: int
    collectives: int
    backward_s: float
    exposed_sync_s: float
    step_s: float


class Clock:
    """Seconds of one window by phase, measured where its work runs: on the device by events if it has them, else on the host.

    Args:
        device: where the window's gradients are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phases: list[tuple[str, Any, Any]] = []
        self._start = self._stop = self._now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the body to a phase, and show it to profilers."""
        start = self._now()
        try:
            with span(name):
                yield
        finally:
            self._phases.append((name, start, self._now()))

    def stop(self) -> None:
        """End the window."""
        self._stop = self._now()

    def seconds(self, phase: str) -> float:
        """Return the seconds spent in a phase; after `stop`."""
        return sum(self._between(start, stop) for name, start, stop in self._phases if name == phase)

    def elapsed(self) -> float:
        """Return the seconds from the window's first backward to `stop`."""
        return self._between(self._start, self._stop)

    def _now(self) -> Any:
        if not has_events(self._device):
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, stop: Any) -> float:
        if not has_events(self._device):
            return float(stop - start)
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000


class Recorder:
    """Hands a record of every step to callbacks."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[StepRecord], None]] = []

    def emit(self, **fields: Any) -> None:
        """Build the record, if anybody listens, and call everyone in the order of registration."""
        if self.callbacks:
            record = StepRecord(**fields)
            for callback in self.callbacks:
                callback(record)
