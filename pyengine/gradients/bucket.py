"""Buckets: parameters whose gradients are summed and reduced together.

`Bucket` moves gradients from `.grad` into a `Sum`, one micro-batch at a time. The owner determines how
the sum is reduced and where the result is stored; see own_buckets.py and fsdp/exact.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.gradients.arrival import Watch
from pyengine.gradients.layout import ALIGN_ELEMENTS
from pyengine.gradients.local_part import grad_version
from pyengine.gradients.slots import slot_gradient
from pyengine.gradients.sums import Sum
from pyengine.ops.device import runs_ahead
from pyengine.ops.plan import BucketPlan
from pyengine.ops.pointers import Pointers
from pyengine.window.nonfinite import flagged_in

# The size of a group of gradients, in bytes. Gradients in a group of this size are still in the CPU's cache
# when they are accumulated. With smaller groups the additional calls would cost more than the saved reads. On
# an accelerator a launch costs as much as reading 20 MB, so the whole bucket is one group.
GROUP_BYTES = 2**20

# The number of rows of flags per allocation. Several rows are allocated at once, because on an accelerator
# every zeroed allocation is a launch. A row takes one byte per parameter.
_ROWS = 16

# Called with this rank's sums of a bucket before the bucket's all-reduce. The arguments are the indices of
# the bucket's parameters; one tensor of shape `[numel]` per parameter, in the communication dtype and valid
# only during the call; and the scale by which the tensors have been multiplied, a 0-dim float32 tensor or
# None for 1. The observer runs on the stream that launches the all-reduce, and for most buckets inside the
# last backward.
Observer = Callable[[Sequence[int], Sequence[Tensor], Tensor | None], None]

# The identity and version of a `.grad`; None if there is no gradient.
Mark = tuple[int, int] | None


class Bucket:
    """Parameters whose gradients are accumulated in one `Sum`.

    Call `begin` at the start of each window, before any other method. In every micro-batch call `watches`
    before the last backward and `collect` after it; for gradients outside of `.grad`, call only `deposit`.

    Args:
        params: one or more parameters on the same device, in slot order.
        indices: the parameters' indices, in the reducer's order.
        plan: the slots (ranges) of the gradients in the sum.
        total: the sum over the slots of `plan`.
    """

    def __init__(self, params: Sequence[Any], indices: Sequence[int], plan: BucketPlan, total: Sum) -> None:
        self.params, self.indices, self.plan, self.total = list(params), list(indices), plan, total
        self.device: torch.device = self.params[0].device
        runs = _split_into_groups(plan.numels, self.params[0].dtype.itemsize, self.device)
        self._groups = [SlotGroup(plan, self.params, total, slots) for slots in runs]
        self._reset()

    def begin(self) -> None:
        self._reset()
        self.total.begin()

    def _reset(self) -> None:
        self.used = [False] * len(self.params)  # Whether this rank has a gradient in this window, by slot.
        # Flags per micro-batch of this window, each uint8 `[slots]`: 1 if the slot's gradient was not finite.
        # A report may read the flags after the next window has begun, so rows are not reused.
        self.flagged: list[Tensor] = []
        self._new_rows: Iterator[Tensor] = iter(())
        self._row: Tensor | None = None  # The flags of the micro-batch that is being accumulated.
        # The first row whose flags describe the sum instead of the gradients of one micro-batch; None if
        # there is no such row.
        self._first_row_of_sum: int | None = None
        # Marks of gradients from earlier backwards of the micro-batch; None if there are no such gradients.
        self._armed: list[Mark] | None = None
        self._set_first(True)

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has been added to the sum in this window."""
        return self._groups[0].is_first

    def watches(self) -> list[Watch]:
        """Return watches for the last backward of any micro-batch except the window's last.

        Each watch accumulates a group of gradients as soon as the group is complete, while the gradients are
        still in the cache. The bucket does not store the watches, to avoid a reference cycle.
        """
        self.arm()
        return self._watches()

    def _watches(self) -> list[Watch]:
        return [
            Watch(group.params, self.has_arrived, partial(self._accumulate, group), group.start)
            for group in self._groups
        ]

    def arm(self) -> None:
        """Record the gradients that earlier backwards of this micro-batch have left in `.grad`.

        A gradient counts as arrived in the last backward only if it changes after this call.
        """
        is_clean = all(param.grad is None for param in self.params)
        self._armed = None if is_clean else grad_marks(self.params)

    def has_arrived(self, slot: int) -> bool:
        """Whether a backward after `arm` has accumulated the gradient of this slot."""
        if self._armed is None:
            return self.params[slot].grad is not None
        return mark(self.params[slot]) != self._armed[slot]

    def collect(self) -> None:
        """Accumulate the gradients in `.grad`, and set `.grad` to None."""
        self._start_row()
        for group in self._groups:
            if group.is_first or any(param.grad is not None for param in group.params):
                self._accumulate(group)
        self._row = None

    def is_used(self, slot: int) -> bool:
        """Whether this rank has a gradient for a slot in this window."""
        return self.used[slot] or self.params[slot].grad is not None

    def deposit(self, grads: Sequence[Tensor | None]) -> None:
        """Accumulate gradients outside of `.grad`, one 1-D tensor per slot; the caller updates `used`."""
        self.total.deposit_(grads, first=self.is_empty, nonfinite=self._start_row())
        self._set_first(False)
        self._row = None

    def blame(self) -> Callable[[int], list[int] | None]:
        rows, first_of_sum = self.flagged, self._first_row_of_sum

        def blame(slot: int) -> list[int]:
            found = flagged_in(rows, slot)
            if first_of_sum is None:
                return found
            # A non-finite sum stays non-finite, so a flag of the sum matters only if no earlier row is
            # flagged.
            return [row for row in found if row < first_of_sum] or found[:1]

        return blame

    def _accumulate(self, group: SlotGroup) -> None:
        flags = self._start_row()[group.start : group.stop]
        group.total.deposit_(group.pop(self.used), first=group.is_first, nonfinite=flags)
        group.is_first = False

    def _start_row(self) -> Tensor:
        """Return the flags of this micro-batch, uint8 `[slots]`."""
        if self._row is None:
            row = next(self._new_rows, None)
            if row is None:
                rows = torch.zeros(_ROWS, len(self.params), dtype=torch.uint8, device=self.device)
                self._new_rows = iter(rows.unbind())
                row = next(self._new_rows)
            self.flagged.append(row)
            self._row = row
        return self._row

    def _set_first(self, is_first: bool) -> None:
        for group in self._groups:
            group.is_first = is_first


