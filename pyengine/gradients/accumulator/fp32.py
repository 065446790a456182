"""Sums in a flat fp32 buffer under bf16/fp16 parameters: nothing stops growing after 256 micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.comm.base import Comm, Work
from pyengine.gradients.accumulator.grouped import GroupedBucket
from pyengine.gradients.accumulator.main_grad import offer, pop_written
from pyengine.gradients.layout import Bucket
from pyengine.gradients.slot_group import SlotGroup
from pyengine.gradients.slots import views_of
from pyengine.gradients.sums import Fp32Sum
from pyengine.wire import Wire


class Fp32Bucket(GroupedBucket):
    """A bucket of narrow parameters summed in fp32 by fused calls.

    Bytes an element: 6 in the first micro-batch (stored, no zero pass), 10 in later ones; with a narrow wire
    the last one sums, scales, casts and checks in a single pass of 8. `.grad` ends as views of a buffer of
    the parameters' type: the wire buffer itself where the types agree.

    Args:
        offers: whether layers may add to the sum themselves, as `main_grad`.
    """

    def __init__(
        self, bucket: Bucket, params: Sequence[Parameter], *, wire: Wire, comm: Comm, offers: bool = True
    ) -> None:
        super().__init__(bucket, params)
        self._offers = offers
        self._whole = SlotGroup(self.plan, params, range(len(params)))
        travels = wire.dtype == torch.float32
        self._fp32 = Fp32Sum(self.plan, self.allocate(torch.float32, comm if travels else None))
        self.set_sum(self._fp32)
        flat = self._sum = self._fp32.flat
        landed = flat if travels else self.allocate(wire.dtype, comm)
        result = landed if wire.dtype == bucket.dtype else self.allocate(bucket.dtype)
        self._over_wire = wire
        self.set_buffers(landed, result, self.flags_for(wire, landed))

    def bind(self) -> None:
        super().bind()
        if self._offers:
            offer(self.params, views_of(self._sum, self.params, self.bucket.slots))

    def begin(self) -> None:
        super().begin()
        if self._has_fused:
            self._set_first(False)
            self._sum.zero_()  # a layer that writes main_grad itself needs a sum to add to

    def add(self) -> None:
        """Accumulate what the backward left: groups that never became complete, and what layers have added to
        `main_grad` themselves.
        """
        self._find_fused()
        super().add()

    def send(self, inv_count: Tensor | None, comm: Comm, *, poison: bool) -> Work:
        self.to_wire(inv_count)
        return self.send_over(self._over_wire, comm, poison=poison)

    def to_wire(self, inv_count: Tensor | None) -> None:
        """Write the sum, with the last gradients, into the wire buffer.

        Cost: with a narrow wire one pass of 8 bytes an element adds, scales, casts and checks; else as `add`.
        """
        self.unseal()
        self._find_fused()
        grads = self._whole.pop(self.used)
        first, flags = self._groups[0].is_first, self._flagged[-1]
        self._fp32.deposit_into_wire_(self._wire, grads, inv_count, first=first, nonfinite=flags)
        self._set_first(False)

    def _find_fused(self) -> None:
        for index in pop_written(self.params):
            self._has_fused = self.used[index] = True
            self.params[index].grad = None
            self._set_first(False)  # the sum was zero, and now holds what the layer wrote
