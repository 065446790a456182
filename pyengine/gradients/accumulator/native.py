"""Sums in the buffer that `.grad` is a view of: autograd adds in place,
no pass of ours before the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import Parameter

from pyengine.comm.base import Comm, Work
from pyengine.gradients.accumulator.base import BucketAccumulator
from pyengine.gradients.accumulator.main_grad import offer, pop_written
from pyengine.gradients.arrival import Watch
from pyengine.gradients.layout import Bucket
from pyengine.gradients.slot_group import SlotGroup
from pyengine.gradients.slots import slots_of
from pyengine.gradients.sums import SlotNorms
from pyengine.window.nonfinite import flagged_in
from pyengine.wire import Wire


class NativeBucket(BucketAccumulator):
    """A bucket whose sum has the parameters' own type.

    The first micro-batch's gradients are stored about a megabyte at a time, from inside the backward: no zero
    pass, and they are still in the cache. From then on `.grad` views the sum and autograd adds in place. The
    sum is reduced in place when the wire has the same type; otherwise it is cast into a wire buffer (1/count
    folded in) and back.

    Args:
        watch: check every micro-batch for non-finite gradients, so that a report can name it: one more read
            each.
    """

    def __init__(
        self, bucket: Bucket, params: Sequence[Parameter], *, wire: Wire, comm: Comm, watch: bool
    ) -> None:
        super().__init__(bucket, params)
        self._watched: list[Tensor] | None = [] if watch else None
        self._norms = SlotNorms(self.plan, [slot.param for slot in bucket.slots], self.device)
        self._in_place = wire.dtype == bucket.dtype and not wire.folds_count
        self._sum = self.allocate(bucket.dtype, comm if self._in_place else None)
        flat = self._sum if self._in_place else self.allocate(wire.dtype, comm)
        self._over_wire = wire
        self.set_buffers(flat, self._sum, self.flags_for(wire, flat))

    def bind(self) -> None:
        super().bind()
        offer(self.params, self._grads)

    def begin(self) -> None:
        super().begin()
        self._is_first = True
        self._sealed: list[int] | None = None
        if self._has_fused:
            self._sum.zero_()  # a layer that writes main_grad itself needs a sum to add to
        self._begun = self._versions()
        if self._watched is not None:
            self._watched = []

    def watches(self) -> list[Watch]:
        self._collect_earlier()
        return super().watches() if self._is_first else []  # later ones are added by autograd

    def add(self) -> None:
        """Store what the first backward left; later ones have been added by autograd already."""
        if self._is_first or self._watched is not None:
            self._settle()
            self._look()

    def arm(self) -> None:
        """Note the version of every slot; autograd's in-place add raises it."""
        self._collect_earlier()
        if not self._is_first:
            self._settle()
            self._armed = self._versions()

    def has_arrived(self, slot: int) -> bool:
        if self._is_first:
            return self.params[slot].grad is not None
        return self._grads[slot]._version != self._armed[slot]

    def seal(self) -> None:
        """Bring every gradient into the sum, inside the backward, and note the version of every slot."""
        self._collect()
        self._sealed = self._versions()

    def late(self) -> list[int]:
        assert self._sealed is not None
        slots = enumerate(zip(self.params, self._grads, self._sealed, strict=True))
        return [
            slot for slot, (param, grad, then) in slots if param.grad is not grad or grad._version != then
        ]

    def parts(self, index: int) -> dict[str, Tensor]:
        (part,) = slots_of(self._sum, [self.bucket.slots[index]])
        return {"sum": part}

    def send(self, inv_count: Tensor | None, comm: Comm, *, poison: bool) -> Work:
        self.to_wire(inv_count)
        return self.send_over(self._over_wire, comm, poison=poison)

    def to_wire(self, inv_count: Tensor | None) -> None:
        """Bring every gradient into the sum, and cast that to the wire with `inv_count` folded in if the wire
        is another buffer.
        """
        if self._sealed is None:
            self._settle()
            self._sealed = self._versions()
        self._look()
        self._note_used(self._sealed)
        if not self._in_place:
            scale = self.one if inv_count is None else inv_count
            self.plan.pack_(self._wire, self._slots, scale)

    def blame(self) -> Callable[[int], list[int] | None]:
        """Name the first micro-batch only: the sum stays non-finite afterwards."""
        watched = self._watched
        return lambda slot: None if watched is None else flagged_in(watched, slot)[:1]

    def _is_used(self, index: int) -> bool:
        self._settle()
        return self.used[index] or self._begun[index] != self._grads[index]._version

    def _rows(self) -> list[Tensor]:
        return self._watched or []

    def _restore(self, rows: Tensor, used: list[bool]) -> None:
        self.used = used
        self._watched = None if self._watched is None else [*rows]
        self._is_first = False
        for param, grad in zip(self.params, self._grads, strict=True):
            param.grad = grad
        self._begun = self._versions()

    def _versions(self) -> list[int]:
        return [grad._version for grad in self._grads]

    def _note_used(self, versions: Sequence[int]) -> None:
        """Note the slots that autograd has added to since the window began or their views were made."""
        self.used = [
            used or begun != now for used, begun, now in zip(self.used, self._begun, versions, strict=True)
        ]

    def _look(self) -> None:
        """Note which slots are not finite after this micro-batch, if they are watched."""
        if self._watched is not None:
            self._watched.append(self._norms.flags(self._slots, self.one))

    def _settle(self) -> None:
        """Bring every gradient into the sum, wherever it and the sum's views lie by now."""
        if not self._is_first:
            self._follow_moved()
        self._collect()

    def _collect_earlier(self) -> None:
        """Bring into the sum what backwards before the micro-batch's last have left, if it is the first."""
        if self._is_first and any(param.grad is not None for param in self.params):
            self._collect()

    def _collect(self) -> None:
        """Bring every gradient into the sum, wherever it lies, and let `.grad` view the sum."""
        for index in pop_written(self.params):
            self._has_fused = self.used[index] = True
            self.params[index].grad = self._grads[index]  # in the sum already: stored onto itself
        if self._is_first:
            for group in self._groups:
                if group.is_first:
                    self._store(group)
            self._is_first = False
        else:
            self._bring_back()

    def _store(self, group: SlotGroup) -> None:
        """Write a group's first gradients over the old sum: a read and a write an element."""
        group.plan.pack_(self._sum, group.gather(self.used), self.one)
        for param, view in zip(group.params, self._grads[group.start : group.stop], strict=True):
            param.grad = view
        group.is_first = False

    def _bring_back(self) -> None:
        """Store gradients that somebody put elsewhere (zero_grad, create_graph, a new tensor) in the sum."""
        grads = [param.grad for param in self.params]
        for index, (param, grad, view) in enumerate(zip(self.params, grads, self._grads, strict=True)):
            if grad is view:
                continue
            if grad is None:
                view.zero_()
                self.used[index], self._begun[index] = False, view._version
            else:
                view.copy_((grad.to_dense() if grad.is_sparse else grad).detach())
            param.grad = view

    def _follow_moved(self) -> None:
        """Make new views of slots whose old ones a cast or move of the model has given other memory."""
        if [grad.data_ptr() for grad in self._grads] == self._addresses:
            return
        moved = list(self._grads)
        self._note_used(self._versions())
        self.bind()
        for index, (old, view) in enumerate(zip(moved, self._grads, strict=True)):
            if old.data_ptr() == self._addresses[index] and self.params[index].grad is old:
                self.params[index].grad = view  # this one has stayed where it was
        self._begun = self._versions()
