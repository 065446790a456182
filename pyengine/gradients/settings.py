"""The arguments common to all engines, and checks of their values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

import torch

from pyengine.comm.shared_memory import wrong_choice
from pyengine.window.counter import check_accumulate
from pyengine.wire import FP32, Wire
from pyengine.wire.base import Spelled
from pyengine.wire.named import wire_problems

# The supported dtypes of trained parameters. A new communication dtype does not extend this list.
PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The dtype in which bf16 and fp16 gradients are summed, for each `accumulator` that names a dtype.
SUM_DTYPES = {"fp32": torch.float32}
Accumulator = Literal["fp32", "native", "exact"]
NonFinite = Literal["skip", "raise"]
KINDS = get_args(Accumulator)
NONFINITE_POLICIES = get_args(NonFinite)


@dataclass(frozen=True, repr=False)
class Exact(Spelled):
    """`accumulator="exact"`, with a given window size and number of slots.

    Use `Exact` if the size of a window is not the sum of `accumulate` over the ranks, or if sums need not be
    exact within a slot (a group of micro-batches).

    Args:
        micro_batches: number of micro-batches in a full window, over all ranks.
        slots: number of slots in a window. Each slot is a group of consecutive micro-batches, and all slots
            have the same length. PyTorch sums the gradients of a slot in `.grad`, on one rank and in order;
            the sum over slots is exact. The bits therefore depend on the number of slots, but are the same
            for every number of ranks that divides the number of slots. The exact sum costs one addition per
            slot instead of one per micro-batch. Parameters narrower than float32 are not supported, because
            PyTorch would sum their gradients in their own dtype. With `slots=None`, every micro-batch
            is a slot, and any rank may compute any micro-batch.

    An exact sum can have 1 to 4096 slots. The number of slots determines the grid of the sum, so two runs
    have the same bits only with the same number of slots.
    """

    micro_batches: int
    slots: int | None = None

    @property
    def run(self) -> int:
        """The number of micro-batches whose gradients are accumulated in one slot."""
        return 1 if self.slots is None else self.micro_batches // self.slots


def as_accumulator(accumulator: Accumulator | Exact | torch.dtype) -> Accumulator | Exact:
    """Return "fp32" for torch.float32, and any other value unchanged."""
    return "fp32" if accumulator is torch.float32 else accumulator  # type: ignore[return-value]


def sum_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of `dtype` are summed; not used for exact (integer) sums."""
    wide = SUM_DTYPES.get(kind, dtype)
    return wide if dtype.itemsize < wide.itemsize else dtype


@dataclass(frozen=True)
class Settings:
    """Arguments of `GradSync`, `attach` and the adapters, except DDP's bucket size."""

    accumulate: int
    wire: Wire = FP32()  # noqa: RUF009 - frozen
    accumulator: Accumulator | Exact = "fp32"
    nonfinite: NonFinite = "skip"
    bucket_cap_mb: float = 8
    deferral: str = ""
    stall_after_s: float | None = 30.0
    shared_memory: bool = False

    @property
    def kind(self) -> str:
        """The name of the accumulator; empty if it has no name."""
        if isinstance(self.accumulator, Exact):
            return "exact"
        return self.accumulator if isinstance(self.accumulator, str) else ""

    @property
    def run(self) -> int:
        """The number of micro-batches in one slot of an exact sum; 1 for other sums."""
        return self.accumulator.run if isinstance(self.accumulator, Exact) else 1

    @property
    def raises(self) -> bool:
        """Whether the gradients of every micro-batch are checked, and an inf or nan raises an error."""
        return self.nonfinite == "raise"

    @property
    def cap_bytes(self) -> int:
        """The size of a bucket in bytes."""
        return int(self.bucket_cap_mb * 2**20)

    @property
    def watches_stalls(self) -> bool:
        """Whether a stalled collective causes a warning."""
        seconds = self.stall_after_s
        is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
        return is_number and 0 < seconds < math.inf  # type: ignore[operator]

    def shared(self) -> str:
        """Describe the values that must be equal on every rank; micro-batches per window may differ."""
        return f"wire={self.wire}, accumulator={self.accumulator!r}, nonfinite={self.nonfinite!r}, " + (
            f"bucket_cap_mb={float(self.bucket_cap_mb)}"
            + (f", {self.deferral}" if self.deferral else "")
            + (", shared_memory=True" if self.shared_memory else "")
        )

    def problems(self) -> list[str]:
        """Return error messages for invalid values."""
        found = [*check_accumulate(self.accumulate), *wire_problems(self.wire)]
        wrong_window = _exact_problems(self.accumulator) if isinstance(self.accumulator, Exact) else []
        found += wrong_window
        if self.kind not in KINDS:
            found.append(
                f"accumulator={self.accumulator!r}: expected one of {', '.join(map(repr, KINDS))}, or "
                "torch.float32 for 'fp32'"
            )
        elif self.kind == "exact" and not wire_problems(self.wire) and self.wire != FP32():
            found.append(
                f"wire={self.wire}: expected wire.FP32() with accumulator='exact', whose sums are sent as "
                "integers and not in the format of a wire"
            )
        if str(self.nonfinite) == "drop_micro_batch":
            found.append(
                "use nonfinite='skip' or 'raise': 'drop_micro_batch' has been removed; the report still "
                "names the rank and the micro-batch of an inf or nan"
            )
        elif not isinstance(self.nonfinite, str) or self.nonfinite not in NONFINITE_POLICIES:
            found.append(
                f"nonfinite={self.nonfinite!r}: expected one of {', '.join(map(repr, NONFINITE_POLICIES))}"
            )
        if not self.watches_stalls and self.stall_after_s is not None and not _is_zero(self.stall_after_s):
            found.append(
                f"stall_after_s={self.stall_after_s!r}: expected the number of seconds after which a stalled "
                "sync is reported, finite and above 0; or None, or 0, for no report"
            )
        found += wrong_choice(self.shared_memory)
        size = self.bucket_cap_mb
        if not isinstance(size, Real) or isinstance(size, bool) or not 0 < size * 2**20 < math.inf:
            found.append(f"bucket_cap_mb={size!r}: expected a finite size above 0 in MiB, for example 8")
        return found


def _exact_problems(exact: Exact) -> list[str]:
    """Return error messages for invalid arguments of `Exact`."""
    num, slots = exact.micro_batches, exact.slots
    if type(num) is not int:
        return [f"accumulator={exact}: expected a whole number of micro-batches"]
    if slots is None:
        return []
    if type(slots) is not int or slots < 1:
        return [
            (
                f"accumulator={exact}: expected a whole number of slots, at least 1, or None for one slot "
                "per micro-batch"
            )
        ]
    if num < slots or num % slots:
        lower = max((n for n in range(1, min(slots, num) + 1) if num % n == 0), default=1)
        return [
            (
                f"accumulator={exact}: all slots need the same number of micro-batches, so slots must "
                f"divide micro_batches; slots={lower} does"
            )
        ]
    return []


def _is_zero(value: object) -> bool:
    return type(value) in (int, float) and value == 0
