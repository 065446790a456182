"""The norm of a window's mean gradients, the check for inf and nan, and the decision to skip the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Unbroken
from pyengine.ops.device import send
from pyengine.ops.plan import add_up
from pyengine.window.nonfinite import is_not_finite

CLIP_EPSILON = 1e-6  # the same as in torch.nn.utils.clip_grad_norm_


class ShardedNorm:
    """The norm of gradients over ranks that hold different elements, computed with one all-reduce.

    Every element is counted exactly once over all ranks. If several ranks hold an element, as a replica or in
    a shared shard, exactly one of these ranks counts it.
    """

    def __init__(self, counted: Sequence[bool], comm: Comm, device: torch.device) -> None:
        self._comm = comm
        self._counted = send(list(counted), torch.bool, device)
        # The index of each local parameter's name among the names of all ranks, int64; None before
        # `add_names`.
        self.name_indices: Tensor | None = None
        self._num_names = 0

    def add_names(self, name_indices: Tensor, num_names: int) -> None:
        """Make `whole` also return sums by name, which adds 8 bytes per name to its all-reduce."""
        self.name_indices, self._num_names = name_indices, num_names

    def whole(self, sumsq: Tensor, void: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum over all ranks, a flag for an invalid window, and sums by name.

        The flag is nan if any rank has dropped the window. The parts of the ranks are added in rank order,
        independently of the all-reduce algorithm. The bits are therefore equal on every rank, and a rank that
        counts no element does not change them. The flag is also nan if any rank has a nonfinite sum that it
        does not count.

        Cost: the wait for one all-reduce of 8 bytes, plus 8 bytes per rank and, after `add_names`, 8 bytes
        per name.
        """
        counted = torch.where(self._counted, sumsq, 0.0)
        uncounted = torch.where(self._counted, 0.0, sumsq)
        world_size = self._comm.world_size
        parts = sumsq.new_zeros(world_size + 1 + self._num_names)
        parts[self._comm.rank] = add_up(counted)
        parts[world_size] = add_up(uncounted) * 0 + void
        by_name = parts[world_size + 1 :]
        if self.name_indices is not None:
            by_name.index_copy_(0, self.name_indices, counted)
        with Unbroken(self._comm):
            self._comm.all_reduce(parts).wait()
        return add_up(parts[:world_size]), parts[world_size], by_name

    def largest(self, value: Tensor) -> Tensor:
        """Wait for one all-reduce; return the largest value of all ranks, or nan if any value is nan."""
        values = value.new_zeros(self._comm.world_size)
        values[self._comm.rank] = value
        with Unbroken(self._comm):
            # Use a sum, because the treatment of nan in a maximum depends on the backend.
            self._comm.all_reduce(values).wait()
        return values.amax()


