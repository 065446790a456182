"""Cast wires: the sum is an all-reduce in the wire's own type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Exchanges, Work, ring_bytes
from pyengine.wire.base import Wire


@dataclass(frozen=True)
class _Cast:
    dtype: ClassVar[torch.dtype]
    folds_count: ClassVar[bool]

    def all_reduce_(self, flat: Tensor, comm: Comm) -> Work:
        return comm.all_reduce(flat)

    def reduce_scatter(self, out: Tensor, parts: Tensor, comm: Exchanges) -> None:
        """Exchange the parts in this type, and add them up in that of `out`.

        Values are rounded once, by the cast to this type, by at most u of themselves each (2^-24, 2^-8, 2^-11
        for float32, bfloat16, float16); in a ring every hop would round. With W ranks and a float32 `out`, no
        element is further from the sum of what was cast than (u + (W - 1) 2^-24) times the sum of absolute
        values.
        """
        received = torch.empty_like(parts)
        comm.all_to_all(received, parts).wait()
        torch.sum(received.view(comm.world_size, -1), 0, dtype=out.dtype, out=out)

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


_OF_DTYPE: dict[torch.dtype, Wire] = {kind.dtype: kind() for kind in (FP32, BF16, FP16)}


def as_wire(wire: Wire | torch.dtype) -> Wire:
    """Return the wire of a dtype, `BF16()` for torch.bfloat16; anything else stays as given."""
    return _OF_DTYPE.get(wire, wire) if isinstance(wire, torch.dtype) else wire  # type: ignore[arg-type]


def wire_problems(wire: Any) -> list[str]:
    """Say what is wrong with a wire; a name, a type or another dtype in its place is taken for a hint."""
    made = not isinstance(wire, type) and callable(getattr(wire, "all_reduce_", None))
    if made and isinstance(getattr(wire, "dtype", None), torch.dtype):
        return []
    name = (wire.__name__ if isinstance(wire, type) else str(wire)).removeprefix("torch.").upper()
    name = name.replace("BFLOAT", "BF").replace("FLOAT", "FP")
    meant = name if name in ("FP32", "BF16", "FP16") else "FP32"
    text = f"wire={wire!r}: need a wire; use pe.wire.{meant}(), of FP32(), BF16() and FP16(), or their dtypes"
    return [f"{text}, torch.bfloat16 say"]
