"""What the engine reports of each optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as every rank saw it.

    Seconds are of the device's own clock where the parameters are on an accelerator, and the host's on an XLA
    device, where they are the time to record the work.

    Attributes:
        step: optimizer steps attempted before this one.
        micro_batches: micro-batches in the window, over all ranks.
        count: items in the window, over all ranks: the divisor of the gradient.
        loss: sum of the window's losses over all ranks, divided by `count`; None when nothing was counted.
        grad_norm: 2-norm of the mean gradient before clipping, loss scale removed; inf or nan when skipped
            for it.
        skipped: whether the parameters were left alone.
        reason: why they were, or which micro-batches were dropped; empty otherwise.
        bytes_on_wire: bytes this rank sent for the window.
        collectives: collectives this rank launched for the window, header included.
        backward_s: seconds inside the window's backwards.
        exposed_sync_s: seconds in which this rank only waited for, or worked on, the reduction.
        step_s: seconds from the window's first backward to the end of the optimizer step.
        held_bytes: of a sharded model, what this rank holds through a window to communicate less: unsharded
            sums, and parameters that stay gathered (docs/sharded.md).
        dropped: micro-batches that left the window for inf or nan, over all ranks.
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
    dropped: int = 0


StepCallback = Callable[[StepRecord], None]
