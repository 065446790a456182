"""Buckets that take gradients in and release them, group by group, from inside the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine._pointers import Pointers
from pyengine.accumulator.base import BucketBase, flagged_in
from pyengine.accumulator.group import Group, cut
from pyengine.layout import Bucket
from pyengine.watch import Watch


class GroupedBucket(BucketBase):
    """A bucket whose sum is not where autograd adds; a kind says in `_accumulate` what becomes of a group's gradients.

    In earlier micro-batches gradients are taken in about a megabyte at a time: they are still in the cache, and no
    second set of gradients ever exists. The flags of every micro-batch are kept, so a report can name it.
    """

    in_place = False

    def __init__(self, bucket: Bucket, params: Sequence[Parameter], *, device: torch.device) -> None:
        super().__init__(bucket, params, device)
        self._flagged: list[Tensor] = []
        self._whole = Group(bucket, params, range(len(params)))
        self._groups = [Group(bucket, params, slots) for slots in cut(bucket, device)]

    def begin(self) -> None:
        """Start a window: let autograd make fresh gradients, and let the first one overwrite the sum."""
        for param in self.params:
            param.grad = None
        self._used = [False] * len(self.params)
        self._flagged = [torch.zeros_like(self._nonfinite)]
        self._set_first(True)

    def watches(self) -> list[Watch]:
        """Watch for the gradients of every group."""
        return [Watch(group.params, group.has_arrived, partial(self._take, group)) for group in self._groups]

    def add(self, micro_batch: int) -> None:
        """Take in what the backward left: groups that never became complete."""
        del micro_batch
        self._take_rest()
        self._flagged.append(torch.zeros_like(self._nonfinite))

    def arm(self) -> None:
        """Do nothing: a gradient that is there has arrived."""

    def has_arrived(self, slot: int) -> bool:
        """Whether the armed backward has delivered this slot's gradient."""
        return self.params[slot].grad is not None

    def blame(self) -> Callable[[int], list[int] | None]:
        """Return what tells the micro-batches whose gradient was not finite, from the flags of the fused kernels."""
        return partial(flagged_in, self._flagged)

    def _is_used(self, index: int) -> bool:
        return self._used[index]

    def _rows(self) -> list[Tensor]:
        return self._flagged[:-1]

    def _go_on(self, rows: Tensor, used: list[bool]) -> None:
        self._used = used
        self._flagged = [*rows, torch.zeros_like(self._nonfinite)]
        self._set_first(False)

    def _accumulate(self, group: Group, grads: Pointers, flags: Tensor) -> None:
        """Add a group's gradients to the sum; overwrite it if `group.is_first`."""
        raise NotImplementedError

    def _take_rest(self) -> None:
        for group in self._groups:
            if group.is_first or any(param.grad is not None for param in group.params):
                self._take(group)

    def _take(self, group: Group) -> None:
        """Add a group's gradients to the sum and release them."""
        grads = self._collect(group)
        self._accumulate(group, grads, self._flagged[-1][group.start : group.stop])
        group.is_first = False

    def _collect(self, group: Group) -> Pointers:
        """Take a group's gradients off its parameters."""
        grads = [param.grad for param in group.params]
        for index, grad in enumerate(grads, start=group.start):
            if grad is not None:
                self._used[index] = True
        pointers = group.gather(grads)
        for param in group.params:
            param.grad = None
        return pointers

    def _set_first(self, is_first: bool) -> None:
        for group in self._groups:
            group.is_first = is_first
