"""A kernel's case: what runs against what, on which tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyengine.cli.bench.timing import Run
from pyengine.gradients.layout import ALIGN_ELEMENTS
from pyengine.ops.plan import BucketPlan


class Disagreement(RuntimeError):
    """Contestants that do not compute the same; their times would mean nothing."""


def check(agree: bool, name: str) -> None:
    """Raise Disagreement unless the contestants of a case agree."""
    if not agree:
        raise Disagreement(
            f"{name}: pyengine and torch compute different values, so their times would mean nothing: run "
            "`python -m pyengine doctor`, and report it with its output"
        )


@dataclass(frozen=True)
class Case:
    """One line of a table: a kernel, the torch expression it replaces, and the bytes the job must move.

    `others` are further contestants, which only a CUDA device times.
    """

    name: str
    run: Run
    torch_run: Run
    read_bytes: int
    write_bytes: int
    roof: str  # the class of traffic: "read", "update", "copy"
    others: Mapping[str, Run] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    def roof_seconds(self, roofs: Mapping[str, float]) -> float:
        """No pass can beat its class of traffic, nor the plain reading of what it reads."""
        return max(self.num_bytes / roofs[self.roof], self.read_bytes / roofs["read"]) / 1e9


# Makes the operands of a case and checks that the contestants agree.
Build = Callable[[], Case]


@dataclass(frozen=True)
class Slots:
    """Equal slots side by side in a flat buffer, and the tensors that belong to them."""

    pieces: int
    each: int
    device: str

    @property
    def numel(self) -> int:
        return self.pieces * self.each

    def plan(self) -> BucketPlan:
        return BucketPlan(range(0, self.numel, self.each), [self.each] * self.pieces)

    def tensors(self, dtype: torch.dtype) -> list[Tensor]:
        """Random tensors, each with an allocation of its own."""
        return [torch.randn(self.each, device=self.device).to(dtype) for _ in range(self.pieces)]

    def empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.numel, dtype=dtype, device=self.device)

    def flags(self) -> Tensor:
        """One a slot, for what is inf or nan."""
        return torch.zeros(self.pieces, dtype=torch.uint8, device=self.device)

    def scalar(self, value: float) -> Tensor:
        return torch.tensor(value, device=self.device)


@dataclass(frozen=True)
class Sizes:
    """How large the cases are, `megabytes` of float32 in the large ones, and where they lie."""

    megabytes: int
    device: str

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def large(self) -> int:
        """Elements of a large case."""
        return self.megabytes * 2**18

    @property
    def few(self) -> Slots:
        """8 slots of a large case."""
        return self._slots(self.large, 8)

    @property
    def many(self) -> Slots:
        """400 slots of a large case."""
        return self._slots(self.large, 400)

    @property
    def tiny(self) -> Slots:
        """1000 slots of 1 KB of float32."""
        return self._slots(1000 * 256, 1000)

    @property
    def huge(self) -> Slots:
        """8 slots, four times as large."""
        return self._slots(4 * self.large, 8)

    @property
    def huge_size(self) -> str:
        """What `huge` is called."""
        return f"{4 * self.megabytes} MiB"

    @property
    def bucket(self) -> Slots:
        """25 slots of a MiB of float32: a bucket as the engine makes them."""
        return self._slots(25 * 2**18, 25)

    def _slots(self, numel: int, pieces: int) -> Slots:
        """Cut `numel` elements into slots; on CUDA each begins where the engine would let it begin."""
        each = numel // pieces
        return Slots(pieces, each // ALIGN_ELEMENTS * ALIGN_ELEMENTS if self.is_cuda else each, self.device)
