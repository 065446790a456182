"""Norms and finite flags of reduced gradients, from one pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pyengine.ops.plan import BucketPlan
from pyengine.ops.pointers import Pointers, TensorList
from pyengine.window.final_pass import FinalPass


class SlotNorms:
    """One pass for sums of squares and finite flags of gradients; `params` are registration indices."""

    def __init__(self, plan: BucketPlan, params: Sequence[int], device: torch.device) -> None:
        self._plan = plan
        self.params = torch.tensor(params, dtype=torch.int64, device=device)
        self._sumsq = torch.zeros(len(params), dtype=torch.float64, device=device)
        self._nonfinite = torch.zeros(len(params), dtype=torch.uint8, device=device)

    def read(
        self,
        sources: TensorList | Pointers,
        out: TensorList | Pointers | None,
        scale: Tensor,
        final: FinalPass,
    ) -> None:
        """Read the slots once; write norms and finite flags to `final`.

        Args:
            sources: one entry a slot, `[slot.numel]`.
            out: written with the products, in its own dtype; may be `sources`. None writes nothing.
            scale: float32, 0-dim.
        """
        self._plan.unscale_norm(sources, out, scale, sumsq=self._sumsq, nonfinite=self._nonfinite.zero_())
        final.sumsq.index_copy_(0, self.params, self._sumsq)
        final.nonfinite.index_copy_(0, self.params, self._nonfinite)

    def scale_(self, tensors: TensorList | Pointers, scale: Tensor) -> None:
        """Multiply the slots in place by `scale`, float32, 0-dim."""
        self._plan.unscale_norm(tensors, tensors, scale, sumsq=self._sumsq, nonfinite=self._nonfinite)

    def flags(self, sources: TensorList | Pointers, one: Tensor) -> Tensor:
        """Return which slots are not finite, uint8 `[slots]`; `one` is float32, 0-dim, 1."""
        flags = torch.zeros_like(self._nonfinite)
        self._plan.unscale_norm(sources, None, one, sumsq=self._sumsq, nonfinite=flags)
        return flags


class ReducedNorms:
    """Sums of squares and finite flags of all buckets.

    Each bucket is read as soon as its reduction has completed.

    Args:
        buckets: of each bucket the slots, and the registration indices of their parameters.

    Cost: on an accelerator one launch a bucket, and three a window.
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
        """Read bucket `index` once, times `scale`; otherwise as `SlotNorms.read`. Cost: one launch."""
        span = self._spans[index]
        self._plans[index].unscale_norm(
            sources, out, scale, sumsq=self._sumsq[span], nonfinite=self._nonfinite[span]
        )

    def copy_to(self, final: FinalPass) -> None:
        final.sumsq.index_copy_(0, self._params, self._sumsq)
        final.nonfinite.index_copy_(0, self._params, self._nonfinite)
