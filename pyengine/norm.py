"""The final pass: everything that still multiplies a reduced gradient meets in one scalar and is applied once.

The scalar collects 1/count (where the wire has not folded it in), the inverse loss scale and the clip factor. A fused
optimizer takes it through its `grad_scale` attribute (no pass over the gradients at all); any other optimizer gets one
fused write. The norm and the finite check come from one read, taken bucket by bucket while later buckets travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from pyengine.host import runs_ahead, send

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


class FinalPass:
    """The pending scalar, the norm and the finite flags of one window.

    Args:
        num_params: parameters that the sums of squares are kept for, in registration order.
        device: where the scalars live.

    Attributes:
        sumsq: float64 `[num_params]`, sum of squares of each parameter's reduced gradient, before `factor`.
        nonfinite: uint8 `[num_params]`, 1 where a reduced gradient holds inf or nan.
        factor: float64 0-dim, what still multiplies the gradients.
        overflow: float32 0-dim, 1 if a gradient holds inf or nan: what a loss scale follows.
        found_inf: float32 0-dim, 1 if the step must be skipped, for that or another reason.
        void: float32 0-dim, nan if a rank gave the window up, else 0.
        used: bool `[num_params]`, which parameters any rank used; None where `.grad is None` says it.
    """

    def __init__(self, num_params: int, device: torch.device) -> None:
        self.sumsq = torch.zeros(num_params, dtype=torch.float64, device=device)
        self.nonfinite = torch.zeros(num_params, dtype=torch.uint8, device=device)
        self._one = torch.ones((), dtype=torch.float64, device=device)
        self._zero = torch.zeros((), device=device)
        self.reset()

    def reset(self) -> None:
        """Forget the window: no work for the device. Sums of squares and flags are overwritten when it lands."""
        self.factor = self._one
        self.overflow = self.found_inf = self.void = self._zero
        self.used: Tensor | None = None
        self.is_pending = False
        self._before_clipping: Tensor | None = None

    def settle(self) -> None:
        """Close the read: derive the norm and the skip decision from what the kernels left."""
        # In registration order: not a matter of buckets or threads. A device's sum has one order for one length, its
        # cumsum need not.
        total = self.sumsq.sum() if runs_ahead(self.sumsq.device) else self.sumsq.cumsum(0)[-1]
        self._root = total.sqrt()
        self.overflow = self.found_inf = (~torch.isfinite(total + self.void)).float()

    def forbid(self, flag: Tensor) -> None:
        """Let the step be skipped if `flag` (0-dim bool) is set."""
        self.found_inf = torch.where(flag, 1.0, self.found_inf)

    def multiply(self, scalar: Tensor) -> None:
        """Let `scalar` (0-dim) multiply the gradients, later, together with everything else."""
        self.factor = self.factor * scalar
        self.is_pending = True

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of the gradients with all that is pending applied; float64 0-dim."""
        return self._root * self.factor.abs()

    def norm_before_clipping(self) -> Tensor:
        """Return the 2-norm as the first `clip` found it, or as it is now; float64 0-dim."""
        return self.grad_norm() if self._before_clipping is None else self._before_clipping

    def clip(self, max_norm: float) -> Tensor:
        """Fold in min(1, max_norm / (norm + 1e-6)) and return the norm before clipping."""
        norm = self.grad_norm()
        self._before_clipping = norm if self._before_clipping is None else self._before_clipping
        self.multiply((max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0))
        return norm

    def replace_norm(self, norm: Tensor) -> None:
        """Take a norm computed elsewhere; nothing may be pending."""
        self._root = norm

    def applied(self) -> None:
        """Note that the pending scalar has been written into the gradients."""
        self._root = self._root * self.factor.abs()
        self.factor = torch.ones_like(self.factor)
        self.is_pending = False


class GradScaler(torch.amp.GradScaler):
    """A torch.amp.GradScaler that takes norm, finite check and unscaling from the engine's final pass.

    Assign it to `sync.scaler`; the engine then scales losses in `backward`, folds the inverse scale into the pending
    scalar, and updates the scale in `step`. Arguments and state are torch's; with equal gradients the parameters stay
    bit-equal to the stock scaler's (its scales are powers of two).
    """

    _final: FinalPass | None = None

    def bind(self, final: FinalPass) -> None:
        """Take the finite check from `final` from now on; an engine has a scaler of its own."""
        if self._final is not None and self._final is not final:
            raise ValueError(
                "scaler belongs to another engine, whose overflows it follows: make one GradScaler an engine"
            )
        self._final = final
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(final.sumsq.device)

    def follow(self) -> None:
        """Update the scale after a window that other ranks step and this one drops, as `update` does there."""
        if self._final is not None and self._scale is not None:
            assert self._growth_tracker is not None  # torch makes it with the scale
            torch._amp_update_scale_(
                self._scale,
                self._growth_tracker,
                self._final.overflow,
                self._growth_factor,
                self._backoff_factor,
                self._growth_interval,
            )

    def inv_scale(self) -> Tensor:
        """Return 1 / scale as a 0-dim tensor, without a host read."""
        assert self._scale is not None
        return self._scale.double().reciprocal()

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        # Sent, not filled in there: a lazy device would take them for constants of its first program.
        self._scale = send([self._init_scale], torch.float32, dev).reshape(())
        self._growth_tracker = send([self._init_growth_tracker], torch.int32, dev).reshape(())

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        if self._final is None:
            return super()._unscale_grads_(*args, **kwargs)
        return {self._final.overflow.device: self._final.overflow.clone()}


def decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer takes `grad_scale` and `found_inf` as tensors, so that the host need not know."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


class Stepper(Protocol):
    """How an optimizer is stepped, unless the window must not be used."""

    def needs_host(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `step` waits for the outcome of the window."""

    def step(self, optimizer: torch.optim.Optimizer, final: FinalPass, write: Callable[[], None]) -> None:
        """Step with the pending scalar; `write` multiplies it into the gradients (one fused pass)."""


class PlainStepper:
    """Lets a fused optimizer decide on the device; any other needs the host to know."""

    def needs_host(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `step` waits for the outcome of the window."""
        return not decides_on_device(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, final: FinalPass, write: Callable[[], None]) -> None:
        """Step with the pending scalar; `write` multiplies it into the gradients (one fused pass)."""
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


__all__ = ["FinalPass", "GradScaler", "PlainStepper", "Stepper"]
