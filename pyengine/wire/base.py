"""What a wire is."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work


class Wire(Protocol):
    """Owns how one flat bucket is summed over ranks.

    Attributes:
        dtype: element type on the network; the engine hands over a flat buffer of this type.
        folds_count: whether 1/count is multiplied in before the values become this type: float16 holds sums
            in its range so, and residuals are those of means. Otherwise the engine applies it after the sum.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def folds_count(self) -> bool: ...

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        """Start summing a bucket over all ranks, in place; every rank ends with the same bits.

        Args:
            flat: of `dtype`, `[numel]`; the engine's memory, which stays alive until the work has been waited
                for.
            comm: transport.

        Returns:
            A work that is done when the sum stands in `flat`.

        Cost: `bytes_on_wire` sent by every rank.
        """

    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        """Return the bytes that one rank sends for a bucket of `numel` elements."""


@runtime_checkable
class Scatters(Wire, Protocol):
    """A wire that can also leave every rank one part of the sum, as sharded gradients need it."""

    def reduce_scatter(self, out: Tensor, parts: Tensor, comm: Comm) -> None:
        """Sum over all ranks, and keep this rank's part. It waits; on an accelerator the stream does.

        Args:
            out: `[n]`, of `dtype` or a wider type, written: this rank's part of the sum.
            parts: of `dtype`, `[world_size * n]`, read: the r-th part is for rank r.
            comm: transport over the ranks that hold parts.

        Cost: (W - 1) / W times the bytes of `parts` sent by every rank of W.
        """


@runtime_checkable
class Encodes(Wire, Protocol):
    """A wire that sends something else than its elements, so that what it brings back is near their sum, and
    0 need not be 0.

    Nothing but gradients may go into its buckets, and what is of its `dtype` already goes over it all the
    same.

    Attributes:
        is_encoded: whether it is such a wire; one around another may not know before it has that.
    """

    @property
    def is_encoded(self) -> bool: ...


@runtime_checkable
class Prepares(Wire, Protocol):
    """A wire that needs something of a transport before the first bucket travels: groups within it, say."""

    def prepare(self, comm: Comm) -> list[str]:
        """Make it, or say why it cannot be had; every rank of the transport calls this."""


def is_encoded(wire: Wire) -> bool:
    """Whether a wire sends something else than its elements; see `Encodes`."""
    return isinstance(wire, Encodes) and wire.is_encoded
