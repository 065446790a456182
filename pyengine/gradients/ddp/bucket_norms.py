"""Norms and finite flags of DDP's buckets: each is read as it lands, while later ones still travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyengine.gradients.bucket import packed
from pyengine.gradients.norms import LandedNorms, NormSlots
from pyengine.ops.device import runs_ahead
from pyengine.window.final_pass import FinalPass

# Elements of the narrowest type in the widest access.
PHASE = 8


class BucketNorms:
    """The norms of all of DDP's buckets.

    On an accelerator they are laid out before the first lands, and are read and handed over together; a
    bucket with a parameter behind one of an odd size is left to whoever reads `.grad`: it would be read an
    element at a time. On the host each is laid out when it is asked for: DDP shows its buckets only with new
    memory for all of them.

    Args:
        index: registration indices of the reduced parameters.
        device: where they lie.
    """

    def __init__(self, index: Mapping[Any, int], device: torch.device) -> None:
        self._index, self._device = index, device
        self._norms: list[LandedNorms] = []
        self._places: dict[tuple[int | None, ...], tuple[LandedNorms, int]] = {}
        self._landed: set[tuple[int | None, ...]] = set()

    def lay_out(self, buckets: Callable[[], Sequence[Any]]) -> None:
        """Forget the buckets, and get ready for those that DDP has now; where no collective is under way.

        Args:
            buckets: returns them, over buffers of zeros; called on an accelerator only.

        Cost: on an accelerator a read of the buffers. What a plan has there is made by its first use, which
        waits for the device: not when a bucket lands, when that would be for the other ranks.
        """
        self._norms, self._places = [], {}
        if not runs_ahead(self._device):
            return
        laid_out = buckets()
        even = [bucket for bucket in laid_out if self._is_even(bucket)]
        self._add(even)
        one = torch.ones((), dtype=torch.float32, device=self._device)
        for norms, bucket in ((self.of(bucket), bucket) for bucket in even):
            assert norms is not None
            norms.land_flat(bucket.buffer(), bucket.buffer(), one, writes=False)

    def begin(self) -> None:
        """Start a window: no bucket of it has landed."""
        for norms in self._norms:
            norms.begin()
        self._landed = set()

    def of(self, bucket: Any) -> OneBucket | None:
        """Return what reads a bucket when it lands; None if that is not to be."""
        places = self._places_of(bucket.parameters())
        if places not in self._places:
            if runs_ahead(self._device) or None in places:
                return None
            self._add([bucket])
        norms, index = self._places[places]
        numels = [param.numel() for param in bucket.parameters()]
        return OneBucket(norms, index, numels, places, self._landed)

    def settle(self, final: FinalPass) -> bool:
        """Hand over what was read if the buckets that have landed in this window hold every parameter; say
        whether they do.
        """
        if sum(map(len, self._landed)) != len(self._index):
            return False
        for norms in {id(norms): norms for norms, _ in map(self._places.__getitem__, self._landed)}.values():
            norms.copy_to(final)
        return True

    def _is_even(self, bucket: Any) -> bool:
        offsets = packed([param.numel() for param in bucket.parameters()]).offsets
        return None not in self._places_of(bucket.parameters()) and all(x % PHASE == 0 for x in offsets)

    def _add(self, buckets: Sequence[Any]) -> None:
        slots = []
        for bucket in buckets:
            params = bucket.parameters()
            plan = packed([param.numel() for param in params])
            slots.append(NormSlots(plan, [self._index[param] for param in params]))
        norms = LandedNorms(slots, self._device)
        self._norms.append(norms)
        for index, bucket in enumerate(buckets):
            self._places[self._places_of(bucket.parameters())] = norms, index

    def _places_of(self, params: Sequence[Any]) -> tuple[int | None, ...]:
        return tuple(map(self._index.get, params))


@dataclass(frozen=True)
class OneBucket:
    """One of them, on its way.

    Attributes:
        norms: of all.
        index: of the bucket there.
        numels: of its parameters, which lie in its buffer one after the other.
        places: registration indices of its parameters.
        landed: those of buckets that have; its own are added when it does.
    """

    norms: LandedNorms
    index: int
    numels: Sequence[int]
    places: tuple[int | None, ...]
    landed: set[tuple[int | None, ...]]

    def land(self, sources: Sequence[Tensor], flat: Tensor, scale: Tensor, *, writes: bool) -> None:
        """Read what has landed once, times `scale`, on whichever thread; with `writes` into the buffer.

        Args:
            sources: one entry a parameter, `[numel]`, read.
            flat: the bucket's buffer, `[numel]`.
            scale: float32, 0-dim.

        Cost: reads one element; with `writes` writes one.
        """
        self.norms.read(self.index, sources, flat.split(self.numels) if writes else None, scale)
        self.landed.add(self.places)

    def land_flat(self, moved: Tensor, flat: Tensor, scale: Tensor, *, writes: bool) -> None:
        """Do as `land` for what has travelled as the buffer lies; `moved`, `[numel]`, may be `flat`."""
        self.land(moved.split(self.numels), flat, scale, writes=writes)
