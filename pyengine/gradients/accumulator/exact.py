"""Sums that depend on the set of micro-batches alone: not on their order, their ranks,
or the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.comm.base import Comm, Work
from pyengine.comm.staged import Staged
from pyengine.gradients.accumulator.grouped import GroupedBucket
from pyengine.gradients.accumulator.used_flags import FlagsBeside
from pyengine.gradients.layout import Bucket
from pyengine.gradients.sums import ExactOverRanks
from pyengine.window.final_pass import FinalPass


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

    def __init__(self, bucket: Bucket, params: Sequence[Parameter], *, terms: int) -> None:
        super().__init__(bucket, params)
        self._exact = ExactOverRanks(
            self.plan, numel=bucket.numel, terms=terms, device=self.one.device, num_flags=len(params)
        )
        self.set_sum(self._exact)
        self._sum = self._exact.hi.view(torch.float32)
        self.in_place = bucket.dtype == torch.float32
        result = self._sum if self.in_place else self.allocate(bucket.dtype)
        self.set_buffers(self._sum, result, FlagsBeside(self._exact.flags))

    def send(self, inv_count: Tensor | None, comm: Comm, *, poison: bool) -> Work:
        """Agree on the bin of every block, then add the integers: as `ExactOverRanks.rounds`."""
        del inv_count  # it comes after the sum
        self.unseal()
        self._store_rest()
        self.flags.write(self._used, poison=poison)
        return Staged(self._exact.rounds(comm), self._exact.num_rounds, self.one.device)

    def sent_tensors(self) -> list[Tensor]:
        return [*super().sent_tensors(), *self._exact.round_tensors()]

    def from_wire(self, inv_count: Tensor | None, final: FinalPass) -> None:
        """Round the sum once, in place, before it is published: 12 bytes an element more."""
        self._exact.rounded_()
        super().from_wire(inv_count, final)
