"""Neighbouring slots of a bucket whose gradients are accumulated by one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from pyengine.gradients.layout import Bucket
from pyengine.gradients.slots import slot_gradient
from pyengine.ops.device import runs_ahead
from pyengine.ops.plan import BucketPlan
from pyengine.ops.pointers import Pointers

# Gradients of this size are still in a processor's cache when they are accumulated; more calls would cost
# more than they save. On an accelerator a launch costs as much as reading 20 MB, so there a group is a whole
# bucket.
GROUP_BYTES = 2**20


class SlotGroup:
    """Neighbouring slots that are accumulated by one call.

    Args:
        bucket: of the slots.
        params: the bucket's, in slot order.
        slots: indices in the bucket.

    Attributes:
        start, stop: of `slots`.
        params: the slots' own.
        plan: the slots, in the bucket's flat buffers.
        is_first: whether their sum holds nothing of this window yet.
    """

    def __init__(self, bucket: Bucket, params: Sequence[Parameter], slots: range) -> None:
        self.start, self.stop = slots.start, slots.stop
        self.params = list(params[self.start : self.stop])
        mine = bucket.slots[self.start : self.stop]
        self.plan = BucketPlan([slot.offset for slot in mine], [slot.numel for slot in mine])
        self.is_first = True
        self._is_contiguous = all(param.is_contiguous() for param in self.params)

    def gather(self, used: list[bool]) -> Pointers:
        """Return the gradients in slot order, and note which there are.

        Args:
            used: by the bucket's slots; True is written where there is a gradient.

        Returns:
            Autograd's own memory, which the result keeps alive, or a copy of gradients that are sparse,
            strided otherwise or negated.
        """
        grads = [param.grad for param in self.params]
        for index, grad in enumerate(grads, start=self.start):
            if grad is not None:
                used[index] = True
        # The core checks a thousand in 25 µs, so only odd ones are looked at here.
        if self._is_contiguous:
            try:
                return self.plan.pointers(grads)
            except ValueError:  # some gradient is sparse or strided
                pass
        return self.plan.pointers([slot_gradient(param) for param in self.params])

    def pop(self, used: list[bool]) -> Pointers:
        """Do as `gather`, and set `.grad` to None: the result is the last to hold the gradients."""
        pointers = self.gather(used)
        for param in self.params:
            param.grad = None
        return pointers


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
