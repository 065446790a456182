"""Norms and finite flags of a window's buckets: a read of each as it lands, a hand-over behind the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pyengine.ops.plan import BucketPlan
from pyengine.ops.pointers import Pointers, TensorList
from pyengine.window.final_pass import FinalPass


@dataclass(frozen=True)
class NormSlots:
    """What of a bucket is read when it lands.

    Attributes:
        plan: its slots; and one more behind them where the used flags are summed with the bucket: nan there
            means that a rank gave the window up.
        params: registration indices of the slots' parameters, without that one more.
    """

    plan: BucketPlan
    params: Sequence[int]


class LandedNorms:
    """Sums of squares and finite flags of all buckets of one kind, in memory of its own.

    Args:
        buckets: as they are asked for.
        device: where gradients lie.

    Cost: on an accelerator a launch a bucket, and eight a window.
    """

    def __init__(self, buckets: Sequence[NormSlots], device: torch.device) -> None:
        ends = list(accumulate((len(bucket.plan.numels) for bucket in buckets), initial=0))
        self._plans = [bucket.plan for bucket in buckets]
        self._spans = [slice(*span) for span in pairwise(ends)]
        self._sumsq = torch.zeros(ends[-1], dtype=torch.float64, device=device)
        self._nonfinite = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
        slots, params, flags = list[int](), list[int](), list[int]()
        for bucket, span in zip(buckets, self._spans, strict=True):
            first_flag = span.start + len(bucket.params)
            slots += range(span.start, first_flag)
            params += bucket.params
            flags += range(first_flag, span.stop)
        self._slots, self._params, self._flags = (
            torch.tensor(each, dtype=torch.int64, device=device) for each in (slots, params, flags)
        )

    def begin(self) -> None:
        """Start a window: nothing of it has been read."""
        self._nonfinite.zero_()

    def read(
        self, index: int, sources: TensorList | Pointers, out: TensorList | Pointers | None, scale: Tensor
    ) -> None:
        """Read a bucket once, times `scale`.

        Args:
            index: of the bucket.
            sources: one entry a slot of its plan, `[numel]`, read.
            out: written where it has a tensor, in its own dtype; may be `sources`. None writes nothing.
            scale: float32, 0-dim.

        Cost: one launch; reads one element, and writes one if `out` is given.
        """
        span = self._spans[index]
        self._plans[index].unscale_norm(
            sources, out, scale, sumsq=self._sumsq[span], nonfinite=self._nonfinite[span]
        )

    def settle(self, final: FinalPass) -> None:
        """Hand over what has been read: `sumsq` and `nonfinite` of these buckets' parameters, and `void`."""
        final.sumsq.index_copy_(0, self._params, self._sumsq.index_select(0, self._slots))
        final.nonfinite.index_copy_(0, self._params, self._nonfinite.index_select(0, self._slots))
        if len(self._flags):
            given_up = self._nonfinite.view(torch.bool).index_select(0, self._flags).any()
            final.void = torch.where(given_up, torch.nan, final.void)
