"""How an optimizer is stepped, unless the window must not be used."""

from __future__ import annotations

from typing import Any, Protocol

from torch.optim import Optimizer

from pyengine.window.final_pass import FinalPass


class Stepper(Protocol):
    """How an optimizer is stepped, unless the window must not be used."""

    def needs_host(self, optimizer: Optimizer) -> bool:
        """Whether `step` waits for the outcome of the window; the same on every rank."""

    def step(self, optimizer: Optimizer, final: FinalPass) -> None:
        """Step with the gradients as they are, unless the window must not be used.

        Args:
            optimizer: over parameters whose `.grad` has been published.
            final: the skip decision; read on the device where the optimizer can.
        """


class PlainStepper:
    """Lets a fused optimizer skip on the device; for any other the host waits for the decision."""

    def needs_host(self, optimizer: Optimizer) -> bool:
        return not skips_on_device(optimizer)

    def step(self, optimizer: Optimizer, final: FinalPass) -> None:
        if skips_on_device(optimizer):
            fused: Any = optimizer
            fused.found_inf = final.found_inf
            try:
                optimizer.step()
            finally:
                del fused.found_inf
        elif not bool(final.found_inf):
            optimizer.step()


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer obeys `found_inf`, a tensor, so that the host need not know it.

    That is torch's own fused step of every group. A wrapper that forwards attributes would keep `found_inf`
    to itself, a subclass may use gradients before its step, and torch asserts in a group that is not fused.
    """
    return (
        type(optimizer).__module__.startswith("torch.optim.")
        and getattr(optimizer, "_step_supports_amp_scaling", False)
        and all(group.get("fused") for group in optimizer.param_groups)
        and not hasattr(optimizer, "found_inf")
    )
