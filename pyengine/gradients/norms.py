"""Norms and finite flags of reduced gradients, from one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pyengine.ops.plan import BucketPlan
from pyengine.ops.pointers import Pointers, TensorList
from pyengine.window.final_pass import FinalPass


class SlotNorms:
    """One pass for sums of squares and finite flags of gradients.

    Args:
        plan: slots of the gradients.
        params: the slots' parameters, as registration indices.
        device: of the gradients.

    Attributes:
        params: int64 `[slots]`, as given.
    """

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
            sources: one entry a slot, `[slot.numel]`, read.
            out: written, in its own dtype; may be `sources`. None writes nothing.
            scale: float32, 0-dim.
            final: its `sumsq` and `nonfinite` are written at `params`.

        Cost: reads one element; writes one if `out` is given.
        """
        self._plan.unscale_norm(sources, out, scale, sumsq=self._sumsq, nonfinite=self._nonfinite.zero_())
        final.sumsq.index_copy_(0, self.params, self._sumsq)
        final.nonfinite.index_copy_(0, self.params, self._nonfinite)

    def scale_(self, tensors: TensorList | Pointers, scale: Tensor) -> None:
        """Multiply the slots in place by `scale`, float32, 0-dim.

        Cost: reads and writes one element.
        """
        self._plan.unscale_norm(tensors, tensors, scale, sumsq=self._sumsq, nonfinite=self._nonfinite)

    def flags(self, sources: TensorList | Pointers, one: Tensor) -> Tensor:
        """Return which slots are not finite.

        The result is uint8 `[slots]`, owned by the caller.

        Args:
            sources: as for `read`.
            one: float32, 0-dim, 1.

        Cost: reads one element.
        """
        flags = torch.zeros_like(self._nonfinite)
        self._plan.unscale_norm(sources, None, one, sumsq=self._sumsq, nonfinite=flags)
        return flags


@dataclass(frozen=True)
class NormSlots:
    """The slots that `ReducedNorms` reads of one bucket.

    Attributes:
        plan: the slots.
        params: registration indices of the slots' parameters.
    """

    plan: BucketPlan
    params: Sequence[int]


class ReducedNorms:
    """Sums of squares and finite flags of all buckets.

    Each bucket is read as soon as its reduction has completed.

    Args:
        buckets: the slots of each bucket.
        device: of the gradients.

    Cost: on an accelerator one launch a bucket, and three a window.
    """

    def __init__(self, buckets: Sequence[NormSlots], device: torch.device) -> None:
        ends = list(accumulate((len(bucket.plan.numels) for bucket in buckets), initial=0))
        self._plans = [bucket.plan for bucket in buckets]
        self._spans = [slice(*span) for span in pairwise(ends)]
        self._sumsq = torch.zeros(ends[-1], dtype=torch.float64, device=device)
        self._nonfinite = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
        params = [param for bucket in buckets for param in bucket.params]
        self._params = torch.tensor(params, dtype=torch.int64, device=device)

    def begin(self) -> None:
        """Start a window: clear the finite flags."""
        self._nonfinite.zero_()

    def read(
        self, index: int, sources: TensorList | Pointers, out: TensorList | Pointers | None, scale: Tensor
    ) -> None:
        """Read a bucket once, times `scale`.

        Args:
            index: of the bucket.
            sources: one entry a slot of the bucket's plan, `[numel]`, read.
            out: written where it has a tensor, in its own dtype; may be `sources`. None writes nothing.
            scale: float32, 0-dim.

        Cost: one launch; reads one element, and writes one if `out` is given.
        """
        span = self._spans[index]
        self._plans[index].unscale_norm(
            sources, out, scale, sumsq=self._sumsq[span], nonfinite=self._nonfinite[span]
        )

    def copy_to(self, final: FinalPass) -> None:
        """Copy the results to `sumsq` and `nonfinite` of `final`."""
        final.sumsq.index_copy_(0, self._params, self._sumsq)
        final.nonfinite.index_copy_(0, self._params, self._nonfinite)
