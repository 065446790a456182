"""Buckets that accumulate gradients and release them, group by group, from inside the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor
from torch.nn import Parameter

from pyengine.gradients.accumulator.base import BucketAccumulator
from pyengine.gradients.arrival import Watch
from pyengine.gradients.flag_rows import FlagRows
from pyengine.gradients.landed_norms import LandedNorms
from pyengine.gradients.layout import Bucket
from pyengine.gradients.local_part import grad_version
from pyengine.gradients.slot_group import SlotGroup
from pyengine.gradients.slots import Saved
from pyengine.gradients.sums import WindowSum
from pyengine.window.nonfinite import flagged_in

# Which gradient tensor a parameter has, and how often it has been written to.
_Mark = tuple[int, int] | None


class GroupedBucket(BucketAccumulator):
    """A bucket whose sum is not where autograd adds; a kind says by `set_sum` where that is.

    In earlier micro-batches gradients are accumulated about a megabyte at a time: they are still in the
    cache, and no second set of gradients ever exists. The flags of every micro-batch are kept, so a report
    can name it.
    """

    def __init__(self, bucket: Bucket, params: Sequence[Parameter]) -> None:
        super().__init__(bucket, params)
        self._flag_rows = FlagRows(len(self.params), self.device)

    def set_sum(self, total: WindowSum) -> None:
        """Let gradients be accumulated in `total`, a sum over the bucket's plan."""
        self._total = total
        self._over = {group.start: total.over(group.plan) for group in self._groups}

    def begin(self) -> None:
        super().begin()
        self._total.begin()
        self._flag_rows.begin()
        self._sealed: list[_Mark] | None = None
        self._late: list[int] = []
        self._flagged = [self._flag_rows.take()]

    def add(self) -> None:
        """Accumulate what the backward left: groups that never became complete."""
        self._store_rest()
        self._flagged.append(self._flag_rows.take())

    def watches(self) -> list[Watch]:
        self.arm()
        return super().watches()

    def arm(self) -> None:
        """Note what backwards before the micro-batch's last have left: what is there and new has arrived."""
        is_clean = all(param.grad is None for param in self.params)
        self._armed = None if is_clean else list(map(_mark, self.params))

    def has_arrived(self, slot: int) -> bool:
        if self._armed is None:
            return self.params[slot].grad is not None
        return _mark(self.params[slot]) != self._armed[slot]

    def seal(self) -> None:
        """Note which gradients are there: all of them, if the backward has no other one inside it."""
        self._sealed = list(map(_mark, self.params))

    def late(self) -> list[int]:
        if self._sealed is None:
            return self._late + [slot for slot, param in enumerate(self.params) if param.grad is not None]
        return self._changed()

    def sent_tensors(self) -> list[Tensor]:
        return [*super().sent_tensors(), *self._flagged, *self._total.scalars()]

    def unseal(self) -> None:
        """Note, before gradients are accumulated, which of them have changed since `seal`."""
        self._late, self._sealed = self._changed(), None

    def _changed(self) -> list[int]:
        if self._sealed is None:
            return self._late
        pairs = zip(self.params, self._sealed, strict=True)
        return [slot for slot, (param, mark) in enumerate(pairs) if _mark(param) != mark]

    def blame(self) -> Callable[[int], list[int] | None]:
        return partial(flagged_in, self._flagged)

    def from_wire(self, scale: Tensor | None, norms: LandedNorms) -> None:
        super().from_wire(scale, norms)
        for param, grad in zip(self.params, self._grads, strict=True):
            param.grad = grad

    def parts(self, index: int) -> dict[str, Tensor]:
        slot = self.bucket.slots[index]
        return self._total.parts(slot.offset, slot.numel)

    def load(self, saved: Saved, *, done: int) -> None:
        self._total.resume()
        super().load(saved, done=done)

    def _is_used(self, index: int) -> bool:
        return self.used[index]

    def _rows(self) -> list[Tensor]:
        return self._flagged[:-1]

    def _restore(self, rows: Tensor, used: list[bool]) -> None:
        self.used = used
        self._flagged = [*rows, self._flag_rows.take()]
        self._set_first(False)

    def _store_rest(self) -> None:
        for group in self._groups:
            if group.is_first or any(param.grad is not None for param in group.params):
                self._store(group)

    def _store(self, group: SlotGroup) -> None:
        total, flags = self._over[group.start], self._flagged[-1][group.start : group.stop]
        total.deposit_(group.pop(self.used), first=group.is_first, nonfinite=flags)
        group.is_first = False


def _mark(param: Parameter) -> _Mark:
    return None if param.grad is None else (id(param.grad), grad_version(param))
