"""The final pass: everything that still multiplies a reduced gradient meets in one scalar and is applied
once.

The scalar collects 1/count (where the wire has not folded it in), the inverse loss scale and the clip factor.
A fused optimizer takes it through its `grad_scale` attribute (no pass over the gradients at all); any other
optimizer gets one fused write. The norm and the finite check come from one read, taken bucket by bucket while
later buckets travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from pyengine.ops.device import send
from pyengine.ops.plan import add_up
from pyengine.window.holdings import Holdings
from pyengine.window.nonfinite import is_not_finite

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
_LARGEST = torch.finfo(torch.float32).max  # of the type in which the pending scalar is applied


class FinalPass:
    """The pending scalar, the norm and the finite flags of one window.

    Args:
        num_params: parameters that the sums of squares are kept for, in registration order.
        device: where the scalars live.
        holdings: what this rank counts, where ranks hold different elements; None where all hold the same.

    Attributes:
        sumsq: float64 `[num_params]`, sum of squares of each parameter's reduced gradient, before `factor`.
        nonfinite: uint8 `[num_params]`, 1 where a reduced gradient holds inf or nan.
        factor: float64 0-dim, what still multiplies the gradients.
        overflow: float32 0-dim, 1 if a gradient holds inf or nan: what a loss scale follows.
        found_inf: float32 0-dim, 1 if the step must be skipped, for that or another reason.
        void: float32 0-dim, nan if a rank gave the window up, else 0.
        used: bool `[num_params]`, which parameters any rank used; None where `.grad is None` says it.
    """

    def __init__(self, num_params: int, device: torch.device, holdings: Holdings | None = None) -> None:
        self._holdings = holdings
        self.sumsq = torch.zeros(num_params, dtype=torch.float64, device=device)
        self.nonfinite = torch.zeros(num_params, dtype=torch.uint8, device=device)
        self._one = torch.ones((), dtype=torch.float64, device=device)
        self._zero, self._yes = torch.zeros((), device=device), torch.ones((), device=device)
        self.reset()

    def reset(self) -> None:
        """Forget the window: no work for the device. Sums of squares and flags are overwritten when it
        lands.
        """
        self.factor = self._written = self._one
        self.overflow = self.found_inf = self.void = self._zero
        self.used: Tensor | None = None
        self.is_pending = self._is_divided = False
        self._before_clipping: Tensor | None = None

    def compute_norm(self, *, is_refused: bool = False) -> None:
        """Derive norm and skip decision from the sums of squares that the kernels left, and `void`.

        Args:
            is_refused: ranks disagree in the header, so that nothing may follow it; the window is not used.

        Cost: where ranks hold different elements one all-reduce of 8 bytes a rank, waited for.
        """
        total = add_up(self.sumsq)  # in registration order: not a matter of buckets or threads
        if self._holdings is not None and not is_refused:
            total, void = self._holdings.whole(self.sumsq, self.void)
            self.void = void.float()
        self._root = total.sqrt()
        self.overflow = self.found_inf = is_not_finite(total + self.void).float()

    def leave_out(self, params: Sequence[int]) -> None:
        """Do not count parameters that no rank has used: what lands of one are the residuals of a wire, which
        go nowhere.

        Args:
            params: registration indices.
        """
        if params:
            index = send(params, torch.int64, self.sumsq.device)
            self.sumsq.index_fill_(0, index, 0)
            self.nonfinite.index_fill_(0, index, 0)

    def forbid(self, flag: Tensor) -> None:
        """Let the step be skipped if `flag` (bool, 0-dim, on the device) is set."""
        self.found_inf = torch.where(flag, self._yes, self.found_inf)

    def back_off(self, flag: Tensor) -> None:
        """Let a loss scale follow an overflow if `flag` (bool, 0-dim, on the device) is set: a micro-batch of
        the window was dropped for it.
        """
        self.overflow = torch.where(flag, self._yes, self.overflow)

    def check_range(self, largest: float) -> None:
        """Let the step be skipped if finite sums times the pending scalar leave the range of the gradients'
        type.

        Args:
            largest: finite number of that type. No element is larger than the norm; a scalar of at most 1
                takes nothing out of range.
        """
        size, norm = self.factor.abs(), self.grad_norm()
        is_out = ((size > 1) & ((norm > largest) | (size > _LARGEST))) | is_not_finite(norm)
        self.overflow = torch.where(is_out, self._yes, self.overflow)
        self.found_inf = torch.where(is_out, self._yes, self.found_inf)

    def multiply(self, scalar: Tensor) -> None:
        """Let `scalar` (0-dim float, on the device) multiply the gradients, later, with everything else."""
        self.factor = self.factor * scalar
        self.is_pending = True

    def divide(self, inv_count: Tensor) -> None:
        """Let 1/count multiply the gradients, as `multiply`; once a window, however many owners say it."""
        if not self._is_divided:
            self.multiply(inv_count)
            self._is_divided = True

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of the gradients with all that is pending applied; float64 0-dim."""
        return self._root * self.factor.abs()

    def norm_before_clipping(self) -> Tensor:
        """Return the 2-norm as the first `clip` found it, or as it is now; float64 0-dim."""
        return self.grad_norm() if self._before_clipping is None else self._before_clipping

    def inf_norm(self, largest: Tensor) -> Tensor:
        """Return the largest absolute value of the gradients with all that is pending applied.

        Args:
            largest: float64 0-dim, of the published gradients of this rank.

        Returns:
            float64 0-dim, the same bits on every rank.

        Cost: where ranks hold different elements one all-reduce of 8 bytes a rank, waited for.
        """
        whole = largest if self._holdings is None else self._holdings.largest(largest)
        return whole * self.factor.abs()

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Fold in min(1, max_norm / (norm + 1e-6)).

        Args:
            max_norm: the largest allowed norm.
            norm: what is held to it, of the gradients as they are now; float64 0-dim.
        """
        self._keep_norm()
        self.multiply((max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0))

    def mark_clipped(self, norms: Tensor) -> None:
        """Note that the gradients, with nothing pending, were clipped elsewhere; else as `replace_norm`."""
        self._keep_norm()
        self.replace_norm(norms)

    def replace_norm(self, norms: Tensor) -> None:
        """Replace the norm by that of gradients whose norms were computed elsewhere; nothing may be pending.

        Args:
            norms: float64 `[num_params]`.

        Cost: as `compute_norm`.
        """
        self._root = norms.norm()
        if self._holdings is not None:
            total, _ = self._holdings.whole(norms.square(), self._zero)
            self._root = total.sqrt()

    def mark_written(self) -> None:
        """Note that the pending scalar has been written into the gradients."""
        self._root = self._root * self.factor.abs()
        self._written = self._written * self.factor
        self.factor = self._one
        self.is_pending = False

    def _keep_norm(self) -> None:
        """Keep the norm before the first clipping."""
        if self._before_clipping is None:
            self._before_clipping = self.grad_norm()

    def whole_factor(self) -> Tensor:
        """Return all that has multiplied the sum so far, written or pending; float64 0-dim."""
        return self._written * self.factor


def check_max_norm(max_norm: object) -> None:
    """Refuse what would make every gradient nan, or turn it round; a 0-dim tensor is not read on the host."""
    if isinstance(max_norm, Tensor) and max_norm.numel() == 1:
        return
    if not isinstance(max_norm, Real) or isinstance(max_norm, bool):
        raise TypeError(f"max_norm={max_norm!r} is a {type(max_norm).__name__}: need a number of at least 0")
    if not float(max_norm) >= 0:
        raise ValueError(f"max_norm={max_norm!r}: need a number of at least 0; inf only measures")
