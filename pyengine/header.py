"""The header: one short all-reduce a window in which ranks agree on count, loss, position and mistakes.

It is launched just before the window's last backward (everything in it is known by then), so it overlaps with that
backward, and it turns disagreement into an error on every rank instead of a hang or a wrong divisor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyengine.wire import Comm, Work

# Sums in float64 are exact up to 2^53: squares of 20-bit numbers over up to 8192 ranks stay below it.
_STEP_MODULUS = 2**20

Count = int | float | Tensor


@dataclass
class LocalWindow:
    """What one rank says of its window: one entry a micro-batch.

    Attributes:
        counts: items each loss was summed over; numbers, or 0-dim tensors that stay on their device.
        losses: the losses, detached 0-dim tensors.
    """

    counts: list[Count] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    def problems(self) -> list[str]:
        """Describe the invalid counts. Reads device counts: for error reports only."""
        return [
            f"count of micro-batch {index} is {float(count)}"
            for index, count in enumerate(self.counts)
            if not (math.isfinite(count) and count >= 0)
        ]

    def nonfinite_losses(self) -> list[int]:
        """Return the micro-batches whose loss is inf or nan. Reads device losses: for error reports only."""
        return [index for index, loss in enumerate(self.losses) if not math.isfinite(loss)]


@dataclass(frozen=True)
class Totals:
    """Sums over all ranks of a window."""

    count: float
    loss: float
    micro_batches: int
    more: int
    invalid_counts: int
    steps_differ: bool
    optimizer_steps_differ: bool


class Header:
    """The header of one window.

    Args:
        comm: transport.
        device: where the vector lives.
        local: this rank's counts and losses; complete.
        position: (windows completed, optimizer steps taken), which must be equal on every rank.
        more: whether this rank has another window after this one.
    """

    def __init__(
        self, comm: Comm, device: torch.device, *, local: LocalWindow, position: tuple[int, int], more: bool
    ) -> None:
        self._world_size = comm.world_size
        self._vector = _pack(device, local, position, more)
        self._work: Work | None = comm.all_reduce(self._vector)
        self._inv_count: Tensor | None = None

    def is_ready(self) -> bool:
        """Whether the totals are there without waiting."""
        return self._work is None or self._work.is_completed()

    def inv_count(self) -> Tensor:
        """Wait, and return 1 / total count as a 0-dim float32 tensor on the device; 0 when nothing was counted."""
        self._wait()
        if self._inv_count is None:
            count = self._vector[0]
            self._inv_count = torch.where(count > 0, 1.0 / count, torch.zeros_like(count)).float()
        return self._inv_count

    def totals(self) -> Totals:
        """Wait, and read the totals on the host."""
        self._wait()
        count, loss, micro_batches, more, invalid, *positions = self._vector.tolist()
        differ = [
            self._world_size * squares != total * total
            for total, squares in zip(positions[::2], positions[1::2], strict=True)
        ]
        return Totals(count, loss, int(micro_batches), int(more), int(invalid), *differ)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


def _pack(device: torch.device, local: LocalWindow, position: tuple[int, int], more: bool) -> Tensor:
    counts = _vector(device, local.counts)
    valid = torch.isfinite(counts) & (counts >= 0)
    tail: list[float] = [len(local.counts), float(more)]
    places: list[float] = []
    for value in position:
        short = float(value % _STEP_MODULUS)
        places += [short, short * short]
    return torch.cat(
        [
            torch.where(valid, counts, 0.0).sum().reshape(1),
            _vector(device, local.losses).sum().reshape(1),
            torch.tensor(tail, dtype=torch.float64, device=device),
            (~valid).sum(dtype=torch.float64).reshape(1),
            torch.tensor(places, dtype=torch.float64, device=device),
        ]
    )


def _vector(device: torch.device, values: Sequence[Count]) -> Tensor:
    """Join host numbers and device scalars into one float64 vector without reading the device."""
    if not any(isinstance(value, Tensor) for value in values):
        return torch.tensor([float(value) for value in values], dtype=torch.float64, device=device)
    return torch.stack(
        [
            torch.as_tensor(value, dtype=torch.float64).to(device, non_blocking=True).reshape(())
            for value in values
        ]
    )
