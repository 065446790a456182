"""What the engine reports of each optimizer step."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from pyengine.ops.capture import is_capturing
from pyengine.ops.device import has_events, recorded_event
from pyengine.ops.trace import span
from pyengine.window.noise_scale import NoiseEstimate
from pyengine.window.spikes import Spike


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as every rank saw it.

    Seconds are of the device's own clock where the parameters are on an accelerator, and the host's on an XLA
    device, where they are the time to record the work. `backward_s` and `exposed_sync_s` of a window that ran
    as a graph (`sync.capture`) are 0.

    Attributes:
        step: optimizer steps attempted before this one.
        micro_batches: micro-batches in the window, over all ranks.
        count: items in the window, over all ranks: the divisor of the gradient.
        loss: sum of the window's losses over all ranks, divided by `count`; None when nothing was counted.
        grad_norm: 2-norm of the mean gradient before clipping, loss scale removed; inf or nan when skipped
            for it.
        skipped: whether the parameters were left alone.
        reason: why they were, or why a `pe.SpikePolicy` has clipped; empty
            otherwise.
        bytes_on_wire: bytes this rank sent for the window.
        collectives: collectives this rank launched for the window, header included.
        backward_s: seconds inside the window's backwards.
        exposed_sync_s: seconds in which this rank only waited for, or worked on, the reduction.
        step_s: seconds from the window's first backward to the end of the optimizer step.
        held_bytes: of a sharded model, what this rank holds through a window to communicate less: unsharded
            sums, and parameters that stay gathered (docs/sharded.md).
        num_retries: parts of this rank's micro-batches that ran out of memory, and ran again in smaller ones
            (`sync.retry_smaller`).
        grad_norms: as `grad_norm`, of each parameter by name; None without `sync.measure(pe.GradNorms())`.
        noise_scale: the gradient noise scale; None without `sync.measure(pe.NoiseScale())`, and of a window
            that cannot be measured.
        spike: what a `pe.SpikePolicy` has skipped or clipped the window for; None if it has not.
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
    held_bytes: int = 0
    num_retries: int = 0
    grad_norms: dict[str, float] | None = None
    noise_scale: NoiseEstimate | None = None
    spike: Spike | None = None


StepCallback = Callable[[StepRecord], None]


class StepHandle(RemovableHandle):
    """What `sync.on_step` returns: `remove()`, or the end of `with handle:`, removes the callback.

    It may be called, and asked for attributes, as the callback itself: a decorated function can be used as
    before.
    """

    def __init__(self, callbacks: OrderedDict[int, StepCallback], callback: StepCallback) -> None:
        super().__init__(callbacks)
        self._callback = callback
        callbacks[self.id] = callback
        update_wrapper(self, callback, updated=())

    def __call__(self, record: StepRecord) -> None:
        self._callback(record)

    def __getattr__(self, name: str) -> Any:
        if name == "_callback":
            raise AttributeError(name)  # of one that copy or pickle has not filled yet
        return getattr(self._callback, name)


class Clock:
    """Seconds of one window by phase, measured where its work runs: on the device by events if it has them,
    else on the host. In work that is captured as a graph phases are not measured: they count 0 seconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._has_events = device, has_events(device)
        self.phases: list[tuple[str, Any, Any]] = []  # name, start and stop, as `now` gives them
        # Returns a mark behind the work so far.
        self.now: Callable[[], Any] = self._event if self._has_events else time.perf_counter
        self._start = self._stop = self.now()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add the time of the body to a phase, and show it to profilers."""
        return _Phase(self, name)

    def start(self) -> None:
        self._start = self.now()

    def stop(self) -> None:
        self._stop = self.now()

    def seconds(self, phase: str) -> float:
        """Return the seconds spent in a phase; after `stop`."""
        return sum(self._between(start, stop) for name, start, stop in self.phases if name == phase)

    def elapsed(self) -> float:
        """Return the seconds from the window's first backward to `stop`."""
        return self._between(self._start, self._stop)

    def _event(self) -> Any:
        """Return an event of the device, None in a capture."""
        return None if is_capturing() else recorded_event(self._device, enable_timing=True)

    def _between(self, start: Any, stop: Any) -> float:
        if start is None or stop is None:
            return 0.0
        if not self._has_events:
            return float(stop - start)
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000


class _Phase(AbstractContextManager[None]):
    """The time of a body. A class: every micro-batch enters one, and a generator costs twice as much."""

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self._name = clock, name
        self._span: Any = span(name)

    def __enter__(self) -> None:
        self._start = self._clock.now()
        self._span.__enter__()

    def __exit__(self, *error: object) -> None:
        self._span.__exit__(*error)
        self._clock.phases.append((self._name, self._start, self._clock.now()))
