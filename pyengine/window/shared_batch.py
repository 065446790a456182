"""Ranks that share a batch: one of them counts it, and all of them must have the same count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A header's numbers are summed as float64: pieces of 20 bits, times the ranks that share, stay exact.
_PIECE_BITS = 20
NUM_LANES = 3
# Odd, and without pattern in their bits: splitmix64's (Steele, Lea, Flood 2014), as signed numbers.
_GOLDEN, _MIX, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


@dataclass(frozen=True)
class SharedBatch:
    """The batch that this rank computes together with others, for example under tensor parallelism."""

    index: int  # which batch
    num_ranks: int  # how many share each
    speaks: bool  # whether this rank counts the batch; one of them does

    def lanes(self, numbers: Tensor) -> Tensor:
        """Return what is 0 when summed over all ranks if ranks of one batch have the same numbers.

        The result is float64 `[NUM_LANES]`, whole numbers of 20 bits times `num_ranks`. Where numbers,
        float64 `[n]`, differ all lanes are 0 once in 2^60: every batch mixes its bits in another way, so that
        one difference does not take away another.
        """
        mixed = torch.full((), self.index + 1, dtype=torch.int64, device=numbers.device) * _GOLDEN
        for bits in numbers.contiguous().view(torch.int64):
            mixed = _mix(mixed ^ bits)
        pieces = [mixed >> _PIECE_BITS * lane & 2**_PIECE_BITS - 1 for lane in range(NUM_LANES)]
        weight = 1 - self.num_ranks if self.speaks else 1
        return torch.stack(pieces).double() * weight


def _mix(value: Tensor) -> Tensor:
    value = (value ^ (value >> 30 & 2**34 - 1)) * _MIX
    value = (value ^ (value >> 27 & 2**37 - 1)) * _MIX_2
    return value ^ (value >> 31 & 2**33 - 1)
