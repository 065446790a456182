"""The interface of communication formats (wires), which define how a bucket is sent and summed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work
from pyengine.ops.codec import Codec
from pyengine.wire.memory import BucketMemory


@dataclass(frozen=True)
class Encoding:
    """A quantization of values for communication."""

    codec: Codec
    seed: int | None = None  # seed of stochastic rounding; if None, values are rounded to nearest


class Spelled:
    """Base class of frozen dataclasses whose repr omits default values. Ranks compare this repr."""

    def __repr__(self) -> str:
        mine: Any = self
        given = [(f.name, getattr(self, f.name)) for f in fields(mine) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"


class Wire(ABC):
    """Base class of communication formats (wires), which define how a flat bucket is summed over ranks.

    A wire implements `dtype`, `all_reduce_` and `bytes_on_wire`. All other methods and attributes have
    defaults for a wire that sends every element unchanged and keeps no state between windows. Define a
    subclass as a frozen dataclass at module level, because ranks send wires to each other and compare their
    repr.
    """

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of the flat buffers that the engine passes."""

    @property
    def folds_count(self) -> bool:
        """Whether gradients are multiplied by 1/count before the cast to `dtype`.

        Multiplying before the cast keeps sums in the range of float16, and gives residuals the scale of the
        mean. If False, the engine multiplies after the sum.
        """
        return False

    @property
    def is_encoded(self) -> bool:
        """Whether the result only approximates the sum, so that a sum of zeros need not be 0.

        Gradients that already have the wire's `dtype` are also encoded. A wire that wraps another wire is
        encoded if either wire is encoded.
        """
        return False

    @property
    def encoding(self) -> Encoding | None:
        """The encoding of values, or None if ranks do not know their rounding errors; see `ErrorFeedback`."""
        return None

    @property
    def keeps_residual(self) -> bool:
        """Whether a bucket's wire keeps the rounding error of a window and adds it to the next window."""
        return False

    @property
    def needs_exchange(self) -> bool:
        """Whether this wire uses `Comm.all_to_all` and `Comm.all_gather`, which XLA does not support."""
        return self.is_encoded or self.encoding is not None

    @property
    def can_reduce_scatter(self) -> bool:
        """Whether this wire implements `reduce_scatter`."""
        return type(self).reduce_scatter is not Wire.reduce_scatter

    @property
    def needs_prepare(self) -> bool:
        """Whether this wire implements `prepare`."""
        return type(self).prepare is not Wire.prepare

    def prepare(self, comm: Comm) -> list[str]:
        """Set up the transport before the first bucket is sent; return a list of problems.

        Every rank of the transport must call this.
        """
        del comm
        return []

    @property
    def keeps_memory(self) -> bool:
        """Whether this wire implements `for_bucket`."""
        return type(self).for_bucket is not Wire.for_bucket

    def for_bucket(self, memory: BucketMemory) -> Wire:
        """Return the wire that one bucket uses in every window, or `self` if it keeps no state per bucket.

        Args:
            memory: state that the returned wire may keep between windows; the owner of the bucket owns it.
        """
        del memory
        return self

    @abstractmethod
    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        """Launch the sum of a bucket over all ranks, in place; every rank gets the same bits.

        Args:
            flat: bucket of `numel` elements of `dtype`; the engine keeps it alive until it has waited for the
                work.
            comm: transport.

        Returns:
            A `Work` that is complete when `flat` contains the sum.

        Cost: every rank sends `bytes_on_wire` bytes.
        """

    def reduce_scatter(self, out: Tensor, parts: Tensor, comm: Comm) -> None:
        """Sum sharded gradients over all ranks, and keep this rank's part of the sum.

        The host waits for the result. On an accelerator, the current stream waits instead.

        Args:
            out: output, `[n]`, of `dtype` or a wider dtype: this rank's part of the sum.
            parts: input of `dtype`, `[world_size * n]`, with one part per rank.
            comm: transport over the ranks that keep parts; its `can_exchange` is True.

        Cost: with W ranks, every rank sends (W - 1) / W times the bytes of `parts`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reduce_scatter")

    @abstractmethod
    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        """Return the number of bytes that one rank sends for a bucket of `numel` elements."""
