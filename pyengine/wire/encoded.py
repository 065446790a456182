"""Wires that send one byte per element, with a scale per block of elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work
from pyengine.ops.codec import Codec
from pyengine.wire.base import Encoding, Spelled, Wire
from pyengine.wire.bucket_wire import BucketWire, without_memory
from pyengine.wire.exchange import Parts, scatter_sum, sum_encoded
from pyengine.wire.memory import BucketMemory, PayloadMemory

_ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True, repr=False, kw_only=True)
class _Encoded(Spelled, Wire):
    """Base class of wires that send one byte per element.

    The engine passes buckets in float32, and multiplies the sum by 1/count. Ranks exchange encoded parts;
    each rank sums one part in float32, encodes the sum and sends it to all ranks. Each value is rounded
    twice: before the first exchange, and as part of the sum.
    """

    dtype: ClassVar[torch.dtype] = torch.float32
    is_encoded: ClassVar[bool] = True

    block: int = 256
    rounding: str = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rounding not in _ROUNDINGS:
            raise ValueError(f"rounding={self.rounding!r}: expected 'nearest' or 'stochastic'")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed!r}: expected an int from 0 to 2**63 - 1")
        self._codec()  # `_codec` checks the other arguments

    @property
    def encoding(self) -> Encoding:
        return Encoding(self._codec(), self.seed if self.rounding == "stochastic" else None)

    def for_bucket(self, memory: BucketMemory) -> Wire:
        """Return the wire of one bucket, which uses a new seed for each window and keeps its buffers."""
        return BucketWire(self, memory, self.encoding)

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        if self.rounding == "stochastic":
            raise without_memory(self)
        return sum_encoded(flat, comm, self._codec(), memory=PayloadMemory())

    def reduce_scatter(self, out: Tensor, parts: Tensor, comm: Comm) -> None:
        """Exchange encoded parts, and sum them in the dtype of `out`; each value is rounded once."""
        if self.rounding == "stochastic":
            raise without_memory(self)
        scatter_sum(out, parts, comm, self._codec())

    def _codec(self) -> Codec:
        raise NotImplementedError

    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        """Return the number of bytes that one rank sends, for W parts of whole blocks.

        A rank sends 2 (W - 1) / W bytes per element, and in addition 8 (W - 1) / W bytes per block.
        """
        return Parts(self._codec(), numel, world_size).bytes_sent


@dataclass(frozen=True, repr=False, kw_only=True)
class Int8(_Encoded):
    """Send integers from -127 to 127, with a float32 scale per block: about a quarter of float32's bytes.

    The rounding error of a value is at most 0.50004 times the scale of its block, which is the largest
    magnitude in the block divided by 127. The sum is also rounded, with scales computed from the sum.
    Elements much smaller than the largest element of their block become 0 (see `ErrorFeedback`). An
    element that is inf or nan becomes nan.

    Args:
        block: number of elements that share a scale: 32, 64, 128, 256, 512 or 1024.
        rounding: "nearest", or "stochastic", which rounds up or down at random without bias and has twice the
            error bound.
        seed: seed of stochastic rounding.
    """

    def _codec(self) -> Codec:
        return Codec("int8", self.block)


@dataclass(frozen=True, repr=False)
class FP8(_Encoded):
    """Send 8-bit floats, with a float32 scale per block: about a quarter of float32's bytes.

    The rounding error of a value x in a block with scale s is at most 2^-4 max(abs(x), 2^-6 s) for e4m3, and
    2^-3 max(abs(x), 2^-14 s) for e5m2. The scale is the largest magnitude in the block, divided by 448 for
    e4m3 and by 57344 for e5m2. The sum is also rounded, with scales computed from the sum.

    Args:
        format: "e4m3", or "e5m2", which has a wider range and coarser steps.
        block, rounding, seed: see `Int8`.
    """

    format: str = "e4m3"

    def __post_init__(self) -> None:
        if self.format not in ("e4m3", "e5m2"):
            raise ValueError(f"format={self.format!r}: expected 'e4m3' or 'e5m2'")
        super().__post_init__()

    def _codec(self) -> Codec:
        return Codec(self.format, self.block)
