"""Accelerate's optimizer and scheduler, stepped at the ends of one model's windows."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from pyengine.engine.sync import Sync
from pyengine.step.window_optimizer import WindowOptimizer


class WindowBoundary:
    """Reports the ends of one model's windows to an AcceleratedScheduler.

    It replaces Accelerate's process-wide GradientState.
    """

    adjust_scheduler = False

    def __init__(self, sync: Sync) -> None:
        self._sync = sync

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last of its window."""
        return self._sync.is_sync_step


class AcceleratedWindowOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # accelerate is untyped
    """Steps through the engine where a window ends and does nothing elsewhere."""

    _is_accelerate_prepared = True  # a second prepare returns it as it is
    steps_with_windows = True

    def __init__(self, optimizer: torch.optim.Optimizer, sync: Sync) -> None:
        super().__init__(optimizer, device_placement=False)
        self._sync: Sync | None = sync
        self._windows = WindowOptimizer(sync, optimizer, None)

    def step(self, closure: Any = None) -> None:
        if self._sync is not None:
            try:
                self._sync.refuse_bare_gradients()
            except RuntimeError as error:
                raise RuntimeError(
                    "call backward, accumulate and clip_grad_norm_ of the accelerator that prepare returned, "
                    f"not of the one passed to it: {error}"
                ) from None
        self._windows.step(closure)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_sync": None}  # a copy belongs to no engine

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients of a window that has ended; otherwise do nothing."""
        self._windows.zero_grad(set_to_none is not False)

    @property
    def step_was_skipped(self) -> bool:
        return self._windows.step_was_skipped
