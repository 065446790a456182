"""Neighbouring slots of a bucket whose gradients are taken in by one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine._ops import BucketPlan
from pyengine._pointers import Pointers
from pyengine.accumulator.base import slot_gradient
from pyengine.host import runs_ahead
from pyengine.layout import Bucket

# Gradients of this size are still in a processor's cache when they are taken in; more calls would cost more than they
# save. On an accelerator a launch costs as much as reading 20 MB, so there a group is a whole bucket.
GROUP_BYTES = 2**20


class Group:
    """Neighbouring slots that are taken in by one call; `is_first` until their sum holds something of this window."""

    def __init__(self, bucket: Bucket, params: Sequence[Parameter], slots: range) -> None:
        self.start, self.stop = slots.start, slots.stop
        self.params = list(params[self.start : self.stop])
        mine = bucket.slots[self.start : self.stop]
        self.plan = BucketPlan([slot.offset for slot in mine], [slot.numel for slot in mine])
        self.is_first = True
        self._is_contiguous = all(param.is_contiguous() for param in self.params)

    def has_arrived(self, index: int) -> bool:
        """Whether the running backward has delivered this gradient."""
        return self.params[index].grad is not None

    def gather(self, grads: Sequence[Tensor | None]) -> Pointers:
        """Return gradients in slot order; the core checks a thousand in 25 µs, so only odd ones are looked at here."""
        if self._is_contiguous:
            try:
                return self.plan.pointers(grads)
            except ValueError:  # some gradient is sparse or strided
                pass
        return self.plan.pointers([slot_gradient(param) for param in self.params])


def cut(bucket: Bucket, device: torch.device) -> list[range]:
    """Cut a bucket into runs of slots that are worth a call each."""
    if runs_ahead(device):
        return [range(len(bucket.slots))]
    runs, start, size = [], 0, 0
    for index, slot in enumerate(bucket.slots):
        size += slot.numel * bucket.dtype.itemsize
        if size >= GROUP_BYTES or index + 1 == len(bucket.slots):
            runs.append(range(start, index + 1))
            start, size = index + 1, 0
    return runs
