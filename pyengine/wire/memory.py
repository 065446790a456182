"""State that wires keep for a bucket from one window to the next.

Residuals are saved by parameter, because bucket layouts change, and states are loaded on other world sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pyengine.ops.device import runs_ahead
from pyengine.wire.base import Wire
from pyengine.wire.payload_memory import PayloadMemory

_log = logging.getLogger("pyengine.wire")

_TURNS = 2**20  # turns of a window: more than a bucket has sums in one


@dataclass(frozen=True)
class Place:
    """Position of a parameter in a bucket.

    Attributes:
        key: identifies the parameter in any bucket.
        offset, numel: in elements.
        param: the parameter, or the part of it on this rank; None for elements of no parameter.
    """

    key: Hashable
    offset: int
    numel: int
    param: Tensor | None = None

    def read(self, flat: Tensor) -> Tensor:
        """Return the residual of the parameter, `[numel]` in storage order: a view, or a copy."""
        return flat[self.offset : self.offset + self.numel]

    def write(self, flat: Tensor, part: Tensor) -> None:
        """Overwrite the residual of the parameter with a result of `read`, from any device."""
        flat[self.offset : self.offset + self.numel].copy_(part)

    def of(self, flat: Tensor) -> Tensor:
        """Return the parameter's elements of a bucket, a view with the parameter's shape and strides."""
        if self.param is None:
            return flat[self.offset : self.offset + self.numel]
        begin = flat.storage_offset() + self.offset
        if self.param.is_contiguous():
            return flat[self.offset : self.offset + self.numel].view(self.param.shape)
        return flat.as_strided(self.param.shape, self.param.stride(), begin)


class BucketMemory:
    """State that a wire keeps for one bucket; the owner of the bucket makes it.

    Args:
        number: of the bucket, unique for its owner.
        numel, device: of the bucket.
        places: of its parameters.
        is_last: whether it is the last bucket of a window.

    Attributes:
        number, places, is_last: as given.
        turn: number of the next sum; no two sums of a bucket have the same.
        payloads: buffers of the bucket's sums.
    """

    def __init__(
        self,
        number: int,
        numel: int,
        device: torch.device,
        places: Sequence[Place],
        *,
        is_last: bool = False,
    ) -> None:
        self.number, self.turn, self.places, self.is_last = number, 0, list(places), is_last
        self.payloads = PayloadMemory()
        self._numel, self._device = numel, device
        self._place_of = {place.key: place for place in places}
        self._residual: Tensor | None = None

    @property
    def residual(self) -> Tensor:
        """Rounding error to be added to the next sum, float32 `[numel]`; zeros at first. Owned by this."""
        if self._residual is None:
            self._residual = torch.zeros(self._numel, dtype=torch.float32, device=self._device)
        return self._residual

    def next_turn(self) -> int:
        """Return the turn of the current sum, and advance it."""
        self.turn += 1
        return self.turn - 1

    def part(self, key: Hashable) -> Tensor | None:
        """Return the residual of a parameter, float32 `[numel]`, a view or a copy; None if there is none."""
        return None if self._residual is None else self._place_of[key].read(self._residual)

    def load(self, parts: Mapping[Hashable, Tensor]) -> None:
        """Overwrite the residuals of the parameters that are in `parts`."""
        for key, place in self._place_of.items():
            if key in parts:
                place.write(self.residual, parts[key])

    def clear(self) -> None:
        """Set the residual to zero."""
        if self._residual is not None:
            self._residual.zero_()

    def drop(self, is_bad: Tensor) -> None:
        """Set the residual to zero if `is_bad`, 0-dim, is not 0.

        Cost: on an accelerator a read and a write of the residual; on the host nothing if it is 0.
        """
        if self._residual is None:
            return
        if runs_ahead(self._device):
            self._residual.masked_fill_(is_bad != 0, 0)
        elif bool(is_bad != 0):
            self._residual.zero_()

    def scale_(self, factor: Tensor) -> None:
        """Multiply the residual by `factor`, 0-dim."""
        if self._residual is not None and (runs_ahead(self._device) or float(factor) != 1):
            self._residual.mul_(factor)


class BucketPart(BucketMemory):
    """Memory of one part of a bucket. Made for every sum, which advances the turn of the whole.

    Args:
        whole: memory of the bucket; the residual of the part is a view of its residual.
        bounds: elements of the part.
        index, num_parts: of the parts; each part has a bucket number of its own.
    """

    def __init__(self, whole: BucketMemory, bounds: slice, *, index: int, num_parts: int) -> None:
        number = whole.number * num_parts + index
        super().__init__(number, bounds.stop - bounds.start, whole._device, [])  # noqa: SLF001 - of the same class
        self.turn, self.payloads = whole.next_turn(), whole.payloads
        self._whole, self._bounds = whole, bounds

    @property
    def residual(self) -> Tensor:
        return self._whole.residual[self._bounds]


@runtime_checkable
class KeepsMemory(Wire, Protocol):
    """A wire that keeps state for a bucket from one window to the next, in memory of the bucket's owner.

    Attributes:
        keeps_residual: whether the state includes a residual; otherwise it is the turn, or buffers.
    """

    @property
    def keeps_residual(self) -> bool: ...

    def for_bucket(self, memory: BucketMemory) -> Wire:
        """Return the wire that sends this one bucket, in all windows."""


def keeps_residual(wire: Wire) -> bool:
    """Whether a wire keeps its rounding error."""
    return isinstance(wire, KeepsMemory) and wire.keeps_residual


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
        if not isinstance(wire, KeepsMemory):
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