class SlotGroup:
    """Adjacent slots of a bucket that are accumulated by one call.

    Args:
        plan, params, total: plan, parameters and sum of the whole bucket.
        slots: the slots of the group.
    """

    def __init__(self, plan: BucketPlan, params: Sequence[Parameter], total: Sum, slots: range) -> None:
        self.start, self.stop = slots.start, slots.stop
        self.params = list(params[self.start : self.stop])
        mine = slice(self.start, self.stop)
        self.plan = BucketPlan(plan.offsets[mine], plan.numels[mine])
        self.total = total.over(self.plan)
        self.is_first = True  # whether these slots have not received a gradient in this window yet
        self._is_contiguous = all(param.is_contiguous() for param in self.params)

    def pop(self, used: list[bool]) -> Pointers:
        """Return the gradients in slot order and set `.grad` to None.

        The result points to the gradients' memory, which it keeps alive, or to copies from `slot_gradient`.
        Sets the entries of `used` (one per slot of the bucket) to True for slots with a gradient.
        """
        grads = [param.grad for param in self.params]
        found = [grad is not None for grad in grads]
        used[self.start : self.stop] = map(or_, used[self.start : self.stop], found)
        pointers: Pointers | None = None
        if self._is_contiguous:
            # The native core checks a thousand gradients in 25 µs, so Python checks gradients only if the
            # core raises an error because a gradient is sparse or not contiguous.
            with suppress(ValueError):
                pointers = self.plan.pointers(grads)
        if pointers is None:
            pointers = self.plan.pointers([slot_gradient(param) for param in self.params])
        for param in self.params:
            param.grad = None
        return pointers


def aligned(numels: Sequence[int], unit: int = ALIGN_ELEMENTS) -> BucketPlan:
    """Return a plan whose slots start at multiples of `unit` elements."""
    sizes = [-(-numel // unit) * unit for numel in numels]
    return BucketPlan(list(itertools.accumulate(sizes, initial=0))[:-1], numels)


def _split_into_groups(numels: Sequence[int], itemsize: int, device: torch.device) -> list[range]:
    """Split slots into groups of about `GROUP_BYTES` bytes."""
    if runs_ahead(device):
        return [range(len(numels))]
    runs, start, size = [], 0, 0
    for index, numel in enumerate(numels):
        size += numel * itemsize
        if size >= GROUP_BYTES or index + 1 == len(numels):
            runs.append(range(start, index + 1))
            start, size = index + 1, 0
    return runs


def grad_marks(params: Sequence[Parameter]) -> list[Mark]:
    """Return marks that change whenever a gradient is replaced or written to."""
    return list(map(mark, params))


def mark(param: Parameter) -> Mark:
    return None if param.grad is None else (id(param.grad), grad_version(param))
