"""The state of wires, by parameter, for one owner of buckets."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from pyengine.ops.device import runs_ahead
from pyengine.wire.base import Wire
from pyengine.wire.memory import BucketMemory, Place

_log = logging.getLogger("pyengine.wire")

_TURNS = 2**20  # turns of a window: more than a bucket has sums in one


class WireMemory:
    """State of the wires of one owner of buckets."""

    def __init__(self) -> None:
        self._memory_of: dict[Hashable, BucketMemory] = {}
        self._loaded: dict[Hashable, Tensor] = {}  # of parameters that are in no bucket yet
        self._num_made = self._turn = 0

    def wire_for(
        self,
        wire: Wire,
        places: Sequence[Place],
        numel: int,
        device: torch.device,
        *,
        is_last: bool = False,
    ) -> Wire:
        """Return the wire of a new bucket; the residuals of its parameters move there.

        Args:
            wire: as passed by the user.
            places: of the bucket's parameters.
            numel, device: of the bucket.
            is_last: whether it is the last bucket of a window.
        """
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
        """Begin a window, which has turns of its own."""
        self._turn = window * _TURNS
        for memory in self._memories():
            memory.turn = self._turn

    def parts(self) -> dict[Hashable, Tensor]:
        """Return the residuals by parameter, float32 `[numel]`: views of the wires' memory, or copies."""
        found = {key: memory.part(key) for key, memory in self._memory_of.items()}
        return self._loaded | {key: part for key, part in found.items() if part is not None}

    def load(self, parts: Mapping[Hashable, Tensor]) -> None:
        """Overwrite all residuals, with zeros where `parts` has none; `parts` is copied, or kept."""
        _log.debug("load the residuals of %d parameters", len(parts))
        self._loaded = {key: part for key, part in parts.items() if key not in self._memory_of}
        for memory in self._memories():
            memory.clear()
            memory.load(parts)

    def drop(self, is_bad: Tensor) -> None:
        """Set all residuals to zero if `is_bad`, 0-dim, is not 0; see `BucketMemory.drop`."""
        for memory in self._memories():
            memory.drop(is_bad)
        if self._loaded and (runs_ahead(is_bad.device) or bool(is_bad != 0)):
            # Not in place: the loaded tensors belong to the state.
            self._loaded = {
                key: torch.where(is_bad != 0, 0, part.to(is_bad.device)) for key, part in self._loaded.items()
            }

    def drop_of(self, key: Hashable, is_bad: Tensor) -> None:
        """Do as `drop`, for the bucket of one parameter."""
        self._memory_of[key].drop(is_bad)

    def scale_(self, factor: Tensor) -> None:
        """Multiply all residuals by `factor`, 0-dim."""
        for memory in self._memories():
            memory.scale_(factor)
        if self._loaded and (runs_ahead(factor.device) or float(factor) != 1):
            self._loaded = {key: part.to(factor.device) * factor for key, part in self._loaded.items()}

    def _memories(self) -> list[BucketMemory]:
        return list(dict.fromkeys(self._memory_of.values()))
