"""Error feedback: the rounding error of a wire is kept and sent in the next window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work
from pyengine.wire.base import Wire
from pyengine.wire.bucket_wire import BucketWire, without_memory
from pyengine.wire.cast import BF16, FP16
from pyengine.wire.memory import BucketMemory


@dataclass(frozen=True)
class ErrorFeedback(Wire):
    """Keep the rounding error of another wire, and add it to the values of the next window.

    Every rank keeps one float32 residual per element. It is the rounding error of this rank's values; in this
    rank's part of a bucket it also includes the rounding error of the sum (sums of sharded gradients are not
    rounded). The sum of all results therefore differs from the sum of the true gradients by at most the
    current residuals, which are the error of one window. Over n windows the error of the mean is n times
    smaller (Seide et al. 2014, Karimireddy et al. 2019; Tang et al. 2019 for both roundings).

    Values are multiplied by 1/count before the residual is added. Residuals therefore have the scale of the
    mean gradient, and windows may have different counts. A skipped window, for example with inf or nan,
    resets the residuals to zero.

    Args:
        wire: `Int8(...)`, `FP8(...)`, `BF16(sum="fp32")` or `FP16(sum="fp32")`.

    Raises:
        TypeError, ValueError: `wire` is not one of these wires.

    Cost: 4 bytes of memory per element, which the encoding pass reads and writes. Under FSDP2, every rank has
    a residual for each element of the unsharded gradients, for any world size. Multiplying by 1/count reads
    and writes another 4 bytes per element.
    """

    dtype: ClassVar[torch.dtype] = torch.float32
    folds_count: ClassVar[bool] = True
    is_encoded: ClassVar[bool] = True
    keeps_residual: ClassVar[bool] = True

    wire: Wire

    def __post_init__(self) -> None:
        if isinstance(self.wire, BF16 | FP16) and self.wire.encoding is None:
            raise ValueError(
                f"wire={self.wire!r}: its all-reduce rounds on every rank, so no rank knows its rounding "
                f"error; use {type(self.wire).__name__}(sum='fp32')"
            )
        if not isinstance(self.wire, Wire) or self.wire.encoding is None:
            raise TypeError(
                f"wire={self.wire!r}: expected a wire whose rounding error is known on each rank: Int8(), "
                "FP8(), BF16(sum='fp32') or FP16(sum='fp32')"
            )

    def for_bucket(self, memory: BucketMemory) -> Wire:
        assert self.wire.encoding is not None  # `__post_init__` has checked it
        return BucketWire(self, memory, self.wire.encoding)

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        raise without_memory(self)

    def reduce_scatter(self, out: Tensor, parts: Tensor, comm: Comm) -> None:
        raise without_memory(self)

    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        """Return the number of bytes that one rank sends, which is the same as for the wrapped wire."""
        return self.wire.bytes_on_wire(numel, world_size)
