"""How an optimizer is stepped, unless the window must not be used."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from pyengine.ops.device import runs_ahead
from pyengine.step.undo import Undo, allocate, is_torchs, runs_user_code
from pyengine.window.final_pass import FinalPass

_log = logging.getLogger("pyengine.step")


class Stepper(Protocol):
    """How an optimizer is stepped, unless the window must not be used."""

    def needs_host(self, optimizer: Optimizer) -> bool:
        """Whether `step` waits for the outcome of the window; the same on every rank."""

    def step(self, optimizer: Optimizer, final: FinalPass) -> None:
        """Step with the gradients as they are, unless `final` says that the window must not be used."""


class PlainStepper:
    """Skips a step on the device: a fused optimizer does so itself, and torch's others are undone.

    For every other optimizer the host waits for the decision.
    """

    def __init__(self) -> None:
        self._undo = Undo()

    def needs_host(self, optimizer: Optimizer) -> bool:
        return not skips_on_device(optimizer) and self._undo.targets(optimizer) is None

    def step(self, optimizer: Optimizer, final: FinalPass) -> None:
        if skips_on_device(optimizer):
            _log.debug("step %s, which skips by itself", type(optimizer).__name__)
            fused: Any = optimizer
            fused.found_inf = final.found_inf
            try:
                optimizer.step()
            finally:
                del fused.found_inf
        elif not self._steps_and_undoes(optimizer, final.found_inf) and not bool(final.found_inf):
            _log.debug("step %s after the host has read the decision", type(optimizer).__name__)
            optimizer.step()

    def _steps_and_undoes(self, optimizer: Optimizer, found_inf: Tensor) -> bool:
        """Step without a look at the decision; return False, with nothing done, where that cannot be."""
        if not runs_ahead(found_inf.device) or runs_user_code(optimizer):
            return False
        targets = self._undo.targets(optimizer)
        copies = None if targets is None else allocate(targets)
        if targets is None or copies is None:
            return False
        _log.debug("step %s, undone on the device where the step is skipped", type(optimizer).__name__)
        with self._undo.around(targets, copies, found_inf):
            optimizer.step()
        return True


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer obeys `found_inf`, a tensor, so that the host need not know it.

    That is torch's own fused step of every group. A wrapper that forwards attributes would keep `found_inf`
    to itself, a subclass may use gradients before its step, and torch asserts in a group that is not fused.
    """
    return (
        is_torchs(optimizer)
        and getattr(optimizer, "_step_supports_amp_scaling", False)
        and all(group.get("fused") for group in optimizer.param_groups)
        and not hasattr(optimizer, "found_inf")
    )
