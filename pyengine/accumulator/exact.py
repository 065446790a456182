"""Sums that depend on the set of micro-batches alone: not on their order, their ranks, or the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine._exact import ExactSum
from pyengine._pointers import Pointers
from pyengine.accumulator.group import Group
from pyengine.accumulator.grouped import GroupedBucket
from pyengine.host import send
from pyengine.layout import Bucket
from pyengine.norm import FinalPass
from pyengine.wire import Comm, Wire, Work

_USED, _GAVE_UP = 1, 2


@dataclass(frozen=True)
class Exact:
    """accumulator="exact", where the size of a window is not the sum of `accumulate` over the ranks.

    Args:
        micro_batches: of a full window, over all ranks: as many terms as a sum may take, 1 to 4096. The grid depends on
            it, so runs have the same bits only if it is the same; see `pe.Dealer`.
    """

    micro_batches: int


class ExactBucket(GroupedBucket):
    """A bucket of any parameters summed exactly, as integers on a grid that their largest values choose.

    Two rounds: the largest bin of every block over all ranks, with the used flags; then the integers. `.grad` ends as
    views of a buffer of the parameters' type, which for float32 is the memory of the sum.

    Bytes an element: 8.02 for the sum (and 2 for narrow gradients), 20 moved by every micro-batch after the first with
    fp32 gradients, 8.02 on the wire.

    Args:
        terms: micro-batches of a full window, over all ranks.
    """

    num_rounds = 2

    def __init__(
        self, bucket: Bucket, params: Sequence[Parameter], *, terms: int, device: torch.device
    ) -> None:
        super().__init__(bucket, params, device=device)
        self._exact = ExactSum(self.plan, numel=bucket.numel, terms=terms, device=device)
        self._parts = {group.start: self._exact.over(group.plan) for group in self._groups}
        self._sum = self._exact.hi.view(torch.float32)
        self._marks = torch.zeros(self._exact.bins.numel() + len(params), dtype=torch.uint8, device=device)
        self._wire = self._marks
        self._result = self._sum if bucket.dtype == torch.float32 else self.allocate(bucket.dtype)
        self._sum_slots = self.plan.pointers(self.slots(self._sum))
        self._result_slots = self.plan.pointers(self.slots(self._result))
        self._grads = self.views(self._result)
        self.in_place = self._result is self._sum

    def rounds(self, inv_count: Tensor | None, wire: Wire, comm: Comm, *, poison: bool) -> Iterator[Work]:
        """Agree on the bin of every block, then add the integers."""
        del inv_count, wire  # 1/count comes after the sum, which has a wire of its own
        self._take_rest()
        bins = self._marks[: self._exact.bins.numel()]
        bins.copy_(self._exact.bins)
        flags = [_GAVE_UP if poison else _USED * used for used in self._used]
        self._used_flags.copy_(send(flags, torch.uint8, self._marks.device))
        yield comm.all_reduce_max(self._marks)
        self._exact.align_(bins)
        yield comm.all_reduce(self._exact.limbs)

    def from_wire(self, inv_count: Tensor | None, final: FinalPass) -> None:
        """Round the sum once, in place; publish it in the parameters' type with its norm."""
        self._exact.round_(self._sum)
        out = None if self.in_place and inv_count is None else self._result_slots
        self.norm(self._sum_slots, out, self.one if inv_count is None else inv_count, final)
        final.void = torch.where((self._used_flags == _GAVE_UP).any(), float("nan"), final.void)
        used = self._used if all(self._used) else (self._used_flags != 0).tolist()
        for param, grad, keep in zip(self.params, self._grads, used, strict=True):
            param.grad = grad if keep else None

    def scale_(self, scale: Tensor) -> None:
        """Multiply the published gradients in place."""
        self.plan.unpack_(self._result_slots, self._result, scale)

    def parts(self, index: int) -> dict[str, Tensor]:
        slot = self.bucket.slots[index]
        return self._exact.parts(slot.offset, slot.numel)

    @property
    def _used_flags(self) -> Tensor:
        return self._marks[self._exact.bins.numel() :]

    def _accumulate(self, group: Group, grads: Pointers, flags: Tensor) -> None:
        """Take in a group: with fp32 gradients 12 bytes an element first, then 20."""
        self._parts[group.start].deposit_(grads, first=group.is_first, nonfinite=flags)
