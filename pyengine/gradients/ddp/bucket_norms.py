"""Norms and finite flags of DDP's buckets, read as each is reduced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyengine.gradients.bucket import packed
from pyengine.gradients.norms import ReducedNorms
from pyengine.ops.device import runs_ahead
from pyengine.window.final_pass import FinalPass

# Reads a reduced bucket once, on any thread. Arguments: the sources, one a parameter, or all of them in one
# buffer in the layout of the bucket; the bucket's buffer, into which the product is written, or None; the
# scale, float32, 0-dim.
ReadNorms = Callable[[Tensor | Sequence[Tensor], Tensor | None, Tensor], None]

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
        for bucket in even:
            read = self.of(bucket)
            assert read is not None
            read(bucket.buffer(), None, one)

    def begin(self) -> None:
        for norms in self._norms:
            norms.begin()
        self._were_read = set()

    def of(self, bucket: Any) -> ReadNorms | None:
        """Return the function that reads a bucket in this window; None if `Published` is to read it."""
        indices = self._indices_of(bucket.parameters())
        if indices not in self._by_indices:
            if runs_ahead(self._device) or None in indices:
                return None
            self._add([bucket])
        norms, index = self._by_indices[indices]
        numels, were_read = [param.numel() for param in bucket.parameters()], self._were_read

        def read(sources: Tensor | Sequence[Tensor], out: Tensor | None, scale: Tensor) -> None:
            slots = sources.split(numels) if isinstance(sources, Tensor) else sources
            norms.read(index, slots, None if out is None else out.split(numels), scale)
            were_read.add(indices)

        return read

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
        params = [bucket.parameters() for bucket in buckets]
        slots = [(packed([p.numel() for p in each]), [self._index[p] for p in each]) for each in params]
        norms = ReducedNorms(slots, self._device)
        self._norms.append(norms)
        for place, (_, indices) in enumerate(slots):
            self._by_indices[tuple(indices)] = norms, place

    def _indices_of(self, params: Sequence[Any]) -> tuple[int | None, ...]:
        return tuple(map(self._index.get, params))
