"""Neighbouring slots of a sum whose gradients are accumulated by one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

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
        plan: of the whole sum.
        params: its, in slot order.
        slots: indices of the group's.

    Attributes:
        start, stop: of `slots`.
        params: the slots' own.
        plan: the group's slots, in flat buffers of the whole.
        is_first: whether their sum holds nothing of this window yet.
    """

    def __init__(self, plan: BucketPlan, params: Sequence[Parameter], slots: range) -> None:
        self.start, self.stop = slots.start, slots.stop
        self.params = list(params[self.start : self.stop])
        mine = slice(self.start, self.stop)
        self.plan = BucketPlan(plan.offsets[mine], plan.numels[mine])
        self.is_first = True
        self._is_contiguous = all(param.is_contiguous() for param in self.params)

    def gather(self, used: list[bool]) -> Pointers:
        """Return the gradients in slot order, and note which there are.

        Args:
            used: by slots of the whole; True is written where there is a gradient.

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


def cut(numels: Sequence[int], itemsize: int, device: torch.device) -> list[range]:
    """Cut slots of `numels` elements, of `itemsize` bytes in a gradient, into runs worth a call each."""
    if runs_ahead(device):
        return [range(len(numels))]
    runs, start, size = [], 0, 0
    for index, numel in enumerate(numels):
        size += numel * itemsize
        if size >= GROUP_BYTES or index + 1 == len(numels):
            runs.append(range(start, index + 1))
            start, size = index + 1, 0
    return runs
