"""Sums in the buffer that `.grad` is a view of: autograd adds in place, no pass of ours before the reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.accumulator.base import BucketBase
from pyengine.layout import Bucket
from pyengine.norm import FinalPass
from pyengine.wire import Wire


class NativeBucket(BucketBase):
    """A bucket whose sum has the parameters' own type.

    The flat buffer is reduced in place when the wire has the same type; otherwise it is cast into a wire buffer (1/count
    folded in) and back. Cost before the reduction: 0 bytes an element in place, read + write once with a cast.

    Args:
        watch: check every micro-batch for non-finite gradients, so that a report can name it: one more read each.
    """

    def __init__(
        self, bucket: Bucket, params: Sequence[Parameter], *, wire: Wire, device: torch.device, watch: bool
    ) -> None:
        super().__init__(bucket, params, device)
        self._sum = self.allocate(bucket.dtype)
        self._grads = self.views(self._sum)
        self._slots = self.plan.pointers(self.slots(self._sum))
        self.in_place = wire.dtype == bucket.dtype and not wire.folds_count
        self._wire = self._sum if self.in_place else self.allocate(wire.dtype)
        self._wire_slots = self.plan.pointers(self.slots(self._wire))
        self._watched: list[Tensor] | None = [] if watch else None
        self._is_clean = True
        for param, grad in zip(self.params, self._grads, strict=True):
            param.main_grad = grad

    def begin(self) -> None:
        """Start a window with a sum of zero: one write of the bucket, none the first time."""
        if not self._is_clean:
            self._sum.zero_()
        for param, grad in zip(self.params, self._grads, strict=True):
            if param.grad is not grad:
                param.grad = grad
        self._is_clean = False
        self._begun = self._versions()
        if self._watched is not None:
            self._watched = []

    def add(self, micro_batch: int) -> None:
        """Do nothing but watch: autograd has added already."""
        del micro_batch
        if self._watched is None:
            return
        self._gather()
        flags = torch.zeros_like(self._nonfinite)
        self.plan.unscale_norm(self._slots, None, self.one, sumsq=self._sumsq, nonfinite=flags)
        self._watched.append(flags)

    def arm(self) -> None:
        """Note the version of every slot; autograd's in-place add raises it."""
        self._gather()
        self._armed = self._versions()

    def has_arrived(self, slot: int) -> bool:
        """Whether the armed backward has added to this slot."""
        return self._grads[slot]._version != self._armed[slot]

    def to_wire(self, inv_count: Tensor | None, *, poison: bool) -> Tensor:
        """Return the sum, cast to the wire with `inv_count` folded in if the wire is another buffer."""
        self._gather()
        if self._watched is not None:
            self.add(len(self._watched))
        self._used = [begun != grad._version for begun, grad in zip(self._begun, self._grads, strict=True)]
        for index in self.take_fused():
            self._used[index] = True
        if not self.in_place:
            scale = self.one if inv_count is None else inv_count
            self.plan.pack_(self._wire, self._slots, scale)
        self.write_used(self._wire, self._used, poison=poison)
        return self._wire

    def from_wire(self, inv_count: Tensor | None, final: FinalPass) -> None:
        """Publish the reduced sum; read-only where it was reduced in place and 1/count is still pending."""
        scale = self.one if inv_count is None else inv_count
        out = None if self.in_place and inv_count is None else self._slots
        self.norm(self._wire_slots, out, scale, self._wire, final)
        used = self.used_anywhere(self._wire, self._used)
        if not all(used):
            for param, keep in zip(self.params, used, strict=True):
                if not keep:
                    param.grad = None

    def scale_(self, scale: Tensor) -> None:
        """Multiply the published gradients in place: 4 + 4 bytes an element in fp32."""
        self.plan.unpack_(self._slots, self._sum, scale)

    def blame(self, slot: int) -> list[int] | None:
        """Return the first micro-batch that brought a non-finite value (the sum stays so afterwards)."""
        if self._watched is None:
            return None
        return [index for index, flags in enumerate(self._watched) if flags[slot]][:1]

    def _versions(self) -> list[int]:
        return [grad._version for grad in self._grads]

    def _gather(self) -> None:
        """Bring gradients that somebody put beside the buffer (zero_grad, create_graph, a new tensor) back into it."""
        grads = [param.grad for param in self.params]
        for param, grad, view in zip(self.params, grads, self._grads, strict=True):
            if grad is view:
                continue
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad.to_dense() if grad.is_sparse else grad)
            param.grad = view
