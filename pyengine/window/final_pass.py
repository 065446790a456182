"""The norm, the finite check and the skip decision of a window's mean gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Unbroken
from pyengine.ops.device import send
from pyengine.ops.plan import add_up
from pyengine.window.nonfinite import is_not_finite

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


class ShardedNorm:
    """Which of its gradients a rank counts, and the one all-reduce that adds up all ranks' parts.

    Over all ranks every element is counted once: of replicas, or of a shard that several ranks hold, one rank
    counts it.
    """

    def __init__(self, counted: Sequence[bool], comm: Comm, device: torch.device) -> None:
        self._comm = comm
        self._counted = send(list(counted), torch.bool, device)
        # By parameter of this rank, the index of its name among all ranks' names, int64; None until
        # `add_names`.
        self.name_indices: Tensor | None = None
        self._num_names = 0

    def add_names(self, name_indices: Tensor, num_names: int) -> None:
        """Let `whole` return sums by name, too, in the same all-reduce: 8 bytes a name more."""
        self.name_indices, self._num_names = name_indices, num_names

    def whole(self, sumsq: Tensor, void: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum over all ranks' elements, nan if any rank gave the window up, and sums by name.

        The parts of the ranks are added in the order of ranks, whatever the all-reduce does, so the bits are
        the same on every rank, and a rank that counts nothing changes none. A sum that is not counted voids,
        too.

        Cost: one all-reduce of 8 bytes a rank and 8 more, and 8 a name after `add_names`; waited for.
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
        """Return the largest of all ranks' values, nan if one is. One all-reduce, waited for."""
        values = value.new_zeros(self._comm.world_size)
        values[self._comm.rank] = value
        with Unbroken(self._comm):
            # A sum: what a maximum makes of nan is the backend's own affair.
            self._comm.all_reduce(values).wait()
        return values.amax()


