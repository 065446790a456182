"""Norms and finite flags of DDP's buckets: each is read as it lands, while later ones still travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyengine.gradients.param_sums import packed
from pyengine.gradients.sums import SlotNorms
from pyengine.window.final_pass import FinalPass


class BucketNorms:
    """The norms of one bucket's parameters, which lie in its buffer one after the other.

    Args:
        params: registration indices, in the bucket's order.
        numels: theirs.
        device: where they lie.

    Attributes:
        params: as given.
        has_landed: whether the bucket has, since it was handed out.
    """

    def __init__(self, params: Sequence[int], numels: Sequence[int], device: torch.device) -> None:
        self.params, self._numels = params, numels
        self._norms = SlotNorms(packed(numels), params, device)
        self.has_landed = False

    def land(self, sources: Sequence[Tensor], flat: Tensor, scale: Tensor, *, writes: bool) -> None:
        """Read what has landed once, times `scale`, on whichever thread; with `writes` into the buffer.

        Args:
            sources: one entry a parameter, `[numel]`, read.
            flat: the bucket's buffer, `[numel]`.
            scale: float32, 0-dim.

        Cost: reads one element; with `writes` writes one.
        """
        self._norms.take(sources, flat.split(self._numels) if writes else None, scale)
        self.has_landed = True

    def land_flat(self, moved: Tensor, flat: Tensor, scale: Tensor, *, writes: bool) -> None:
        """Do as `land` for what has travelled as the buffer lies; `moved`, `[numel]`, may be `flat`."""
        self.land(moved.split(self._numels), flat, scale, writes=writes)

    def hand_over(self, final: FinalPass) -> None:
        """Leave in `final` what was read."""
        self._norms.hand_over(final)


class AllBucketNorms:
    """The norms of all of DDP's buckets.

    Args:
        index: registration indices of the reduced parameters.
    """

    def __init__(self, index: Mapping[Any, int]) -> None:
        self._index = index
        self._known: dict[tuple[int, ...], BucketNorms] = {}  # DDP rebuilds its buckets once
        self._handed_out: list[BucketNorms] = []

    def begin(self) -> None:
        """Start a window: no bucket of it has landed."""
        self._handed_out = []

    def of(self, bucket: Any) -> BucketNorms:
        """Return what reads a bucket of this window when it lands."""
        params = bucket.parameters()
        places = tuple(self._index[param] for param in params)
        if places not in self._known:
            numels = [param.numel() for param in params]
            self._known[places] = BucketNorms(places, numels, bucket.buffer().device)
        norms = self._known[places]
        norms.has_landed = False
        self._handed_out.append(norms)
        return norms

    def settle(self, final: FinalPass) -> bool:
        """Hand over what was read as buckets landed; say whether that is every parameter of the window."""
        landed = [norms for norms in self._handed_out if norms.has_landed]
        for norms in landed:
            norms.hand_over(final)
        return sum(len(norms.params) for norms in landed) == len(self._index)
