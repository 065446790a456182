"""Norms and finite flags of a window's buckets: a read of each as it lands, a hand-over behind the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pyengine.ops.plan import BucketPlan
from pyengine.ops.pointers import Pointers
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
        num_params: of the model; those in no bucket have a norm of 0.
        device: where gradients lie.

    Cost: on an accelerator a launch a bucket, and six a window.
    """

    def __init__(self, buckets: Sequence[NormSlots], num_params: int, device: torch.device) -> None:
        ends = list(accumulate((len(bucket.plan.numels) for bucket in buckets), initial=0))
        nowhere = ends[-1]  # stays 0
        self._plans = [bucket.plan for bucket in buckets]
        self._spans = [slice(*span) for span in pairwise(ends)]
        self._sumsq = torch.zeros(nowhere + 1, dtype=torch.float64, device=device)
        self._nonfinite = torch.zeros(nowhere + 1, dtype=torch.uint8, device=device)
        places, flags = [nowhere] * num_params, list[int]()
        for bucket, span in zip(buckets, self._spans, strict=True):
            for place, param in enumerate(bucket.params, start=span.start):
                places[param] = place
            flags += range(span.start + len(bucket.params), span.stop)
        self._places = torch.tensor(places, device=device)
        self._flags = torch.tensor(flags, dtype=torch.int64, device=device)

    def begin(self) -> None:
        """Start a window: nothing of it has been read."""
        self._nonfinite.zero_()

    def read(self, index: int, sources: Pointers, out: Pointers | None, scale: Tensor) -> None:
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
        """Hand over what has been read: `sumsq` and `nonfinite` of every parameter, and `void`."""
        torch.index_select(self._sumsq, 0, self._places, out=final.sumsq)
        torch.index_select(self._nonfinite, 0, self._places, out=final.nonfinite)
        if len(self._flags):
            given_up = self._nonfinite.view(torch.bool).index_select(0, self._flags).any()
            final.void = torch.where(given_up, torch.nan, final.void)
