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
from pyengine.gradients.accumulator.grouped import GroupedBucket
from pyengine.gradients.accumulator.used_flags import FlagsBeside
from pyengine.gradients.exact_sums import Terms, exact_over_ranks
from pyengine.gradients.layout import Bucket


@dataclass(frozen=True)
class Exact:
    """accumulator="exact", where the size of a window is not the sum of `accumulate` over the ranks, or where
    sums need not be exact within a slot.

    Args:
        micro_batches: of a full window, over all ranks.
        slots: in how many slots the window is cut, of equally many neighbouring micro-batches. PyTorch adds
            up the gradients of a slot, in `.grad`, on one rank and in the order of their places; the sum over
            slots is exact. So the bits depend on the number of slots, and are the same on every number of
            ranks that divides it; and a slot costs one deposit, not one a micro-batch. Parameters narrower
            than float32 are refused, which PyTorch would add up in their own type. None: every micro-batch is
            a slot of its own, and which rank computes it is no matter; see `pe.Dealer`.

    The exact sum takes 1 to 4096 slots. Its grid depends on their number, so runs have the same bits only if
    that is the same, too.
    """

    micro_batches: int
    slots: int | None = None

    @property
    def run(self) -> int:
        """Micro-batches of a slot."""
        return 1 if self.slots is None else self.micro_batches // self.slots

    def __str__(self) -> str:
        slots = "" if self.slots is None else f", slots={self.slots!r}"
        return f"Exact(micro_batches={self.micro_batches!r}{slots})"

    __repr__ = __str__


class ExactBucket(GroupedBucket):
    """A bucket of any parameters summed exactly, as integers on a grid that their largest values choose.

    It travels by the rounds of `ExactOverRanks`, the used flags with the first one. `.grad` ends as views of
    a buffer of the parameters' type, which for float32 is the memory of the sum.

    Bytes an element: 8.02 for the sum (and 2 for narrow gradients), 12 moved by the first micro-batch and
    20 by later ones with fp32 gradients; on the wire those of `ExactOverRanks.rounds`.

    Args:
        terms: of a full window.
        comm: by which it travels.
    """

    def __init__(self, bucket: Bucket, params: Sequence[Parameter], *, terms: Terms, comm: Comm) -> None:
        super().__init__(bucket, params)
        self._exact = exact_over_ranks(
            self.plan,
            numel=bucket.numel,
            terms=terms,
            device=self.device,
            comm=comm,
            num_flags=len(params),
        )
        self.set_sum(self._exact)
        self._sum = self._exact.rounded[: bucket.numel]
        result = self._sum if bucket.dtype == torch.float32 else self.allocate(bucket.dtype)
        self.set_buffers(self._sum, result, FlagsBeside(self._exact.flags))

    def send(self, inv_count: Tensor | None, comm: Comm, *, poison: bool) -> Work:
        """Start the rounds of `ExactOverRanks`, behind which `rounded` is the sum."""
        del inv_count, comm  # the one comes after the sum, the other was known before
        self.unseal()
        self._store_rest()
        self.flags.write(self.used, poison=poison)
        return self._exact.rounds()

    def sent_tensors(self) -> list[Tensor]:
        return [*super().sent_tensors(), *self._exact.round_tensors()]
