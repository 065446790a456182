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

from pyengine import scalars
from pyengine.host import send
from pyengine.wire import Comm, Work

# Sums in float64 are exact up to 2^53: squares of 20-bit numbers over up to 8192 ranks stay below it.
_STEP_MODULUS = 2**20

# The vector: four numbers, each position with its square, and the losses as lanes of `scalars`.
_COUNT, _MICRO_BATCHES, _, _INVALID, _POSITIONS = range(5)
_LOSSES = _POSITIONS + 4

Count = int | float | Tensor


@dataclass
class LocalWindow:
    """What one rank says of its window: one entry a micro-batch.

    Attributes:
        terms: the most micro-batches over all ranks that an exact sum may take, where counts have to be whole numbers,
            so that their sum does not depend on its order either; None for other sums.
        counts: items each loss was summed over; numbers, or 0-dim tensors that stay on their device.
        losses: the losses, detached 0-dim tensors.
    """

    terms: int | None = None
    counts: list[Count] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    def take(self, loss: Tensor, count: Count) -> None:
        """Note a micro-batch, whose backward is about to run."""
        self.counts.append(count)
        self.losses.append(loss.detach())

    def add_to(self, vector: Tensor) -> None:
        """Add to a header's vector what lives on its device, unread: the losses, and counts that are tensors."""
        if self.losses:
            vector[_LOSSES:] = scalars.lanes(_stack(self.losses, vector.device))
        unread = [count for count in self.counts if isinstance(count, Tensor)]
        if unread:
            counts = _stack(unread, vector.device)
            valid = self.are_valid(counts)
            vector[_COUNT] += torch.where(valid, counts, 0.0).sum()
            vector[_INVALID] += (~valid).sum()

    def problems(self) -> list[str]:
        """Describe the invalid counts. Reads device counts: for error reports only."""
        return [
            f"count of micro-batch {index} is {float(count)}"
            for index, count in enumerate(self.counts)
            if not self.is_valid(float(count))
        ]

    def is_valid(self, count: float) -> bool:
        """Whether a count may be summed."""
        return math.isfinite(count) and count >= 0 and (self.terms is None or count == math.floor(count))

    def are_valid(self, counts: Tensor) -> Tensor:
        """Tell the same of counts on a device."""
        valid = torch.isfinite(counts) & (counts >= 0)
        return valid if self.terms is None else valid & (counts == counts.floor())

    def nonfinite_losses(self) -> list[int]:
        """Return the micro-batches whose loss is inf or nan. Reads device losses: for error reports only."""
        return [index for index, loss in enumerate(self.losses) if not math.isfinite(loss)]


class RunningWindow(LocalWindow):
    """Adds losses and counts up as they come, so that what a micro-batch adds never depends on how many there are.

    Args:
        terms: as for `LocalWindow`.
        zeros: three 0-dim float64 tensors, each a buffer of its own on the device; not written to.
    """

    def __init__(self, terms: int | None, zeros: Sequence[Tensor]) -> None:
        super().__init__(terms)
        self._loss, self._count, self._invalid = zeros

    def take(self, loss: Tensor, count: Count) -> None:
        """Note a micro-batch, whose backward is about to run."""
        super().take(loss, count)
        self._loss = self._loss + _stack([loss], self._loss.device)[0]
        if isinstance(count, Tensor):
            (value,) = _stack([count], self._loss.device)
            valid = self.are_valid(value)
            self._count = self._count + torch.where(valid, value, 0.0)
            self._invalid = self._invalid + (~valid).double()

    def add_to(self, vector: Tensor) -> None:
        """Add the sums to a header's vector."""
        vector[_LOSSES:] = scalars.rounded(self._loss)
        vector[_COUNT] += self._count
        vector[_INVALID] += self._invalid


@dataclass(frozen=True)
class Totals:
    """Sums over all ranks of a window, on the host."""

    count: float
    loss: float
    micro_batches: int
    more: int
    invalid_counts: int
    windows_differ: bool
    optimizer_steps_differ: bool

    @classmethod
    def of(cls, numbers: Sequence[float], world_size: int) -> Totals:
        """Read a reduced header."""
        count, micro_batches, more, invalid = numbers[:_POSITIONS]
        positions, losses = numbers[_POSITIONS:_LOSSES], numbers[_LOSSES:]
        differ = [
            world_size * squares != total * total
            for total, squares in zip(positions[::2], positions[1::2], strict=True)
        ]
        return cls(count, scalars.total(losses), int(micro_batches), int(more), int(invalid), *differ)


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
        self._comm, self._terms = comm, local.terms
        self._vector = _pack(device, local, position, more)
        self._work: Work | None = comm.all_reduce(self._vector)
        self._inv_count: Tensor | None = None

    def is_ready(self) -> bool:
        """Whether the totals may be used without stalling anybody: waiting for a stream costs the host nothing."""
        return self._work is None or self._comm.is_stream_ordered or self._work.is_completed()

    def inv_count(self) -> Tensor:
        """Wait, and return 1 / total count as a 0-dim float32 tensor on the device; 0 when nothing was counted."""
        vector = self.vector()
        if self._inv_count is None:
            count = vector[_COUNT]
            self._inv_count = torch.where(count > 0, 1.0 / count, torch.zeros_like(count)).float()
        return self._inv_count

    def forbids(self) -> Tensor:
        """Return, as a 0-dim bool on the device, whether the window must not be used: `Totals` says why."""
        vector = self.vector()
        totals, squares = vector[_POSITIONS:_LOSSES:2], vector[_POSITIONS + 1 : _LOSSES : 2]
        differ = (self._comm.world_size * squares != totals * totals).any()
        too_many = vector[_MICRO_BATCHES] > (math.inf if self._terms is None else self._terms)
        return (vector[_COUNT] == 0) | (vector[_INVALID] > 0) | differ | too_many

    def vector(self) -> Tensor:
        """Wait, and return the reduced numbers, float64 `[15]`; see `Totals.of`."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._vector


def _pack(device: torch.device, local: LocalWindow, position: tuple[int, int], more: bool) -> Tensor:
    """Write this rank's numbers; those that live on the device are added there, unread."""
    known = [float(count) for count in local.counts if not isinstance(count, Tensor)]
    valid = [count for count in known if local.is_valid(count)]
    numbers = [math.fsum(valid), len(local.counts), more, len(known) - len(valid)]
    for value in position:
        short = value % _STEP_MODULUS
        numbers += [short, short * short]
    vector = send([*map(float, numbers), *[0.0] * scalars.NUM_LANES], torch.float64, device)
    local.add_to(vector)
    return vector


def _stack(values: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.stack(
        [value.detach().to(device, torch.float64, non_blocking=True).reshape(()) for value in values]
    )
