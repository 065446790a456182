"""What a wire is."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work


class Wire(Protocol):
    """Owns how one flat bucket is summed over ranks.

    Attributes:
        dtype: element type on the network; the engine hands over a flat buffer of this type.
        folds_count: whether 1/count is multiplied in before the values become this type (narrow types: it
            keeps sums in range and costs no pass). Otherwise the engine applies it after the sum.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def folds_count(self) -> bool: ...

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        """Start summing a bucket over all ranks, in place; every rank ends with the same bits.

        Args:
            flat: of `dtype`, `[numel]`; the engine's memory, which stays alive until the work has been waited
                for.
            comm: transport.

        Returns:
            A work that is done when the sum stands in `flat`.

        Cost: `bytes_on_wire` sent by every rank.
        """

    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        """Return the bytes that one rank sends for a bucket of `numel` elements."""
