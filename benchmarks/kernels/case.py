"""A case of a kernel: the contestants, and the tensors that they run on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pyengine.gradients.layout import ALIGN_ELEMENTS
from pyengine.ops.plan import BucketPlan

Run = Callable[[], object]


def check(agree: bool, name: str) -> None:
    """Raise RuntimeError unless the contestants of a case compute the same values."""
    if not agree:
        raise RuntimeError(
            f"{name}: pyengine and torch compute different values, so their times would mean nothing: run "
            "`python -m pyengine doctor`, and report it with its output"
        )


@dataclass(frozen=True)
class Case:
    """A kernel, the torch expression that it replaces, and the bytes that the work must move."""

    name: str
    run: Run
    torch_run: Run
    read_bytes: int
    write_bytes: int
    roof: str  # the kind of memory traffic: "read", "update" or "copy"
    run_lists: Run | None = None  # the kernel over lists of tensors instead of `Pointers`, for `_cuda.py`

    @property
    def num_bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    def roof_seconds(self, roofs: Mapping[str, float]) -> float:
        """Return the minimum time for the traffic: for its kind, or for its reads alone if that is longer."""
        return max(self.num_bytes / roofs[self.roof], self.read_bytes / roofs["read"]) / 1e9


# Creates the operands of a case, and checks that the contestants agree.
Build = Callable[[], Case]


@dataclass(frozen=True)
class Slots:
    """Slots of equal size in a flat buffer, and a tensor for each slot."""

    pieces: int
    each: int
    device: str

    @property
    def numel(self) -> int:
        return self.pieces * self.each

    def plan(self) -> BucketPlan:
        return BucketPlan(range(0, self.numel, self.each), [self.each] * self.pieces)

    def tensors(self, dtype: torch.dtype) -> list[Tensor]:
        """Return random tensors, each with its own allocation."""
        return [torch.randn(self.each, device=self.device).to(dtype) for _ in range(self.pieces)]

    def empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.numel, dtype=dtype, device=self.device)

    def flags(self) -> Tensor:
        """Return a flag for each slot, which kernels set if a value is inf or nan."""
        return torch.zeros(self.pieces, dtype=torch.uint8, device=self.device)

    def scalar(self, value: float) -> Tensor:
        return torch.tensor(value, device=self.device)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the cases and their device; large cases have `megabytes` of float32."""

    megabytes: int
    device: str

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def large(self) -> int:
        """Number of elements in a large case."""
        return self.megabytes * 2**18

    @property
    def few(self) -> Slots:
        """8 slots of a large case."""
        return self.slots(self.large, 8)

    @property
    def many(self) -> Slots:
        """400 slots of a large case."""
        return self.slots(self.large, 400)

    @property
    def tiny(self) -> Slots:
        """1000 slots of 1 KB of float32."""
        return self.slots(1000 * 256, 1000)

    def slots(self, numel: int, pieces: int) -> Slots:
        """Divide `numel` elements into slots; on CUDA, slots are aligned as in the engine's buckets."""
        each = numel // pieces
        return Slots(pieces, each // ALIGN_ELEMENTS * ALIGN_ELEMENTS if self.is_cuda else each, self.device)
