"""The norms and non-finite flags of reduced gradients, computed in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pyengine.ops.plan import BucketPlan
from pyengine.ops.pointers import Pointers, TensorList
from pyengine.window.final_pass import FinalPass


class ReducedNorms:
    """The sums of squares and the non-finite flags of several buckets.

    Each bucket is read separately, as soon as its reduction has completed.

    Args:
        buckets: for each bucket, its slots and the registration indices of their parameters.

    Cost: on an accelerator, one launch per bucket, and three more launches per window.
    """

    def __init__(self, buckets: Sequence[tuple[BucketPlan, Sequence[int]]], device: torch.device) -> None:
        self._plans = [plan for plan, _ in buckets]
        ends = list(accumulate((len(plan.numels) for plan in self._plans), initial=0))
        self._spans = [slice(*span) for span in pairwise(ends)]
        self._sumsq = torch.zeros(ends[-1], dtype=torch.float64, device=device)
        self._nonfinite = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
        params = [index for _, indices in buckets for index in indices]
        self._params = torch.tensor(params, dtype=torch.int64, device=device)

    def begin(self) -> None:
        self._nonfinite.zero_()

    def read(
        self, index: int, sources: TensorList | Pointers, out: TensorList | Pointers | None, scale: Tensor
    ) -> None:
        """Read bucket `index` in one pass; optionally write its scaled values in the same pass.

        Args:
            sources: one entry per slot, `[slot.numel]`.
            out: tensors for the scaled values, each in its own dtype; may be `sources`. If None, no values
                are written.
            scale: float32, 0-dim.

        Cost: one launch.
        """
        span = self._spans[index]
        self._plans[index].unscale_norm(
            sources, out, scale, sumsq=self._sumsq[span], nonfinite=self._nonfinite[span]
        )

    def copy_to(self, final: FinalPass) -> None:
        final.sumsq.index_copy_(0, self._params, self._sumsq)
        self.copy_flags_to(final.nonfinite)

    def copy_flags_to(self, flags: Tensor) -> None:
        """Copy the flags of non-finite gradients to the uint8 tensor `flags`, by registration index."""
        flags.index_copy_(0, self._params, self._nonfinite)
