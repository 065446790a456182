"""Scaling of gradients by 1/count and the inverse loss scale, before user code can read the gradients."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pyengine.wire import Wire


class Divisor:
    """The factors of one window's gradients: 1/count and the inverse loss scale.

    1/count is applied before the communication if the wire needs means (float16, to keep sums in range, or a
    wire with residuals), and otherwise in the pass that computes the norm of the reduced gradients. The
    inverse loss scale (a 0-dim float64 tensor) is always applied in that pass, because gradients without the
    loss scale would underflow in a narrow communication dtype.
    """

    def __init__(self, inv_count: Callable[[], Tensor], wire: Wire, inv_scale: Tensor | None = None) -> None:
        self._inv_count, self._inv_scale = inv_count, inv_scale
        self._is_folded = wire.folds_count

    def before_wire(self) -> Tensor | None:
        """Return the factor for gradients that will be sent, as a 0-dim float32 tensor, or None for 1."""
        return self._inv_count() if self._is_folded else None

    def after_wire(self) -> Tensor | None:
        """Return the factor for reduced gradients, as a 0-dim float32 tensor, or None for 1."""
        inv_count = None if self._is_folded else self._inv_count()
        if self._inv_scale is None:
            return inv_count
        # The product is exact if the loss scale is a power of two, which is the default.
        return (self._inv_scale if inv_count is None else inv_count * self._inv_scale).float()
