"""Where 1/count comes in: one owner decides, and everybody else asks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pyengine.window.final_pass import FinalPass
from pyengine.wire import Wire


class Divisor:
    """1/count of a window, given out at one of three places, and at the others not.

    Before the wire, where that wants means: float16, which keeps sums in range, or one with residuals.
    After the wire, where a pass brings the sum into `.grad`. Where there is no such pass, by the optimizer,
    or by the one fused write before another kind of optimizer.

    Args:
        inv_count: returns 1/count, 0-dim float32 on the device; waits for the header. Called only where it
            comes in.
        wire: how the gradients travel.
        in_place: whether what lands is `.grad`, for every gradient of the window.
    """

    def __init__(self, inv_count: Callable[[], Tensor], wire: Wire, *, in_place: bool) -> None:
        self._inv_count = inv_count
        self._is_folded = wire.folds_count
        self._is_left = in_place and not wire.folds_count

    def before_wire(self) -> Tensor | None:
        """Return what to multiply in on the way to the wire, float32 0-dim; None for nothing."""
        return self._inv_count() if self._is_folded else None

    def after_wire(self) -> Tensor | None:
        """Return what to multiply in on the way from the wire, float32 0-dim; None for nothing."""
        return None if self._is_folded or self._is_left else self._inv_count()

    def leave_to(self, final: FinalPass) -> None:
        """Let the final pass multiply in what nothing here has."""
        if self._is_left:
            final.divide(self._inv_count())
