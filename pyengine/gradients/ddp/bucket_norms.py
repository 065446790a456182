"""Norms and finite flags of DDP's buckets: each is read as it lands, while later ones still travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyengine.gradients.landed_norms import LandedNorms, NormSlots
from pyengine.gradients.param_sums import packed
from pyengine.ops.device import runs_ahead
from pyengine.window.final_pass import FinalPass

# Elements of the narrowest type in the widest access.
PHASE = 8


class BucketNorms:
    """The norms of all of DDP's buckets, as they are laid out now.

    On an accelerator a bucket with a parameter behind one of an odd size is left to whoever reads `.grad`: it
    would be read an element at a time.

    Args:
        index: registration indices of the reduced parameters.
        device: where they lie.
    """

    def __init__(self, index: Mapping[Any, int], device: torch.device) -> None:
        self._index, self._device = index, device
        self._norms = LandedNorms([], device)
        self._places: dict[tuple[int | None, ...], int] = {}
        self._landed: set[int] = set()

    def lay_out(self, buckets: Sequence[Any]) -> None:
        """Get ready for DDP's buckets, whose buffers hold zeros; where no collective is under way.

        Cost: on an accelerator a read of the buffers. What a plan has there is made by its first use, which
        waits for the device: not when a bucket lands, when that would be for the other ranks.
        """
        slots: list[NormSlots] = []
        self._places = {}
        for bucket in buckets:
            params = bucket.parameters()
            places, plan = self._places_of(params), packed([param.numel() for param in params])
            is_even = not runs_ahead(self._device) or all(offset % PHASE == 0 for offset in plan.offsets)
            if is_even and None not in places:
                self._places[places] = len(slots)
                slots.append(NormSlots(plan, [self._index[param] for param in params]))
        self._norms = LandedNorms(slots, self._device)
        if runs_ahead(self._device):
            one = torch.ones((), device=self._device)
            for norms, bucket in ((self.of(bucket), bucket) for bucket in buckets):
                if norms is not None:
                    norms.land_flat(bucket.buffer(), bucket.buffer(), one, writes=False)

    def begin(self) -> None:
        """Start a window: no bucket of it has landed."""
        self._norms.begin()
        self._landed = set()

    def of(self, bucket: Any) -> OneBucket | None:
        """Return what reads a bucket when it lands; None if that is none of those laid out."""
        index = self._places.get(self._places_of(bucket.parameters()))
        if index is None:
            return None
        return OneBucket(self._norms, index, [param.numel() for param in bucket.parameters()], self._landed)

    def settle(self, final: FinalPass) -> bool:
        """Hand over what was read if all buckets have landed in this window and hold every parameter; say
        whether they do.
        """
        num = sum(len(places) for places, index in self._places.items() if index in self._landed)
        if num == len(self._index):
            self._norms.settle(final)
        return num == len(self._index)

    def _places_of(self, params: Sequence[Any]) -> tuple[int | None, ...]:
        return tuple(map(self._index.get, params))


@dataclass(frozen=True)
class OneBucket:
    """One of them, on its way.

    Attributes:
        norms: of all.
        index: of the bucket there.
        numels: of its parameters, which lie in its buffer one after the other.
        landed: indices of those that have; it is added when it does.
    """

    norms: LandedNorms
    index: int
    numels: Sequence[int]
    landed: set[int]

    def land(self, sources: Sequence[Tensor], flat: Tensor, scale: Tensor, *, writes: bool) -> None:
        """Read what has landed once, times `scale`, on whichever thread; with `writes` into the buffer.

        Args:
            sources: one entry a parameter, `[numel]`, read.
            flat: the bucket's buffer, `[numel]`.
            scale: float32, 0-dim.

        Cost: reads one element; with `writes` writes one.
        """
        self.norms.read(self.index, sources, flat.split(self.numels) if writes else None, scale)
        self.landed.add(self.index)

    def land_flat(self, moved: Tensor, flat: Tensor, scale: Tensor, *, writes: bool) -> None:
        """Do as `land` for what has travelled as the buffer lies; `moved`, `[numel]`, may be `flat`."""
        self.land(moved.split(self.numels), flat, scale, writes=writes)
