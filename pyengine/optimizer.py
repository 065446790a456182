"""An optimizer for loops that call step and zero_grad on every micro-batch."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class _Steps(Protocol):
    @property
    def is_sync_step(self) -> bool: ...

    def step(self, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> bool: ...


class WindowOptimizer:
    """Steps where a window ends and does nothing elsewhere; made by `sync.wrap`.

    Everything but `step` and `zero_grad` is the wrapped optimizer's own. Gradients are cleared by the engine at the
    next window's first backward, so `zero_grad` never does anything.

    Attributes:
        optimizer: the wrapped optimizer.
        step_was_skipped: whether the last step that was due left the parameters alone.
    """

    def __init__(self, sync: _Steps, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        self.optimizer = optimizer
        self.step_was_skipped = False
        self._sync, self._scheduler = sync, scheduler

    def step(self) -> None:
        """Step the optimizer, and the scheduler with it, if this micro-batch ends its window."""
        if self._sync.is_sync_step:
            self.step_was_skipped = not self._sync.step(self.optimizer, self._scheduler)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine starts every window from zero."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
