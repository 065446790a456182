"""Seconds of a window by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pyengine.ops.device import has_events, recorded_event
from pyengine.ops.trace import span


class Clock:
    """Seconds of one window by phase, measured where its work runs: on the device by events if it has them,
    else on the host.
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
        return recorded_event(self._device, enable_timing=True)

    def _between(self, start: Any, stop: Any) -> float:
        if not has_events(self._device):
            return float(stop - start)
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000
