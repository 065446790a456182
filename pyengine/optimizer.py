"""Optimizers beside an engine: whose parameters it reduces, and loops that step on every micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.nn import Parameter


class _Steps(Protocol):
    @property
    def is_sync_step(self) -> bool: ...

    @property
    def window(self) -> int: ...

    def step(self, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> torch.Tensor: ...


class WindowOptimizer:
    """Steps where a window ends and does nothing elsewhere; made by `sync.wrap`.

    Everything but `step` and `zero_grad` is the wrapped optimizer's own. Gradients are cleared by the engine at the
    next window's first backward, so `zero_grad` never does anything.

    Attributes:
        optimizer: the wrapped optimizer.
    """

    def __init__(self, sync: _Steps, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        self.optimizer = optimizer
        self._stepped: torch.Tensor | None = None
        self._stepped_in = -1
        self._sync, self._scheduler = sync, scheduler

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step that was due left the parameters alone; on an accelerator looking at it waits."""
        return self._stepped is not None and not bool(self._stepped)

    def step(self) -> None:
        """Step the optimizer, and the scheduler with it, if this micro-batch ends its window: once."""
        if self._sync.is_sync_step and self._sync.window != self._stepped_in:
            self._stepped = self._sync.step(self.optimizer, self._scheduler)
            self._stepped_in = self._sync.window

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine starts every window from zero."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class Ownership:
    """Knows which parameters an engine reduces, and refuses to step others.

    Args:
        params: the engine's parameters.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self._known = {id(param) for param in params if param.requires_grad}
        self._foreign: WeakKeyDictionary[Any, tuple[int, list[Parameter]]] = WeakKeyDictionary()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError if a parameter that no bucket holds has a gradient.

        An optimizer's parameters are looked through again when there are more of them.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        size, foreign = self._foreign.get(optimizer, (-1, []))
        if size != len(params):
            foreign = [param for param in params if id(param) not in self._known]
            self._foreign[optimizer] = len(params), foreign
        for param in foreign:
            if param.grad is not None:
                raise ValueError(
                    f"optimizer has a parameter of shape {list(param.shape)} with a gradient that this engine does "
                    "not reduce (added or unfrozen after it was made): make the GradSync after the model is complete"
                )
