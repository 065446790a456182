"""Cast wires: the sum is an all-reduce in the wire's own type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work, ring_bytes


@dataclass(frozen=True)
class _Cast:
    dtype: ClassVar[torch.dtype]
    folds_count: ClassVar[bool]

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        return comm.all_reduce(flat)

    def bytes_on_wire(self, numel: int, world_size: int) -> int:
        """Return what one rank sends in a ring all-reduce: 2 (W - 1) / W times the bucket."""
        return ring_bytes(numel * self.dtype.itemsize, world_size)


@dataclass(frozen=True)
class FP32(_Cast):
    """Send and sum in float32: 8 (W - 1) / W bytes an element. 1/count is applied after the sum."""

    dtype: ClassVar[torch.dtype] = torch.float32
    folds_count: ClassVar[bool] = False


@dataclass(frozen=True)
class BF16(_Cast):
    """Send and sum in bfloat16: half the bytes; a sum over W ranks carries about W - 1 roundings of at most
    2^-8.
    """

    dtype: ClassVar[torch.dtype] = torch.bfloat16
    folds_count: ClassVar[bool] = True


@dataclass(frozen=True)
class FP16(_Cast):
    """Send and sum in float16: half the bytes, roundings of at most 2^-11,
    range 6e-8 to 65504 (use a GradScaler).
    """

    dtype: ClassVar[torch.dtype] = torch.float16
    folds_count: ClassVar[bool] = True
