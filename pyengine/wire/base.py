"""What a wire is: how a bucket is sent and summed."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work


class Wire(Protocol):
    """Sums one flat bucket over ranks.

    Attributes:
        dtype: dtype on the network; the engine passes a flat buffer of this dtype.
        folds_count: whether values are multiplied by 1/count before the cast to `dtype`. This keeps sums in
            the range of float16, and residuals in units of means. Otherwise the engine does it after the sum.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def folds_count(self) -> bool: ...

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        """Launch the sum of a bucket over all ranks, in place; every rank gets the same bits.

        Args:
            flat: of `dtype`, `[numel]`; the engine keeps it alive until the work has been waited for.
            comm: transport.

        Returns:
            A work that is done when `flat` holds the sum.

        Cost: `bytes_on_wire` sent by every rank.
        """

    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        """Return the number of bytes that one rank sends for a bucket of `numel` elements."""


@runtime_checkable
class Scatters(Wire, Protocol):
    """A wire that can also reduce-scatter, for sharded gradients."""

    def reduce_scatter(self, out: Tensor, parts: Tensor, comm: Comm) -> None:
        """Sum over all ranks and keep the part of this rank. The host waits; on an accelerator the stream.

        Args:
            out: `[n]`, of `dtype` or a wider dtype, written: the part of the sum for this rank.
            parts: of `dtype`, `[world_size * n]`, read: the r-th part is for rank r.
            comm: transport over the ranks that keep parts; its `can_exchange` is true.

        Cost: (W - 1) / W times the bytes of `parts` sent by every rank of W.
        """


@runtime_checkable
class Encodes(Wire, Protocol):
    """A wire that sends encoded values: its result is close to the sum, and a sum of zeros need not be 0.

    Its buckets may contain gradients only. Gradients that have its `dtype` already are encoded, too.

    Attributes:
        is_encoded: whether this wire encodes; a wire around another one answers for that one.
    """

    @property
    def is_encoded(self) -> bool: ...


@runtime_checkable
class Prepares(Wire, Protocol):
    """A wire that sets up a transport before the first bucket is sent, for example groups within it."""

    def prepare(self, comm: Comm) -> list[str]:
        """Set up the transport, or return what is wrong; every rank of the transport calls this."""


def is_encoded(wire: Wire) -> bool:
    """Whether a wire sends encoded values; see `Encodes`."""
    return isinstance(wire, Encodes) and wire.is_encoded
