"""How an optimizer is stepped with what is still pending, unless the window must not be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from pyengine.window.final_pass import FinalPass


def decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer takes `grad_scale` and `found_inf` as tensors, so that the host need not know."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


class Stepper(Protocol):
    """How an optimizer is stepped, unless the window must not be used."""

    def needs_host(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `step` waits for the outcome of the window; the same on every rank."""

    def step(self, optimizer: torch.optim.Optimizer, final: FinalPass, write: Callable[[], None]) -> None:
        """Step with the pending scalar, unless the window must not be used.

        Args:
            optimizer: over parameters whose `.grad` has been published.
            final: the pending scalar and the skip decision; read, on the device where the optimizer can.
            write: multiplies the pending scalar into the gradients.

        Cost: `write` is one pass that reads and writes every gradient; a fused optimizer needs none.
        """


class PlainStepper:
    """Lets a fused optimizer decide on the device; any other needs the host to know."""

    def needs_host(self, optimizer: torch.optim.Optimizer) -> bool:
        return not decides_on_device(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, final: FinalPass, write: Callable[[], None]) -> None:
        if decides_on_device(optimizer):
            _fused_step(optimizer, final)
        elif not bool(final.found_inf):
            if final.is_pending:
                write()
            optimizer.step()


def _fused_step(optimizer: Any, final: FinalPass) -> None:
    optimizer.grad_scale = final.factor.reciprocal().float() if final.is_pending else None
    optimizer.found_inf = final.found_inf
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
