"""The state that a wire keeps for one bucket between windows.

Residuals are stored by parameter, because bucket layouts change.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyengine.ops.device import runs_ahead


@dataclass(frozen=True)
class BucketSlice:
    """The position of a parameter in a bucket, in elements."""

    key: Hashable  # identifies the parameter in any bucket
    offset: int
    numel: int
    param: Tensor | None = None  # parameter or this rank's shard; None for padding

    def read(self, flat: Tensor) -> Tensor:
        """Return the parameter's residual as `[numel]`, in storage order; the result is a view or a copy."""
        return flat[self.offset : self.offset + self.numel]

    def write(self, flat: Tensor, part: Tensor) -> None:
        """Overwrite the residual of the parameter with a result of `read`, from any device."""
        flat[self.offset : self.offset + self.numel].copy_(part)

    def of(self, flat: Tensor) -> Tensor:
        """Return the parameter's elements in a bucket, as a view with the parameter's shape and strides."""
        if self.param is None:
            return self.read(flat)
        begin = flat.storage_offset() + self.offset
        return flat.as_strided(self.param.shape, self.param.stride(), begin)


class PayloadMemory:
    """The buffers of one bucket for the collectives of a sum.

    A sum allocates buffers, and frees them after its last collective. If a sum fails, its buffers are never
    freed, because a collective may still use them; the next sum then gets new memory. On an accelerator, no
    buffers are kept, because the allocator caches freed memory per stream and there are no page faults.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Tensor] = {}

    def allocate(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        """Return a buffer, uint8 `[num_bytes]`, which the caller owns until `free`.

        A new buffer is filled with zeros. If a buffer of this name and size was freed, it is reused with its
        old values.
        """
        kept = self._kept.pop((name, num_bytes), None)
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device) if kept is None else kept

    def free(self, **buffers: Tensor) -> None:
        """Keep buffers for the next sum; no collective may still be using them."""
        for name, buffer in buffers.items():
            if not runs_ahead(buffer.device):
                self._kept[name, buffer.numel()] = buffer


class BucketMemory:
    """The state that a wire keeps for one bucket; created by the owner of the bucket.

    Args:
        number: number of the bucket, unique per owner.
        numel, device: number of elements and device of the bucket.
        places: positions of the bucket's parameters.
        is_last: whether this is the last bucket of a window.

    Attributes:
        number, places, is_last: see Args.
        turn: number of the next sum, unique among the sums of a bucket.
        payloads: buffers of the bucket's sums.
    """

    def __init__(
        self,
        number: int,
        numel: int,
        device: torch.device,
        places: Sequence[BucketSlice],
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
        """Rounding error to be added to the next sum, float32 `[numel]`; initially zero."""
        if self._residual is None:
            self._residual = torch.zeros(self._numel, dtype=torch.float32, device=self._device)
        return self._residual

    def next_turn(self) -> int:
        """Return the number of the current sum, and increment the number for the next sum."""
        self.turn += 1
        return self.turn - 1

    def part(self, key: Hashable) -> Tensor | None:
        """Return a parameter's residual, float32 `[numel]`, as a view or a copy; None if there is none."""
        return None if self._residual is None else self._place_of[key].read(self._residual)

    def load(self, parts: Mapping[Hashable, Tensor]) -> None:
        """Overwrite the residuals, with zeros for parameters not in `parts`."""
        if self._residual is not None:
            self._residual.zero_()
        for key, place in self._place_of.items():
            if key in parts:
                place.write(self.residual, parts[key])

    def drop(self, is_bad: Tensor) -> None:
        """Set the residual to zero if the 0-dim `is_bad` is not 0.

        Cost: on an accelerator, one read and one write of the residual; on the CPU, nothing if `is_bad` is 0.
        """
        if self._residual is None:
            return
        if runs_ahead(self._device):
            self._residual.masked_fill_(is_bad != 0, 0)
        elif bool(is_bad != 0):
            self._residual.zero_()

    def scale_(self, factor: Tensor) -> None:
        """Multiply the residual by the 0-dim `factor`."""
        if self._residual is not None and (runs_ahead(self._device) or float(factor) != 1):
            self._residual.mul_(factor)
