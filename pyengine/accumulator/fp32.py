"""Sums in a flat fp32 buffer under bf16/fp16 parameters: nothing stops growing after 256 micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine._pointers import Pointers
from pyengine.accumulator.group import Group
from pyengine.accumulator.grouped import GroupedBucket
from pyengine.layout import Bucket
from pyengine.norm import FinalPass
from pyengine.wire import Wire


class Fp32Bucket(GroupedBucket):
    """A bucket of narrow parameters summed in fp32 by fused calls.

    Bytes an element: 6 in the first micro-batch (stored, no zero pass), 10 in later ones; with a narrow wire the last
    one sums, scales, casts and checks in a single pass of 8. `.grad` ends as views of a buffer of the parameters' type:
    the wire buffer itself where the types agree.
    """

    def __init__(
        self, bucket: Bucket, params: Sequence[Parameter], *, wire: Wire, device: torch.device
    ) -> None:
        super().__init__(bucket, params, device=device)
        self._sum = self.allocate(torch.float32)
        self._wire = self._sum if wire.dtype == torch.float32 else self.allocate(wire.dtype)
        self._result = self._wire if wire.dtype == bucket.dtype else self.allocate(bucket.dtype)
        self._wire_slots = self.plan.pointers(self.slots(self._wire))
        self._result_slots = self.plan.pointers(self.slots(self._result))
        self._grads = self.views(self._result)
        self._has_fused = False
        for param, main_grad in zip(self.params, self.views(self._sum), strict=True):
            param.main_grad = main_grad  # type: ignore[attr-defined]

    def begin(self) -> None:
        """Start a window: let autograd make fresh gradients, and let the first one overwrite the sum."""
        super().begin()
        if self._has_fused:
            self._set_first(False)
            self._sum.zero_()  # a layer that writes main_grad itself needs a sum to add to

    def add(self, micro_batch: int) -> None:
        """Take in what the backward left: groups that never became complete, and layers that wrote main_grad."""
        self._find_fused()
        super().add(micro_batch)

    def to_wire(self, inv_count: Tensor | None, *, poison: bool) -> Tensor:
        """Add the last gradients; with a narrow wire also scale, cast and check in the same pass."""
        self._find_fused()
        grads = self._collect(self._whole)
        first, flags = self._groups[0].is_first, self._flagged[-1]
        if self._wire is self._sum:
            self.plan.accumulate_(self._sum, grads, self.one, first=first, nonfinite=flags)
        else:
            scale = self.one if inv_count is None else inv_count
            self.plan.accumulate_cast_(
                self._wire, self._sum, grads, self.one, scale, first=first, nonfinite=flags
            )
        self._set_first(False)
        self.write_used(self._wire, self._used, poison=poison)
        return self._wire

    def from_wire(self, inv_count: Tensor | None, final: FinalPass) -> None:
        """Publish the reduced sum in the parameters' type: a read, and a write unless the wire has that type."""
        out = None if self._result is self._wire and inv_count is None else self._result_slots
        self.norm(self._wire_slots, out, self.one if inv_count is None else inv_count, final)
        final.void = final.void + self.void(self._wire)
        used = self.used_anywhere(self._wire, self._used)
        for param, grad, keep in zip(self.params, self._grads, used, strict=True):
            param.grad = grad if keep else None

    def scale_(self, scale: Tensor) -> None:
        """Multiply the published gradients in place."""
        self.plan.unpack_(self._result_slots, self._result, scale)

    def _accumulate(self, group: Group, grads: Pointers, flags: Tensor) -> None:
        """Take in a group: 6 bytes an element first, then 10."""
        group.plan.accumulate_(self._sum, grads, self.one, first=group.is_first, nonfinite=flags)

    def _find_fused(self) -> None:
        for index in self.take_fused():
            self._has_fused = self._used[index] = True
            self.params[index].grad = None
            self._set_first(False)  # the sum was zero, and now holds what the layer wrote
