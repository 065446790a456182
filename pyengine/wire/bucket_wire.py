"""A wire of one bucket, with the state that it keeps from one window to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work
from pyengine.wire.base import Encoding, Wire
from pyengine.wire.exchange import Rounding, scatter_sum, sum_encoded
from pyengine.wire.memory import BucketMemory

_LAST = 2**64 - 1


_W = TypeVar("_W", bound=Wire)


@dataclass(frozen=True)
class OfBucket(Wire, Generic[_W]):
    """A wire of one bucket, with the attributes of the user's wire.

    Attributes:
        wire: as passed by the user.
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
        return self.wire.is_encoded

    @property
    def needs_exchange(self) -> bool:
        return self.wire.needs_exchange

    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        return self.wire.bytes_on_wire(numel, world_size)


@dataclass(frozen=True)
class BucketWire(OfBucket[Wire]):
    """One float32 bucket over an encoding wire that keeps state for it.

    Attributes:
        encodes_as: how values are encoded.
        keeps_residual: whether the encoding error is kept, and added to the values of the next sum.
    """

    encodes_as: Encoding
    keeps_residual: bool = False

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        rounding = self._next_rounding(comm)
        return sum_encoded(flat, comm, self.encodes_as.codec, rounding, memory=self.memory.payloads)

    def reduce_scatter(self, out: Tensor, parts: Tensor, comm: Comm) -> None:
        """Reduce-scatter a bucket of the size of the memory; see `Wire.reduce_scatter`."""
        scatter_sum(out, parts, comm, self.encodes_as.codec, self._next_rounding(comm))

    def _next_rounding(self, comm: Comm) -> Rounding:
        """Return the rounding of the next sum."""
        seeds = self._seed(comm.rank, 0), self._seed(comm.rank, 1)
        self.memory.next_turn()
        is_kept = self.keeps_residual and comm.world_size > 1
        return Rounding(self.memory.residual if is_kept else None, seeds)

    def _seed(self, rank: int, stage: int) -> int | None:
        """Return a seed unique to this rank, bucket, window and encoding; None to round to nearest."""
        seed = self.encodes_as.seed
        if seed is None:
            return None
        for word in (self.memory.turn, self.memory.number, rank, stage):
            seed = _mixed(seed ^ word)
        return seed - 2**63


def _mixed(word: int) -> int:
    """Return 64 mixed bits (splitmix64; Steele, Lea, Flood 2014)."""
    z = (word + 0x9E3779B97F4A7C15) & _LAST
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _LAST
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _LAST
    return z ^ (z >> 31)


def without_memory(wire: Wire) -> RuntimeError:
    """Return the error of a wire that keeps state for each bucket, and was given no memory for it."""
    return RuntimeError(
        f"wire={wire}: it keeps state for every bucket from one window to the next, and was given no memory "
        "for it: a wire around it needs for_bucket(memory), too, and has to use the wire that this returns"
    )
