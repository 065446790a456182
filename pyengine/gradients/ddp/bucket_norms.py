"""Norms and finite flags of DDP's buckets, read as each is reduced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyengine.gradients.bucket import packed
from pyengine.gradients.norms import ReducedNorms
from pyengine.ops.device import runs_ahead
from pyengine.window.final_pass import FinalPass

# Elements of the narrowest dtype in the widest memory access.
PHASE = 8


class BucketNorms:
    """The norms of all of DDP's buckets.

    On an accelerator they are laid out before the first bucket is reduced, and copied to `FinalPass`
    together. A bucket in which a parameter follows one of odd size is left out there, since it would be read
    an element at a time; `Published` reads its `.grad`. On the host each bucket is laid out at its first use:
    DDP returns its buckets only with new memory for all of them.
    """

    def __init__(self, index: Mapping[Any, int], device: torch.device) -> None:
        self._index, self._device = index, device
        self._norms: list[ReducedNorms] = []
        self._by_indices: dict[tuple[int | None, ...], tuple[ReducedNorms, int]] = {}
        self._were_read: set[tuple[int | None, ...]] = set()

    def lay_out(self, buckets: Callable[[], Sequence[Any]]) -> None:
        """Lay the norms out for the buckets that DDP has now, over buffers of zeros.

        Called while no collective is running. On an accelerator the first use of a plan allocates its memory
        and waits for the device. Here it does not make other ranks wait, as it would once a bucket has been
        reduced.
        """
        self._norms, self._by_indices = [], {}
        if not runs_ahead(self._device):
            return
        laid_out = buckets()
        even = [bucket for bucket in laid_out if self._is_even(bucket)]
        self._add(even)
        one = torch.ones((), dtype=torch.float32, device=self._device)
        for norms, bucket in ((self.of(bucket), bucket) for bucket in even):
            assert norms is not None
            norms.read_flat(bucket.buffer(), bucket.buffer(), one, writes=False)

    def begin(self) -> None:
        for norms in self._norms:
            norms.begin()
        self._were_read = set()

    def of(self, bucket: Any) -> NormsOfBucket | None:
        """Return the norms of a bucket; None if `Published` is to read it."""
        indices = self._indices_of(bucket.parameters())
        if indices not in self._by_indices:
            if runs_ahead(self._device) or None in indices:
                return None
            self._add([bucket])
        norms, index = self._by_indices[indices]
        numels = [param.numel() for param in bucket.parameters()]
        return NormsOfBucket(norms, index, numels, indices, self._were_read)

    def copy_if_complete(self, final: FinalPass) -> bool:
        """Copy the norms to `final` if every parameter was read in this window; return whether it was."""
        if sum(map(len, self._were_read)) != len(self._index):
            return False
        for norms in {self._by_indices[indices][0] for indices in self._were_read}:
            norms.copy_to(final)
        return True

    def _is_even(self, bucket: Any) -> bool:
        offsets = packed([param.numel() for param in bucket.parameters()]).offsets
        return None not in self._indices_of(bucket.parameters()) and all(x % PHASE == 0 for x in offsets)

    def _add(self, buckets: Sequence[Any]) -> None:
        slots = []
        for bucket in buckets:
            params = bucket.parameters()
            plan = packed([param.numel() for param in params])
            slots.append((plan, [self._index[param] for param in params]))
        norms = ReducedNorms(slots, self._device)
        self._norms.append(norms)
        for index, bucket in enumerate(buckets):
            self._by_indices[self._indices_of(bucket.parameters())] = norms, index

    def _indices_of(self, params: Sequence[Any]) -> tuple[int | None, ...]:
        return tuple(map(self._index.get, params))


@dataclass(frozen=True)
class NormsOfBucket:
    """The norms of one bucket that is being reduced."""

    norms: ReducedNorms
    index: int  # of the bucket in `norms`
    numels: Sequence[int]  # of the bucket's parameters, whose slots follow each other without gaps
    indices: tuple[int | None, ...]  # of the bucket's parameters, in registration order
    were_read: set[tuple[int | None, ...]]  # the `indices` of all buckets read in this window

    def read(self, sources: Sequence[Tensor], flat: Tensor, scale: Tensor, *, writes: bool) -> None:
        """Read the reduced bucket once, one source a parameter, times `scale`; on any thread.

        `writes` writes the product to `flat`, the bucket's buffer.
        """
        self.norms.read(self.index, sources, flat.split(self.numels) if writes else None, scale)
        self.were_read.add(self.indices)

    def read_flat(self, sent: Tensor, flat: Tensor, scale: Tensor, *, writes: bool) -> None:
        """Do as `read`, for a buffer `sent` of the same layout as `flat`; it may be `flat`."""
        self.read(sent.split(self.numels), flat, scale, writes=writes)
