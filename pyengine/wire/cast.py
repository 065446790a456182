"""Wires that cast a bucket to a communication dtype, without an encoding."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work, ring_bytes
from pyengine.ops.codec import Codec
from pyengine.wire.base import Encoding, Spelled, Wire
from pyengine.wire.bucket_wire import BucketWire
from pyengine.wire.exchange import Parts, sum_encoded
from pyengine.wire.memory import BucketMemory, PayloadMemory

_log = logging.getLogger("pyengine.wire")

_SUMS = ("wire", "fp32")


class _Cast(Spelled, Wire):
    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        _log.debug("sum a bucket of %d elements in an all-reduce as %s", flat.numel(), self)
        return comm.all_reduce(flat)

    def reduce_scatter(self, out: Tensor, parts: Tensor, comm: Comm) -> None:
        """Exchange the parts in the communication dtype, and sum them in the dtype of `out`.

        The cast rounds each value once, with a relative error of at most u, which is 2^-24 for float32, 2^-8
        for bfloat16 and 2^-11 for float16. A ring would round at every hop. With W ranks and a float32 `out`,
        the error of an element is at most (u + (W - 1) 2^-24) times the sum of absolute values.
        """
        received = torch.empty_like(parts)
        comm.all_to_all(received, parts).wait()
        torch.sum(received.view(comm.world_size, -1), 0, dtype=out.dtype, out=out)

    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        """Return the number of bytes that one rank sends in a ring all-reduce.

        It is 2 (W - 1) / W times the size of the bucket. Over gloo, three or more ranks reduce a bucket of at
        most 32 KiB over a tree, in which a rank sends the bucket to up to five other ranks.
        """
        return ring_bytes(numel * self.dtype.itemsize, world_size)


@dataclass(frozen=True, repr=False)
class FP32(_Cast):
    """Send and sum float32 values, with 8 (W - 1) / W bytes per element. The sum is multiplied by 1/count."""

    dtype: ClassVar[torch.dtype] = torch.float32


@dataclass(frozen=True, repr=False)
class _Narrow(_Cast):
    """Send a bucket in a two-byte dtype.

    With `sum="fp32"`, ranks exchange parts; each rank sums one part in float32, rounds the sum and sends it
    to all ranks. The cast rounds each value once, and the sum is rounded once, for any W. The error of an
    element is therefore at most (u + W 2^-24) times the sum of absolute values.
    """

    _format: ClassVar[str]

    sum: str = "wire"

    def __post_init__(self) -> None:
        if self.sum not in _SUMS:
            raise ValueError(
                f"sum={self.sum!r}: expected 'wire' (all-reduce in the wire's dtype) or 'fp32' (sum in "
                "float32)"
            )

    @property
    def encoding(self) -> Encoding | None:
        """The encoding for a sum in float32; None for an all-reduce in the communication dtype."""
        return Encoding(Codec(self._format)) if self.sum == "fp32" else None

    def for_bucket(self, memory: BucketMemory) -> Wire:
        """Return the wire of one bucket."""
        return self if self.encoding is None else BucketWire(self, memory, self.encoding)

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        encoding = self.encoding
        if encoding is None:
            return super().all_reduce_(flat, comm)
        return sum_encoded(flat, comm, encoding.codec, memory=PayloadMemory())

    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        """Return the number of bytes that one rank sends: 4 (W - 1) / W per element.

        With `sum="fp32"`, the bucket is padded to W equal parts.
        """
        encoding = self.encoding
        if encoding is None:
            return super().bytes_on_wire(numel, world_size)
        return Parts(encoding.codec, numel, world_size).bytes_sent


@dataclass(frozen=True, repr=False)
class BF16(_Narrow):
    """Send buckets in bfloat16, with half the bytes of float32 and the same range.

    The relative rounding error is at most 2^-8. The sum is multiplied by 1/count.

    Args:
        sum: "wire" uses an all-reduce in bfloat16, which rounds on every rank, about W times for W ranks.
            "fp32" sums in float32 between two exchanges that send the same number of bytes, and rounds twice.
    """

    dtype: ClassVar[torch.dtype] = torch.bfloat16
    _format: ClassVar[str] = "bf16"


@dataclass(frozen=True, repr=False)
class FP16(_Narrow):
    """Send buckets in float16, with half the bytes of float32.

    The relative rounding error is at most 2^-11, and the range is 6e-8 to 65504 (use a GradScaler). Gradients
    are multiplied by 1/count before the cast, which keeps sums in range.

    Args:
        sum: see `BF16`.
    """

    dtype: ClassVar[torch.dtype] = torch.float16
    folds_count: ClassVar[bool] = True
    _format: ClassVar[str] = "fp16"