class FinalPass:
    """What one pass over the reduced gradients has found: their norm, and whether they may be used.

    That pass multiplies 1/count and the inverse loss scale in, bucket by bucket while later buckets travel,
    so that `.grad` holds the mean and these numbers are of the mean.
    """

    def __init__(self, num_params: int, device: torch.device, sharded: ShardedNorm | None = None) -> None:
        self._sharded = sharded
        # By parameter, in registration order: the sum of squares of its mean gradient, and 1 where that holds
        # inf or nan.
        self.sumsq = torch.zeros(num_params, dtype=torch.float64, device=device)
        self.nonfinite = torch.zeros(num_params, dtype=torch.uint8, device=device)
        self._one = torch.ones((), dtype=torch.float64, device=device)
        self._none = torch.zeros((), dtype=torch.float64, device=device)
        self._zero = torch.zeros((), dtype=torch.float32, device=device)
        self._yes = torch.ones((), dtype=torch.float32, device=device)
        # Whether sums by name are needed, and where ranks hold different elements the last ones.
        self._has_names = False
        self._squares = self.sumsq
        self.reset()

    def add_names(self, name_indices: Sequence[int], num_names: int) -> None:
        """Keep the norms by name, too; `name_indices` has the index of each parameter's name."""
        self._has_names = True
        if self._sharded is not None:
            self._sharded.add_names(send(list(name_indices), torch.int64, self.sumsq.device), num_names)
            # Until the norm is computed again; in a window that a rank gave up it is not.
            self._squares = self.sumsq.new_full((num_names,), torch.nan)

    def reset(self) -> None:
        """Forget the window, without work for the device: the next one overwrites sums and flags."""
        # float32 0-dim: 1 if a gradient holds inf or nan, which a loss scale follows; 1 if the step must be
        # skipped, for that or another reason; nan if a rank gave the window up, else 0.
        self.overflow = self.found_inf = self.void = self._zero
        # float64 0-dim: 1 if a measure has skipped or clipped the window.
        self.acted = self._none
        # float64 0-dim, the product of the clip factors so far, of which each counts as its mean over names:
        # what ranks compare.
        self.clipped = self._one
        # The product of the factors since `sumsq` was read, float64 0-dim or `[num_params]`.
        self._clipped_since = self._one
        # bool `[num_params]`, which parameters any rank used; None where `.grad is None` shows it.
        self.used: Tensor | None = None
        self._before_clipping: Tensor | None = None
        self._squares_before_clipping: Tensor | None = None

    def compute_norm(self, *, is_refused: bool = False) -> None:
        """Derive norm and skip decision from the sums of squares that the kernels left, and `void`.

        Where ranks hold different elements one all-reduce, waited for; none behind a header that
        `is_refused`.
        """
        total = add_up(self.sumsq)  # in registration order: not a matter of buckets or threads
        if self._sharded is not None and not is_refused:
            total, void, self._squares = self._sharded.whole(self.sumsq, self.void)
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

    @property
    def is_shared(self) -> bool:
        """Whether ranks hold different elements, so that the norm needs a collective."""
        return self._sharded is not None

    def renew_norm(self, *, was_read: bool) -> None:
        """Compute the norm again, where gradients may have been changed since; the skip decision stays.

        `was_read`: `sumsq` has just been read from changed gradients. Where ranks hold different elements one
        all-reduce, waited for: every rank calls this at the same point there.
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
        """Compute the norm again from `sumsq` of all elements, which was read just now, without a collective.

        Norms by name are as the ranks added them up last.
        """
        self.keep_norm()
        self._clipped_since = self._one
        self._norm = add_up(self.sumsq).sqrt()

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of the gradients as they are; float64 0-dim."""
        return self._norm

    def guarding_norm(self, norm: Tensor) -> Tensor:
        """Return a norm; nan in place of a finite one where the step is skipped, for who steps without us."""
        return torch.where((self.found_inf != 0) & norm.isfinite(), torch.nan, norm)

    def squares(self) -> Tensor:
        """Return the squared norm of each name's gradient as it is, float64 `[names]`; after `add_names`."""
        if self._sharded is not None:
            return self._squares
        return self.sumsq * self._clipped_since.square()

    def norm_before_clipping(self) -> Tensor:
        """Return the 2-norm as the window's end left it, whatever was clipped since; float64 0-dim."""
        return self._norm if self._before_clipping is None else self._before_clipping

    def norms_before_clipping(self) -> Tensor:
        """Return the same of each name's gradient, float64 `[names]`."""
        kept = self._squares_before_clipping
        return (self.squares() if kept is None else kept).sqrt()

    def keep_norm(self) -> None:
        """Remember the norms before the first clipping."""
        if self._before_clipping is None:
            self._before_clipping = self._norm
            if self._has_names:
                self._squares_before_clipping = self.squares()

    def inf_norm(self, largest: Tensor) -> Tensor:
        """Return the largest of all ranks' `largest`, float64 0-dim, with the same bits on every rank."""
        return largest if self._sharded is None else self._sharded.largest(largest)

    def clip(self, max_norm: float | Tensor, norm: Tensor) -> Tensor:
        """Return min(1, max_norm / (norm + 1e-6)), float64 0-dim, for the caller to multiply by."""
        self.keep_norm()
        factor = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
        self._norm = self._norm * factor
        if self._has_names and self._sharded is not None:
            self._squares = self._squares * factor.square()
        self._note_clipping(factor, factor)
        return factor

    def clip_each(self, max_norm: float, groups: Sequence[Tensor] | None) -> Tensor:
        """Return as `clip` the factor of each parameter, from its group's norm; after `add_names`.

        Args:
            max_norm: of each group.
            groups: the indices of each group's names, int64, disjoint; other parameters get 1. None: every
                name is a group.

        Returns:
            float64 `[num_params]`, the same bits on every rank, for the caller to multiply by.
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
        # Each product with 1 would be a launch.
        self.clipped = compared if self.clipped is self._one else self.clipped * compared
        self._clipped_since = factor if self._clipped_since is self._one else self._clipped_since * factor
