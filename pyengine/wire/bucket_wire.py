"""A wire of one bucket, with what is kept of it from one window to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work
from pyengine.wire.base import Wire, is_encoded
from pyengine.wire.exchange import Encoding, Rounding, scatter_sum, sum_encoded
from pyengine.wire.memory import BucketMemory

_LAST = 2**64 - 1


_W = TypeVar("_W", bound=Wire)


@dataclass(frozen=True)
class OfBucket(Generic[_W]):
    """A wire of one bucket: what it says of itself is what the user's says.

    Attributes:
        wire: as the user gave it.
        memory: of the bucket.
    """

    wire: _W
    memory: BucketMemory

    @property
    def dtype(self) -> torch.dtype:
        return self.wire.dtype

    @property
    def folds_count(self) -> bool:
        return self.wire.folds_count

    @property
    def is_encoded(self) -> bool:
        return is_encoded(self.wire)

    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        return self.wire.bytes_on_wire(numel, world_size)


@dataclass(frozen=True)
class BucketWire(OfBucket[Wire]):
    """Float32 buckets, encoded, over a wire that keeps something of them.

    Attributes:
        encoding: how values become bytes.
        keeps_residual: whether what the bytes lose is kept, and added to the next values.
    """

    encoding: Encoding
    keeps_residual: bool = False

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        rounding = self._next_rounding(comm)
        return sum_encoded(flat, comm, self.encoding.codec, rounding, memory=self.memory.payloads)

    def reduce_scatter(self, out: Tensor, parts: Tensor, comm: Comm) -> None:
        """Sum the parts of a bucket as large as the memory; see `Scatters.reduce_scatter`."""
        scatter_sum(out, parts, comm, self.encoding.codec, self._next_rounding(comm))

    def _next_rounding(self, comm: Comm) -> Rounding:
        """Return how a sum is rounded that is sent now."""
        seeds = self._seed(comm.rank, 0), self._seed(comm.rank, 1)
        self.memory.next_turn()
        is_kept = self.keeps_residual and comm.world_size > 1
        return Rounding(self.memory.residual if is_kept else None, seeds)

    def _seed(self, rank: int, stage: int) -> int | None:
        """Return a seed that no other rank, bucket, window or encoding has; None to round to nearest."""
        seed = self.encoding.seed
        if seed is None:
            return None
        for word in (self.memory.turn, self.memory.number, rank, stage):
            seed = _mixed(seed ^ word)
        return seed - 2**63


def _mixed(word: int) -> int:
    """Return 64 bits without pattern (splitmix64; Steele, Lea, Flood 2014)."""
    z = (word + 0x9E3779B97F4A7C15) & _LAST
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _LAST
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _LAST
    return z ^ (z >> 31)


def without_memory(wire: Wire) -> RuntimeError:
    """Return what to raise where a wire that keeps something was given no memory."""
    return RuntimeError(
        f"wire={wire}: it keeps something of every bucket from one window to the next, and was given no "
        "memory for it: a wire around it needs for_bucket(memory), too, and has to pass on what that returns"
    )
