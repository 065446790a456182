"""Where 1/count and the inverse loss scale are multiplied in: each once, before user code can read the
gradients.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pyengine.wire import Wire


class Divisor:
    """1/count and the inverse loss scale of one window.

    1/count is multiplied in before a wire that needs means (float16, which keeps sums in range, or a wire
    with residuals), else in the pass that reads the reduced gradients for their norm. The inverse loss scale
    (float64 0-dim) is always multiplied in there: before a narrow wire the gradients would underflow.
    """

    def __init__(self, inv_count: Callable[[], Tensor], wire: Wire, inv_scale: Tensor | None = None) -> None:
        self._inv_count, self._inv_scale = inv_count, inv_scale
        self._is_folded = wire.folds_count

    def before_wire(self) -> Tensor | None:
        """Return what multiplies gradients on the way to the wire, float32 0-dim; None for nothing."""
        return self._inv_count() if self._is_folded else None

    def after_wire(self) -> Tensor | None:
        """Return what multiplies reduced gradients, float32 0-dim; None for nothing."""
        inv_count = None if self._is_folded else self._inv_count()
        if self._inv_scale is None:
            return inv_count
        # A loss scale is a power of two unless the user sets another one: the product is exact.
        return (self._inv_scale if inv_count is None else inv_count * self._inv_scale).float()
