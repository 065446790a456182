"""What wires keep of a bucket from one window to the next, and who keeps it for them.

Residuals are kept by parameter: buckets are laid out anew, and states go to other numbers of ranks.
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

_TURNS = 2**20  # of a window: more sums of a bucket than any has


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in a bucket.

    Attributes:
        key: of the parameter, whatever bucket it is in.
        offset, numel: in elements.
        param: the parameter, or this rank's part of it; None where what lies there is none.
    """

    key: Hashable
    offset: int
    numel: int
    param: Tensor | None = None

    def read(self, flat: Tensor) -> Tensor:
        """Return the parameter's part of a residual, `[numel]` in storage order: a view of it, or a copy."""
        return flat[self.offset : self.offset + self.numel]

    def write(self, flat: Tensor, part: Tensor) -> None:
        """Overwrite it by what `read` returned, on any device."""
        flat[self.offset : self.offset + self.numel].copy_(part)

    def of(self, flat: Tensor) -> Tensor:
        """Return its part of a bucket, a view of it in the shape and with the strides of the parameter."""
        if self.param is None:
            return flat[self.offset : self.offset + self.numel]
        begin = flat.storage_offset() + self.offset
        if self.param.is_contiguous():
            return flat[self.offset : self.offset + self.numel].view(self.param.shape)
        return flat.as_strided(self.param.shape, self.param.stride(), begin)


class BucketMemory:
    """What a wire keeps of one bucket; its owner makes it.

    Args:
        number: of the bucket, among those of its owner.
        numel, device: of the bucket, and where it lies.
        places: of its parameters.
        is_last: whether no bucket of a window starts behind it.

    Attributes:
        number, places, is_last: as given.
        turn: of the sum that is sent next; no two sums of a bucket have the same.
        payloads: what the bucket's sums have travelled in.
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
        """Float32 `[numel]`, this object's: what this rank's sums still lack. Zeros at its first use."""
        if self._residual is None:
            self._residual = torch.zeros(self._numel, dtype=torch.float32, device=self._device)
        return self._residual

    def next_turn(self) -> int:
        """Return the turn of a sum that is sent now."""
        self.turn += 1
        return self.turn - 1

    def part(self, key: Hashable) -> Tensor | None:
        """Return a parameter's residual, float32 `[numel]`, this object's or a copy; None if there is
        none.
        """
        return None if self._residual is None else self._place_of[key].read(self._residual)

    def load(self, parts: Mapping[Hashable, Tensor]) -> None:
        """Take over the residuals of those parameters that have one in `parts`."""
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
    """One part of a bucket, as the memory of a bucket; made anew for every sum, and the whole is in its next
    turn then.

    Args:
        whole: of the bucket, whose residual this one's is a view of.
        bounds: elements of the part.
        index, num_parts: of the parts, each of which is a bucket with a number of its own.
    """

    def __init__(self, whole: BucketMemory, bounds: slice, *, index: int, num_parts: int) -> None:
        number = whole.number * num_parts + index
        super().__init__(number, bounds.stop - bounds.start, whole._device, [])
        self.turn, self.payloads = whole.next_turn(), whole.payloads
        self._whole, self._bounds = whole, bounds

    @property
    def residual(self) -> Tensor:
        return self._whole.residual[self._bounds]


@runtime_checkable
class KeepsMemory(Wire, Protocol):
    """A wire that keeps something of a bucket from one window to the next: whoever owns the bucket gives it
    the memory.

    Attributes:
        keeps_residual: whether that is a residual; else it only wants to know the turn, or what its payloads
            travel in.
    """

    @property
    def keeps_residual(self) -> bool: ...

    def for_bucket(self, memory: BucketMemory) -> Wire:
        """Return the wire that sends this one bucket, over all windows."""


def keeps_residual(wire: Wire) -> bool:
    """Whether a wire keeps what it loses."""
    return isinstance(wire, KeepsMemory) and wire.keeps_residual


class WireMemory:
    """What the wires of one owner of buckets keep."""

    def __init__(self) -> None:
        self._memory_of: dict[Hashable, BucketMemory] = {}
        self._loaded: dict[Hashable, Tensor] = {}  # for parameters that no bucket has come with
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
        """Return the wire of a bucket that was laid out: what was kept of its parameters goes on there.

        Args:
            wire: as the user gave it.
            places: of the bucket's parameters.
            numel, device: of the bucket.
            is_last: whether no bucket of a window starts behind it.
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
        """Begin to send a window, which has turns of its own."""
        self._turn = window * _TURNS
        for memory in self._memories():
            memory.turn = self._turn

    def parts(self) -> dict[Hashable, Tensor]:
        """Return the residuals by parameter, float32 `[numel]`, in the memory that wires use, or copies."""
        found = {key: memory.part(key) for key, memory in self._memory_of.items()}
        return self._loaded | {key: part for key, part in found.items() if part is not None}

    def load(self, parts: Mapping[Hashable, Tensor]) -> None:
        """Overwrite all residuals, with zeros where `parts` has none; it is read at once, or kept."""
        _log.debug("load the residuals of %d parameters", len(parts))
        self._loaded = {key: part for key, part in parts.items() if key not in self._memory_of}
        for memory in self._memories():
            memory.clear()
            memory.load(parts)

    def drop(self, is_bad: Tensor) -> None:
        """Let nothing stay of a window if `is_bad`, 0-dim, is not 0; see `BucketMemory.drop`."""
        for memory in self._memories():
            memory.drop(is_bad)
        if self._loaded and (runs_ahead(is_bad.device) or bool(is_bad != 0)):
            # Not in place: what is loaded is the state's.
            self._loaded = {
                key: torch.where(is_bad != 0, 0, part.to(is_bad.device)) for key, part in self._loaded.items()
            }

    def drop_of(self, key: Hashable, is_bad: Tensor) -> None:
        """Do as `drop`, with the bucket that a parameter lies in."""
        self._memory_of[key].drop(is_bad)

    def scale_(self, factor: Tensor) -> None:
        """Multiply all residuals by `factor`, 0-dim."""
        for memory in self._memories():
            memory.scale_(factor)
        if self._loaded and (runs_ahead(factor.device) or float(factor) != 1):
            self._loaded = {key: part.to(factor.device) * factor for key, part in self._loaded.items()}

    def _memories(self) -> list[BucketMemory]:
        return list(dict.fromkeys(self._memory_of.values()))
