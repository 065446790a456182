"""The norm, the finite check and the skip decision of a window's mean gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyengine.comm.base import Comm
from pyengine.ops.device import send
from pyengine.ops.plan import add_up
from pyengine.window.nonfinite import is_not_finite

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


class Holdings:
    """Which of its gradients a rank counts, and the one all-reduce that adds up all ranks' parts.

    A gradient that several ranks hold alike (replicas) is counted by one of them; a shard by the rank that
    has it, or by one of those that have it: over all ranks every element once.
    """

    def __init__(self, counted: Sequence[bool], comm: Comm, device: torch.device) -> None:
        self._comm = comm
        self._counted = send(list(counted), torch.bool, device)

    def whole(self, sumsq: Tensor, void: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over all elements of all ranks, and nan if any rank gave the window up.

        The parts of the ranks are added in the order of ranks, whatever the all-reduce does, so the bits are
        the same on every rank, and a rank that counts nothing changes none. A sum that is not counted voids,
        too.

        Cost: one all-reduce of 8 bytes a rank and 8 more, waited for.
        """
        counted = torch.where(self._counted, sumsq, 0.0)
        uncounted = torch.where(self._counted, 0.0, sumsq)
        parts = sumsq.new_zeros(self._comm.world_size + 1)
        parts[self._comm.rank] = add_up(counted)
        parts[-1] = add_up(uncounted) * 0 + void
        self._comm.all_reduce(parts).wait()
        return add_up(parts[:-1]), parts[-1]

    def largest(self, value: Tensor) -> Tensor:
        """Return the largest of all ranks' values, nan if one is. One all-reduce, waited for."""
        values = value.new_zeros(self._comm.world_size)
        values[self._comm.rank] = value
        self._comm.all_reduce(values).wait()  # a sum: what a maximum makes of nan is the backend's own affair
        return values.amax()


class FinalPass:
    """What one pass over the reduced gradients has found: their norm, and whether they may be used.

    That pass multiplies 1/count and the inverse loss scale in, bucket by bucket while later buckets travel,
    so that `.grad` holds the mean and these numbers are of the mean.
    """

    def __init__(self, num_params: int, device: torch.device, holdings: Holdings | None = None) -> None:
        self._holdings = holdings
        # By parameter, in registration order: the sum of squares of its mean gradient, and 1 where that holds
        # inf or nan.
        self.sumsq = torch.zeros(num_params, dtype=torch.float64, device=device)
        self.nonfinite = torch.zeros(num_params, dtype=torch.uint8, device=device)
        self._one = torch.ones((), dtype=torch.float64, device=device)
        self._zero = torch.zeros((), dtype=torch.float32, device=device)
        self._yes = torch.ones((), dtype=torch.float32, device=device)
        self.reset()

    def reset(self) -> None:
        """Forget the window, without work for the device: the next one overwrites sums and flags."""
        # float32 0-dim: 1 if a gradient holds inf or nan, which a loss scale follows; 1 if the step must be
        # skipped, for that or another reason; nan if a rank gave the window up, else 0.
        self.overflow = self.found_inf = self.void = self._zero
        # float64 0-dim, the product of the clip factors so far.
        self.clipped = self._clipped_since = self._one
        # bool `[num_params]`, which parameters any rank used; None where `.grad is None` shows it.
        self.used: Tensor | None = None
        self._before_clipping: Tensor | None = None

    def compute_norm(self, *, is_refused: bool = False) -> None:
        """Derive norm and skip decision from the sums of squares that the kernels left, and `void`.

        Where ranks hold different elements one all-reduce, waited for; none behind a header that
        `is_refused`.
        """
        total = add_up(self.sumsq)  # in registration order: not a matter of buckets or threads
        if self._holdings is not None and not is_refused:
            total, void = self._holdings.whole(self.sumsq, self.void)
            self.void = void.float()
        self._norm = total.sqrt()
        self.overflow = self.found_inf = is_not_finite(total + self.void).float()

    def leave_out(self, params: Sequence[int]) -> None:
        """Do not count parameters that no rank has used: what is reduced for them are residuals, which go."""
        if params:
            index = send(params, torch.int64, self.sumsq.device)
            self.sumsq.index_fill_(0, index, 0)
            self.nonfinite.index_fill_(0, index, 0)

    def forbid(self, flag: Tensor) -> None:
        """Skip the step if `flag` (bool, 0-dim, on the device) is set."""
        self.found_inf = torch.where(flag, self._yes, self.found_inf)

    def back_off(self, flag: Tensor) -> None:
        """Let the loss scale back off if `flag` (bool, 0-dim, on the device) is set."""
        self.overflow = torch.where(flag, self._yes, self.overflow)

    @property
    def is_shared(self) -> bool:
        """Whether ranks hold different elements, so that the norm needs a collective."""
        return self._holdings is not None

    def renew_norm(self, *, was_read: bool) -> None:
        """Compute the norm again, where gradients may have been changed since; the skip decision stays.

        `was_read`: `sumsq` is that of changed gradients. Where ranks hold different elements one all-reduce,
        waited for: every rank calls this at the same point there.
        """
        if was_read:
            self._clipped_since = self._one
        if self._holdings is not None:
            total, _ = self._holdings.whole(self.sumsq * self._clipped_since.square(), self._zero)
            self._norm = total.sqrt()
        elif was_read:
            self._norm = add_up(self.sumsq).sqrt()

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of the gradients as they are; float64 0-dim."""
        return self._norm

    def norm_before_clipping(self) -> Tensor:
        """Return the 2-norm as the first clipping found it, or as it is now; float64 0-dim."""
        return self._norm if self._before_clipping is None else self._before_clipping

    def keep_norm(self) -> None:
        """Remember the norm before the first clipping."""
        if self._before_clipping is None:
            self._before_clipping = self._norm

    def inf_norm(self, largest: Tensor) -> Tensor:
        """Return the largest of all ranks' `largest`, float64 0-dim, with the same bits on every rank."""
        return largest if self._holdings is None else self._holdings.largest(largest)

    def clip(self, max_norm: float, norm: Tensor) -> Tensor:
        """Return min(1, max_norm / (norm + 1e-6)), float64 0-dim, for the caller to multiply by."""
        self.keep_norm()
        factor = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
        self._norm = self._norm * factor
        # Each product with 1 would be a launch.
        self.clipped = factor if self.clipped is self._one else self.clipped * factor
        self._clipped_since = factor if self._clipped_since is self._one else self._clipped_since * factor
        return factor
