"""Wires of single buckets, with the state that they keep between windows."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work
from pyengine.ops import capture
from pyengine.ops.codec import mixed
from pyengine.ops.device import runs_ahead
from pyengine.wire.base import Encoding, Wire
from pyengine.wire.exchange import Rounding, scatter_sum, sum_encoded
from pyengine.wire.memory import BucketMemory, BucketSlice

_log = logging.getLogger("pyengine.wire")

_TURNS = 2**20  # numbers reserved for the sums of a window; a bucket has fewer sums in a window

_W = TypeVar("_W", bound=Wire)


@dataclass(frozen=True)
class OfBucket(Wire, Generic[_W]):
    """The wire of one bucket, with the attributes of the wire that the user passed."""

    wire: _W  # wire that the user passed
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
    """The wire of one bucket, which exchanges parts and can keep a residual for error feedback."""

    encodes_as: Encoding

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        rounding = self._next_rounding(comm)
        return sum_encoded(flat, comm, self.encodes_as.codec, rounding, memory=self.memory.payloads)

    def reduce_scatter(self, out: Tensor, parts: Tensor, comm: Comm) -> None:
        if not self.wire.is_encoded:
            return self.wire.reduce_scatter(out, parts, comm)
        scatter_sum(out, parts, comm, self.encodes_as.codec, self._next_rounding(comm))

    def _next_rounding(self, comm: Comm) -> Rounding:
        seeds = self._seed(comm.rank, 0), self._seed(comm.rank, 1)
        self.memory.next_turn()
        is_kept = self.wire.keeps_residual and comm.world_size > 1
        return Rounding(self.memory.residual if is_kept else None, seeds)

    def _seed(self, rank: int, stage: int) -> int | None:
        """Return a seed unique to this rank, bucket, window and encoding, or None to round to nearest."""
        seed = self.encodes_as.seed
        if seed is None:
            return None
        capture.report(
            "a stochastic wire draws different random numbers in every window, from a seed on the host"
        )
        for word in (self.memory.turn, self.memory.number, rank, stage):
            seed = mixed(seed ^ word)
        return seed - 2**63


def without_memory(wire: Wire) -> RuntimeError:
    """Return the error for a wire that keeps state per bucket but has no memory for it."""
    return RuntimeError(
        f"wire={wire}: this wire keeps state per bucket between windows, but has no memory for it. A wire "
        "that wraps this one must also implement for_bucket(memory), and use the wire that this wire's "
        "for_bucket(memory) returns"
    )


class WireMemory:
    """The state of all wires of one owner of buckets."""

    def __init__(self) -> None:
        self._memory_of: dict[Hashable, BucketMemory] = {}
        self._loaded: dict[Hashable, Tensor] = {}  # residuals of parameters that are not in a bucket yet
        self._num_made = self._turn = 0

    def wire_for(
        self,
        wire: Wire,
        places: Sequence[BucketSlice],
        numel: int,
        device: torch.device,
        *,
        is_last: bool = False,
    ) -> Wire:
        """Return the wire of a new bucket, and move the residuals of its parameters to this wire."""
        if not wire.keeps_memory:
            return wire
        memory = BucketMemory(self._num_made, numel, device, places, is_last=is_last)
        memory.turn = self._turn
        if wire.keeps_residual:
            memory.load(self.parts())
        for place in places:
            self._memory_of[place.key] = memory
            self._loaded.pop(place.key, None)
        self._num_made += 1
        return wire.for_bucket(memory)

    def begin(self, window: int) -> None:
        """Start a window, and reserve numbers for its sums that no other window uses."""
        self._turn = window * _TURNS
        for memory in self._memories():
            memory.turn = self._turn

    def parts(self) -> dict[Hashable, Tensor]:
        """Return the residual of each parameter, float32 `[numel]`: a view of a wire's memory, or a copy."""
        found = {key: memory.part(key) for key, memory in self._memory_of.items()}
        return self._loaded | {key: part for key, part in found.items() if part is not None}

    def load(self, parts: Mapping[Hashable, Tensor]) -> None:
        """Overwrite all residuals with copies of `parts`, or with zeros for parameters not in `parts`.

        For parameters that are not in a bucket yet, the tensors themselves are kept.
        """
        _log.debug("load the residuals of %d parameters", len(parts))
        self._loaded = {key: part for key, part in parts.items() if key not in self._memory_of}
        for memory in self._memories():
            memory.load(parts)

    def drop(self, is_bad: Tensor) -> None:
        """Set all residuals to zero if the 0-dim `is_bad` is not 0; see `BucketMemory.drop`."""
        for memory in self._memories():
            memory.drop(is_bad)
        if self._loaded and (runs_ahead(is_bad.device) or bool(is_bad != 0)):
            # Not in place, because the loaded tensors belong to the loaded state dict.
            self._loaded = {
                key: torch.where(is_bad != 0, 0, part.to(is_bad.device)) for key, part in self._loaded.items()
            }

    def drop_of(self, key: Hashable, is_bad: Tensor) -> None:
        self._memory_of[key].drop(is_bad)

    def scale_(self, factor: Tensor) -> None:
        """Multiply all residuals by the 0-dim `factor`."""
        for memory in self._memories():
            memory.scale_(factor)
        if self._loaded and (runs_ahead(factor.device) or float(factor) != 1):
            self._loaded = {key: part.to(factor.device) * factor for key, part in self._loaded.items()}

    def _memories(self) -> list[BucketMemory]:
        return list(dict.fromkeys(self._memory_of.values()))
