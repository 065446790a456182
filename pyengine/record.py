"""What the engine reports of each optimizer step, and the clock behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as every rank saw it.

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
    """Seconds of one window by phase."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin a window."""
        self._start = time.perf_counter()
        self.seconds = {"backward": 0.0, "exposed_sync": 0.0}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the body to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def elapsed(self) -> float:
        """Return the seconds since the window began."""
        return time.perf_counter() - self._start


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
