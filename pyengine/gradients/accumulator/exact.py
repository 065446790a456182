"""Sums that depend on the set of micro-batches alone: not on their order, their ranks,
or the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.comm.base import Comm, Work
from pyengine.gradients.accumulator.grouped import GroupedBucket
from pyengine.gradients.layout import Bucket
from pyengine.gradients.sums import ExactOverRanks
from pyengine.ops.device import send
from pyengine.window.final_pass import FinalPass
from pyengine.wire import Wire

_USED, _GAVE_UP = 1, 2


@dataclass(frozen=True)
class Exact:
    """accumulator="exact", where the size of a window is not the sum of `accumulate` over the ranks.

    Args:
        micro_batches: of a full window, over all ranks: as many terms as a sum may take, 1 to 4096. The grid
            depends on it, so runs have the same bits only if it is the same; see `pe.Dealer`.
    """

    micro_batches: int


class ExactBucket(GroupedBucket):
    """A bucket of any parameters summed exactly, as integers on a grid that their largest values choose.

    Two rounds: the largest bin of every block over all ranks, with the used flags; then the integers. `.grad`
    ends as views of a buffer of the parameters' type, which for float32 is the memory of the sum.

    Bytes an element: 8.02 for the sum (and 2 for narrow gradients), 12 moved by the first micro-batch and
    20 by later ones with fp32 gradients, 8.02 on the wire.

    Args:
        terms: micro-batches of a full window, over all ranks.
    """

    num_rounds = 2

    def __init__(self, bucket: Bucket, params: Sequence[Parameter], *, terms: int) -> None:
        super().__init__(bucket, params)
        self._exact = ExactOverRanks(
            self.plan, numel=bucket.numel, terms=terms, device=self.one.device, num_flags=len(params)
        )
        self.set_sum(self._exact)
        self._sum = self._exact.hi.view(torch.float32)
        self.in_place = bucket.dtype == torch.float32
        self.set_buffers(self._sum, self._sum if self.in_place else self.allocate(bucket.dtype))

    def rounds(self, inv_count: Tensor | None, wire: Wire, comm: Comm, *, poison: bool) -> Iterator[Work]:
        """Agree on the bin of every block, then add the integers: as `ExactOverRanks.rounds`."""
        del inv_count, wire  # 1/count comes after the sum, which has a wire of its own
        self.unseal()
        self._store_rest()
        flags = [_GAVE_UP if poison else _USED * used for used in self._used]
        self._exact.flags.copy_(send(flags, torch.uint8, self.one.device))
        yield from self._exact.rounds(comm)

    def round_tensors(self) -> list[Tensor]:
        return [*super().round_tensors(), *self._exact.round_tensors()]

    def from_wire(self, inv_count: Tensor | None, final: FinalPass) -> None:
        """Round the sum once, in place, before it is published: 12 bytes an element more."""
        self._exact.rounded_()
        super().from_wire(inv_count, final)

    def void(self, before: Tensor) -> Tensor:
        return torch.where((self._landed_flags() == _GAVE_UP).any(), float("nan"), before)

    def _landed_flags(self) -> Tensor:
        return self._exact.flags
