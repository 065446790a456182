"""The record that the engine reports for each optimizer step."""

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
    """A record of one optimizer step.

    Times are measured with the device's clock if the parameters are on an accelerator. On an XLA device the
    host measures the time to record the work. `backward_s` and `exposed_sync_s` are 0 for a window that ran
    as a CUDA graph (`sync.capture`).

    Attributes:
        step: number of optimizer steps attempted before this one.
        micro_batches: number of micro-batches in the window, over all ranks.
        count: number of items in the window, over all ranks: the divisor of the gradient.
        loss: sum of the window's losses over all ranks, divided by `count`; None if the count is 0 or a loss
            is missing.
        grad_norm: 2-norm of the mean gradient before clipping and without the loss scale. If the norm is inf
            or nan, the step was skipped.
        skipped: whether the step was skipped and the parameters left unchanged.
        reason: why the step was skipped, or why a `pe.SpikePolicy` clipped the gradients; empty otherwise.
        bytes_on_wire: bytes that this rank sent for the window.
        collectives: number of collectives that this rank launched for the window, including the header.
        backward_s: seconds spent in the window's backward passes.
        exposed_sync_s: seconds in which this rank did nothing but wait for the reductions or work on them.
        step_s: seconds from the window's first backward to the end of the optimizer step.
        held_bytes: for a sharded model, bytes that this rank holds throughout a window to reduce
            communication: unsharded sums, and parameters that stay gathered (docs/sharded.md).
        num_retries: number of parts of this rank's micro-batches that ran out of memory and were repeated in
            smaller parts (`sync.retry_smaller`).
        grad_norms: norms of the individual parameters' gradients, by name, measured like `grad_norm`; None
            without `sync.measure(pe.GradNorms())`.
        noise_scale: the gradient noise scale; None without `sync.measure(pe.NoiseScale())` and for a window
            that cannot be measured.
        spike: the spike for which a `pe.SpikePolicy` skipped or clipped the window, or None.
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
    """The handle that `sync.on_step` returns; `remove()` or the end of `with handle:` removes the callback.

    Calls and attribute accesses go to the callback, so a decorated function can be used as before.
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
            raise AttributeError(name)  # copy or pickle has not filled this object yet
        return getattr(self._callback, name)


class Clock:
    """Measures the phases of one window, with device events if possible and otherwise on the host.

    Phases of work that is captured as a graph are not measured and count as 0 seconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._has_events = device, has_events(device)
        self.phases: list[tuple[str, Any, Any]] = []  # Name, start and stop; `now` gives the times.
        # Records the time at which all work so far has completed.
        self.now: Callable[[], Any] = self._event if self._has_events else time.perf_counter
        self._start = self._stop = self.now()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add the time of the body to a phase, and mark the body in profiles."""
        return _Phase(self, name)

    def start(self) -> None:
        self._start = self.now()

    def stop(self) -> None:
        self._stop = self.now()

    def seconds(self, phase: str) -> float:
        """Return the seconds spent in a phase; call this after `stop`."""
        return sum(self._between(start, stop) for name, start, stop in self.phases if name == phase)

    def elapsed(self) -> float:
        """Return the seconds from the window's first backward to `stop`."""
        return self._between(self._start, self._stop)

    def _event(self) -> Any:
        """Return a recorded device event, or None during a capture."""
        return None if is_capturing() else recorded_event(self._device, enable_timing=True)

    def _between(self, start: Any, stop: Any) -> float:
        if start is None or stop is None:
            return 0.0
        if not self._has_events:
            return float(stop - start)
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000


class _Phase(AbstractContextManager[None]):
    """Measures the time of its body.

    This is a class, because a generator would cost twice as much in every micro-batch.
    """

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self._name = clock, name
        self._span: Any = span(name)

    def __enter__(self) -> None:
        self._start = self._clock.now()
        self._span.__enter__()

    def __exit__(self, *error: object) -> None:
        self._span.__exit__(*error)
        self._clock.phases.append((self._name, self._start, self._clock.now()))