class FinalPass:
    """The results of one pass over the reduced gradients: their norm, and whether they may be used.

    The pass multiplies each bucket by 1/count and by the inverse loss scale while later buckets are being
    reduced. `.grad` therefore contains the mean, and all results refer to the mean.
    """

    def __init__(self, num_params: int, device: torch.device, sharded: ShardedNorm | None = None) -> None:
        self._sharded = sharded
        # The sum of squares of each parameter's mean gradient, in registration order.
        self.sumsq = torch.zeros(num_params, dtype=torch.float64, device=device)
        # One flag per parameter, in the same order: 1 if the mean gradient has inf or nan.
        self.nonfinite = torch.zeros(num_params, dtype=torch.uint8, device=device)
        self._one = torch.ones((), dtype=torch.float64, device=device)
        self._none = torch.zeros((), dtype=torch.float64, device=device)
        self._zero = torch.zeros((), dtype=torch.float32, device=device)
        self._yes = torch.ones((), dtype=torch.float32, device=device)
        self._has_names = False  # Whether sums by name are needed.
        self._squares = self.sumsq  # The last sums by name, if ranks hold different elements.
        self.reset()

    def add_names(self, name_indices: Sequence[int], num_names: int) -> None:
        """Also compute norms by name; `name_indices` has the index of each parameter's name."""
        self._has_names = True
        if self._sharded is not None:
            self._sharded.add_names(send(list(name_indices), torch.int64, self.sumsq.device), num_names)
            # Sums are nan until the norm is computed, which does not happen if a rank has dropped the window.
            self._squares = self.sumsq.new_full((num_names,), torch.nan)

    def reset(self) -> None:
        """Reset the results without device work: the next window overwrites sums and flags."""
        # Three 0-dim float32 flags. `overflow` is 1 if a gradient has inf or nan, and controls the loss
        # scale. `found_inf` is 1 if the step must be skipped for any reason. `void` is nan if a rank has
        # dropped the window, and 0 otherwise.
        self.overflow = self.found_inf = self.void = self._zero
        # 1 if a metric has skipped or clipped the window (0-dim float64).
        self.acted = self._none
        # The product of the clipping factors so far, each averaged over names (0-dim float64). Ranks compare
        # this product.
        self.clipped = self._one
        # The product of the clipping factors since `sumsq` was computed (float64, 0-dim or `[num_params]`).
        self._clipped_since = self._one
        # The parameters that any rank has used (bool `[num_params]`); None if `.grad is None` marks unused
        # parameters.
        self.used: Tensor | None = None
        self._before_clipping: Tensor | None = None
        self._squares_before_clipping: Tensor | None = None

    def compute_norm(self, *, is_refused: bool = False) -> None:
        """Compute the norm from `sumsq`, and decide from the norm and `void` whether to skip the step.

        If ranks hold different elements, this method waits for one all-reduce, unless ranks disagreed in the
        header.

        Args:
            is_refused: whether ranks disagreed in the header.
        """
        total = add_up(self.sumsq)  # registration order does not depend on buckets or threads
        if self._sharded is not None and not is_refused:
            total, void, self._squares = self._sharded.whole(self.sumsq, self.void)
            self.void = void.float()
        self._norm = total.sqrt()
        self.overflow = self.found_inf = is_not_finite(total + self.void).float()

    def leave_out(self, params: Sequence[int]) -> None:
        """Exclude parameters that no rank has used; only residuals were reduced for them."""
        if params:
            index = send(params, torch.int64, self.sumsq.device)
            self.sumsq.index_fill_(0, index, 0)
            self.nonfinite.index_fill_(0, index, 0)

    def forbid(self, flag: Tensor) -> None:
        """Skip the step if `flag`, a 0-dim bool tensor on the device, is True."""
        self.found_inf = torch.where(flag, self._yes, self.found_inf)

    @property
    def is_shared(self) -> bool:
        """Whether ranks hold different elements, so that the norm needs a collective."""
        return self._sharded is not None

    def renew_norm(self, *, was_read: bool) -> None:
        """Recompute the norm, because gradients may have changed, but keep the decision whether to skip.

        If ranks hold different elements, this method waits for one all-reduce, and every rank must call it at
        the same point.

        Args:
            was_read: whether `sumsq` was just computed from the changed gradients.
        """
        self.keep_norm()
        if was_read:
            self._clipped_since = self._one
        if self._sharded is not None:
            sumsq = self.sumsq * self._clipped_since.square()
            total, _, self._squares = self._sharded.whole(sumsq, self._zero)
            self._norm = total.sqrt()
        elif was_read:
            self._norm = add_up(self.sumsq).sqrt()

    def renew_norm_alone(self) -> None:
        """Recompute the norm, without a collective, from a new `sumsq` over all elements.

        Norms by name keep their last reduced values.
        """
        self.keep_norm()
        self._clipped_since = self._one
        self._norm = add_up(self.sumsq).sqrt()

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of the current gradients as a 0-dim float64 tensor."""
        return self._norm

    def guarding_norm(self, norm: Tensor) -> Tensor:
        """Return `norm`, or nan if it is finite but the step is skipped; for users who step themselves."""
        return torch.where((self.found_inf != 0) & norm.isfinite(), torch.nan, norm)

    def squares(self) -> Tensor:
        """Return squared norms of the current gradients by name (float64 `[names]`); needs `add_names`."""
        if self._sharded is not None:
            return self._squares
        return self.sumsq * self._clipped_since.square()

    def norm_before_clipping(self) -> Tensor:
        """Return the 2-norm at the end of the window, before any clipping, as a 0-dim float64 tensor."""
        return self._norm if self._before_clipping is None else self._before_clipping

    def norms_before_clipping(self) -> Tensor:
        """Return the 2-norms by name at the end of the window, before any clipping (float64 `[names]`)."""
        kept = self._squares_before_clipping
        return (self.squares() if kept is None else kept).sqrt()

    def keep_norm(self) -> None:
        """Store the current norms as the norms before clipping, unless these are already stored."""
        if self._before_clipping is None:
            self._before_clipping = self._norm
            if self._has_names:
                self._squares_before_clipping = self.squares()

    def inf_norm(self, largest: Tensor) -> Tensor:
        """Return the maximum of `largest` over all ranks (0-dim float64), with equal bits on every rank."""
        return largest if self._sharded is None else self._sharded.largest(largest)

    def clip(self, max_norm: float | Tensor, norm: Tensor) -> Tensor:
        """Return min(1, max_norm / (norm + 1e-6)) as a 0-dim float64 tensor, which the caller applies."""
        self.keep_norm()
        factor = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
        self._norm = self._norm * factor
        if self._has_names and self._sharded is not None:
            self._squares = self._squares * factor.square()
        self._note_clipping(factor, factor)
        return factor

    def clip_each(self, max_norm: float, groups: Sequence[Tensor] | None) -> Tensor:
        """Return a clipping factor for each parameter from the norm of its group; needs `add_names`.

        Args:
            max_norm: the maximum norm of each group.
            groups: for each group, the indices of its names, as an int64 tensor; groups must be disjoint.
                Other parameters get a factor of 1. If None, every name is a separate group.

        Returns:
            float64 `[num_params]`, with the same bits on every rank; the caller applies the factors.
        """
        self.keep_norm()
        squares = self.squares()
        sums = squares if groups is None else torch.stack([add_up(squares[group]) for group in groups])
        factors = (max_norm / (sums.sqrt() + CLIP_EPSILON)).clamp(max=1.0)
        if groups is not None:
            of_groups, factors = factors, torch.ones_like(squares)
            for group, factor in zip(groups, of_groups.unbind(), strict=True):
                factors.index_fill_(0, group, factor)
        self._squares = squares * factors.square()
        self._norm = add_up(self._squares).sqrt()
        of_params = factors
        if self._sharded is not None and self._sharded.name_indices is not None:
            of_params = factors[self._sharded.name_indices]
        self._note_clipping(add_up(factors) / len(factors), of_params)
        return of_params

    def _note_clipping(self, compared: Tensor, factor: Tensor) -> None:
        # Skip multiplications by 1, because each of them would launch a kernel.
        self.clipped = compared if self.clipped is self._one else self.clipped * compared
        self._clipped_since = factor if self._clipped_since is self._one else self._clipped_since * factor
