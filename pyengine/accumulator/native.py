"""Sums in the buffer that `.grad` is a view of: autograd adds in place, no pass of ours before the reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.accumulator.base import BucketBase, flagged_in
from pyengine.accumulator.group import Group, cut
from pyengine.layout import Bucket
from pyengine.norm import FinalPass
from pyengine.watch import Watch
from pyengine.wire import Wire


class NativeBucket(BucketBase):
    """A bucket whose sum has the parameters' own type.

    The first micro-batch's gradients are stored about a megabyte at a time, from inside the backward: no zero pass, and
    they are still in the cache. From then on `.grad` views the sum and autograd adds in place. The sum is reduced in
    place when the wire has the same type; otherwise it is cast into a wire buffer (1/count folded in) and back.

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
        self._has_fused = False
        self._groups = [Group(bucket, params, slots) for slots in cut(bucket, device)]
        for param, grad in zip(self.params, self._grads, strict=True):
            param.main_grad = grad  # type: ignore[attr-defined]

    def begin(self) -> None:
        """Start a window: let autograd make fresh gradients, which are stored over the old sum."""
        for param in self.params:
            param.grad = None
        self._is_first = True
        for group in self._groups:
            group.is_first = True
        if self._has_fused:
            self._sum.zero_()  # a layer that writes main_grad itself needs a sum to add to
        self._used = [False] * len(self.params)
        self._begun = self._versions()
        if self._watched is not None:
            self._watched = []

    def watches(self) -> list[Watch]:
        """Watch for the first micro-batch's gradients; later ones are added by autograd."""
        if not self._is_first:
            return []
        return [Watch(group.params, group.has_arrived, partial(self._store, group)) for group in self._groups]

    def add(self, micro_batch: int) -> None:
        """Store what the first backward left; later ones have been added by autograd already."""
        del micro_batch
        if self._is_first or self._watched is not None:
            self._settle()
            self._look()

    def arm(self) -> None:
        """Note the version of every slot; autograd's in-place add raises it."""
        if not self._is_first:
            self._settle()
            self._armed = self._versions()

    def has_arrived(self, slot: int) -> bool:
        """Whether the armed backward has delivered this slot's gradient."""
        if self._is_first:
            return self.params[slot].grad is not None
        return self._grads[slot]._version != self._armed[slot]

    def to_wire(self, inv_count: Tensor | None, *, poison: bool) -> Tensor:
        """Return the sum, cast to the wire with `inv_count` folded in if the wire is another buffer."""
        self._settle()
        self._look()
        self._used = [
            used or begun != grad._version
            for used, begun, grad in zip(self._used, self._begun, self._grads, strict=True)
        ]
        if not self.in_place:
            scale = self.one if inv_count is None else inv_count
            self.plan.pack_(self._wire, self._slots, scale)
        self.write_used(self._wire, self._used, poison=poison)
        return self._wire

    def from_wire(self, inv_count: Tensor | None, final: FinalPass) -> None:
        """Publish the reduced sum; read-only where it was reduced in place and 1/count is still pending."""
        scale = self.one if inv_count is None else inv_count
        out = None if self.in_place and inv_count is None else self._slots
        self.norm(self._wire_slots, out, scale, final)
        final.void = final.void + self.void(self._wire)
        used = self.used_anywhere(self._wire, self._used)
        if not all(used):
            for param, keep in zip(self.params, used, strict=True):
                if not keep:
                    param.grad = None

    def scale_(self, scale: Tensor) -> None:
        """Multiply the published gradients in place: 4 + 4 bytes an element in fp32."""
        self.plan.unpack_(self._slots, self._sum, scale)

    def blame(self) -> Callable[[int], list[int] | None]:
        """Return what tells the first micro-batch that brought a non-finite value (the sum stays so afterwards)."""
        watched = self._watched
        return lambda slot: None if watched is None else flagged_in(watched, slot)[:1]

    def _is_used(self, index: int) -> bool:
        self._settle()
        return self._used[index] or self._begun[index] != self._grads[index]._version

    def _rows(self) -> list[Tensor]:
        return self._watched or []

    def _go_on(self, rows: Tensor, used: list[bool]) -> None:
        self._used = used
        self._watched = None if self._watched is None else [*rows]
        self._is_first = False
        for param, grad in zip(self.params, self._grads, strict=True):
            param.grad = grad
        self._begun = self._versions()

    def _versions(self) -> list[int]:
        return [grad._version for grad in self._grads]

    def _look(self) -> None:
        """Note which slots are not finite after this micro-batch, if they are watched."""
        if self._watched is not None:
            flags = torch.zeros_like(self._nonfinite)
            self.plan.unscale_norm(self._slots, None, self.one, sumsq=self._sumsq, nonfinite=flags)
            self._watched.append(flags)

    def _settle(self) -> None:
        """Bring every gradient into the sum, wherever it lies, and let `.grad` view the sum."""
        for index in self.take_fused():
            self._has_fused = self._used[index] = True
            self.params[index].grad = self._grads[index]  # in the sum already: stored onto itself
        if self._is_first:
            for group in self._groups:
                if group.is_first:
                    self._store(group)
            self._is_first = False
        else:
            self._bring_back()

    def _store(self, group: Group) -> None:
        """Write a group's first gradients over the old sum: a read and a write an element."""
        grads = [param.grad for param in group.params]
        for index, grad in enumerate(grads, start=group.start):
            if grad is not None:
                self._used[index] = True
        group.plan.pack_(self._sum, group.gather(grads), self.one)
        for param, view in zip(group.params, self._grads[group.start : group.stop], strict=True):
            param.grad = view
        group.is_first = False

    def _bring_back(self) -> None:
        """Take in gradients that somebody put beside the sum (zero_grad, create_graph, a new tensor)."""
        grads = [param.grad for param in self.params]
        for param, grad, view in zip(self.params, grads, self._grads, strict=True):
            if grad is view:
                continue
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad.to_dense() if grad.is_sparse else grad)
            param.grad = view
