"""The header: a short all-reduce per window in which ranks exchange counts, losses, positions and errors.

The header is launched just before the window's last backward, when its contents are known, so it overlaps
with this backward. If ranks disagree, every rank raises an error, which prevents a hang or a wrong divisor.
On the CPU no collective follows a header in which ranks disagree, because the buckets of another engine may
have different sizes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from numbers import Real
from operator import mul
from typing import Any

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work
from pyengine.ops.device import HOST, is_lazy, refill, runs_ahead, send
from pyengine.window import exact_scalars
from pyengine.window.digest import NUM_PIECES, PIECE_BITS, HeaderDigest
from pyengine.window.faults import Faults

_log = logging.getLogger("pyengine.window")

# Layout of the vector: six numbers; then the values that must be equal on every rank (positions, and the
# integers of the digest), each followed by its square; then the losses as lanes of `exact_scalars`.
_COUNT, _MICRO_BATCHES, _, _INVALID, _UNKNOWN, _, _POSITIONS = range(7)
_DIGEST = _POSITIONS + 4
_LOSSES = _DIGEST + 2 * NUM_PIECES
# If ranks share batches, the lanes of `SharedBatch` follow. Their sums must be 0.
_SHARED = _LOSSES + exact_scalars.NUM_LANES
# The last three elements count ranks: ranks with a loss scaler that have not scaled a loss, ranks that have
# scaled a loss (a single rank may have all losses of a batch), and ranks that leave the count to the counting
# rank. If any rank leaves its count to that rank, the lanes cannot be compared.
_UNSCALED, _SCALED, _SILENT = -3, -2, -1

Count = int | float | Tensor

# The largest count of a micro-batch. Above it, float64 cannot represent every integer, and sums may overflow.
MAX_COUNT = 2.0**53


def checked_count(count: object) -> Count:
    """Return a count that can be summed, or raise an error before any backward; the header checks values."""
    if type(count) is int and -MAX_COUNT < count < MAX_COUNT:
        return count  # this is the usual case
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise ValueError(
                f"count: expected one number, got a tensor of shape {list(count.shape)}; use count.sum()"
            )
        if count.dtype is torch.bool or count.is_complex():
            raise TypeError(
                "count: expected the number of items as an integer or floating-point tensor, got dtype "
                f"{count.dtype}"
            )
        return count
    if not isinstance(count, Real) or isinstance(count, bool):
        raise TypeError(
            f"count={count!r} is a {type(count).__name__}; expected the number of items in the loss, as a "
            "number or a 0-dim tensor; leave count out if the loss is a mean"
        )
    try:
        value = float(count)
    except OverflowError:
        return math.inf
    return count if isinstance(count, int | float) else value


# The constants of splitmix64 (Steele, Lea, Flood 2014), as signed numbers. The constants are odd and have no
# regular bit pattern.
_GOLDEN, _MIX, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


@dataclass(frozen=True)
class SharedBatch:
    """A batch that this rank computes together with other ranks, for example in tensor parallelism."""

    index: int  # Index of the batch.
    num_ranks: int  # Number of ranks that share each batch.
    is_counting: bool  # Whether this rank counts the batch; exactly one rank per batch does.

    def lanes(self, numbers: Tensor) -> Tensor:
        """Return integers whose sum over all ranks is 0 if the ranks of each batch have equal numbers.

        The result (float64 `[NUM_PIECES]`) contains 20-bit integers multiplied by at most `num_ranks`. If
        `numbers` (float64 `[n]`) differ between ranks, all sums are still 0 with probability 2^-60. Every
        batch is hashed differently, so differences in two batches do not cancel.
        """
        mixed = torch.full((), self.index + 1, dtype=torch.int64, device=numbers.device) * _GOLDEN
        for bits in numbers.contiguous().view(torch.int64):
            mixed = _mix(mixed ^ bits)
        pieces = [mixed >> PIECE_BITS * lane & 2**PIECE_BITS - 1 for lane in range(NUM_PIECES)]
        weight = 1 - self.num_ranks if self.is_counting else 1
        return torch.stack(pieces).double() * weight


def _mix(value: Tensor) -> Tensor:
    value = (value ^ (value >> 30 & 2**34 - 1)) * _MIX
    value = (value ^ (value >> 27 & 2**37 - 1)) * _MIX_2
    return value ^ (value >> 31 & 2**33 - 1)


@dataclass
class LocalWindow:
    """The counts and losses of a window on this rank, with one entry per micro-batch."""

    # Whether sums are exact. Exact sums require integer counts, because a sum of integers does not depend on
    # the order.
    is_exact: bool = False
    max_micro_batches: float = math.inf  # Limit over all ranks; inf for no limit.
    # The number of items in each loss, as numbers or as 0-dim tensors that stay on their device.
    counts: list[Count] = field(default_factory=list)
    losses: list[Tensor | None] = field(default_factory=list)  # Detached 0-dim tensors; None if unknown.
    faults: Faults = field(default_factory=Faults)  # Other errors in the window on this rank.
    batch: SharedBatch | None = None  # The batch that this rank shares with other ranks.
    is_silent: bool = False  # Whether this rank leaves a count to the counting rank.
    has_uncounted: bool = False  # Whether a micro-batch was given no count, so that it counts as 1.
    # Whether this rank had used all of its parameters when the header was launched.
    has_used_all: bool = False
    # Whether this rank had scaled its losses when the header was launched. None without a loss scaler or a
    # backward.
    has_scaled: bool | None = None

    def append(self, loss: Tensor | None, count: Count) -> None:
        """Record the loss and count of a micro-batch.

        A nonfinite loss with a count of 0 is recorded as 0, because the mean over no items is nan.
        """
        if loss is not None and self._is_known(count) and float(count) == 0:
            loss = _finite_where(True, loss)
        self.counts.append(count.detach() if isinstance(count, Tensor) else count)
        self.losses.append(loss)

    def add_to(self, vector: Tensor) -> None:
        """Add the values on an accelerator to the vector of a header, without reading them on the host."""
        if losses := self._unread(self.losses):
            values = stacked(losses, vector.device)
            pairs = zip(self.losses, self.counts, strict=True)
            theirs = [count for loss, count in pairs if isinstance(loss, Tensor) and not self._is_known(loss)]
            if len(far := self._unread(theirs)) == len(losses):
                values = _finite_where(stacked(far, vector.device) == 0, values)
            vector[_LOSSES:] += exact_scalars.lanes(values)
        if unread := self._unread(self.counts):
            counts = stacked(unread, vector.device)
            valid = self.are_valid(counts)
            vector[_COUNT] += torch.where(valid, counts, 0.0).sum()
            vector[_INVALID] += (~valid).sum()
        if self.faults and (flags := self._unread(self.faults.flags())):
            vector[_INVALID] += stacked(flags, vector.device).sum()

    def known(self, values: Sequence[Count | None]) -> list[float]:
        """Return the values that the host can read without waiting."""
        if all(map(isinstance, values, repeat((int, float)))):
            return list(map(float, values))  # type: ignore[arg-type]  # numbers
        return [float(value) for value in values if value is not None and self._is_known(value)]

    def _unread(self, values: Sequence[Any]) -> list[Tensor]:
        if not any(map(isinstance, values, repeat(Tensor))):
            return []
        return [value for value in values if isinstance(value, Tensor) and not self._is_known(value)]

    def _is_known(self, value: Count) -> bool:
        return not isinstance(value, Tensor) or _host_may_look(value.device)

    def take(self, other: LocalWindow) -> None:
        """Copy the micro-batches of a window that is replayed."""
        self.counts, self.losses = list(other.counts), list(other.losses)
        self.is_silent = other.is_silent

    def counts_on(self, device: torch.device) -> Tensor:
        """Return the counts on `device` (float64 `[micro-batches]`), without reading them on the host."""
        counts = send(
            [0.0 if isinstance(n, Tensor) else float(n) for n in self.counts], torch.float64, device
        )
        for index, count in enumerate(self.counts):
            if isinstance(count, Tensor):
                counts[index] = count.reshape(())
        return counts

    def problems(self) -> list[str]:
        """Describe the invalid counts for an error message; waits for counts on a device."""
        wrong = [(i, n) for i, n in enumerate(map(float, self.counts)) if not self.is_valid(n)]
        more = [f"counts of {len(wrong) - 1} more micro-batches are invalid, too"] if len(wrong) > 1 else []
        return [f"count of micro-batch {index} is {count}" for index, count in wrong[:1]] + more

    def described(self) -> str:
        """Describe the counts and their batch for an error message; waits for counts on a device."""
        counts = ", ".join(f"{float(count):g}" for count in self.counts[:8])
        more = ", ..." if len(self.counts) > 8 else ""
        batch = 0 if self.batch is None else self.batch.index
        return f"batch {batch}: {len(self.counts)} micro-batches with counts [{counts}{more}]"

    def is_valid(self, count: float) -> bool:
        return 0 <= count <= MAX_COUNT and (not self.is_exact or count == math.floor(count))

    def are_valid(self, counts: Tensor) -> Tensor:
        """Return which `counts` (float64, on a device) are valid, as a bool tensor of the same shape."""
        valid = (counts >= 0) & (counts <= MAX_COUNT)
        return valid & (counts == counts.floor()) if self.is_exact else valid

    def nonfinite_losses(self) -> list[int]:
        """Return the indices of micro-batches whose loss is inf or nan.

        Use this only for error messages: it copies losses to the host, which synchronizes with the device.
        """
        losses = enumerate(self.losses)
        return [index for index, loss in losses if loss is not None and not math.isfinite(loss)]


class RunningWindow(LocalWindow):
    """A window on a lazy device, which sums losses and counts as they arrive.

    Every micro-batch records the same operations, regardless of the number of micro-batches. `zeros` are four
    0-dim float64 tensors on the device, each in separate memory; they are never written.
    """

    def __init__(self, is_exact: bool, max_micro_batches: float, zeros: Sequence[Tensor]) -> None:
        super().__init__(is_exact, max_micro_batches)
        self._loss, self._count, self._invalid, self._zero = zeros

    def append(self, loss: Tensor | None, count: Count) -> None:
        super().append(loss, count)
        if (known_loss := self.losses[-1]) is not None:
            value = known_loss.to(self._loss.device)
            if isinstance(count, Tensor):
                value = _finite_where(count.detach().reshape(()).to(value.device) == 0, value)
            self._loss = self._loss + value
        if isinstance(known := self.counts[-1], Tensor):
            (value,) = stacked([known], self._loss.device)
            valid = self.are_valid(value)
            self._count = self._count + torch.where(valid, value, 0.0)
            self._invalid = self._invalid + (~valid).double()

    def _is_known(self, value: Count) -> bool:
        return not isinstance(value, Tensor)  # `append` has already summed the tensors

    def add_to(self, vector: Tensor) -> None:
        row = [self._zero] * len(vector)  # one addition, because writing one element takes five operations
        row[_LOSSES + exact_scalars.ROUNDED_LANE] = exact_scalars.rounded(self._loss)
        row[_COUNT], row[_INVALID] = self._count, self._invalid
        torch.add(vector, torch.stack(row), out=vector)


def _finite_where(is_nothing: Tensor | bool, losses: Tensor) -> Tensor:
    """Replace inf and nan with 0 in losses without items (`is_nothing`): the mean over no items is nan."""
    return torch.where(~losses.isfinite() & is_nothing, 0.0, losses)


def make_local_window(
    device: torch.device, *, is_exact: bool, max_micro_batches: float, batch: SharedBatch | None
) -> Callable[[], LocalWindow]:
    """Return a function that creates a `LocalWindow` without micro-batches."""
    if not is_lazy(device):
        return partial(LocalWindow, is_exact, max_micro_batches, batch=batch)
    zeros = [torch.zeros((), dtype=torch.float64, device=device) for _ in range(4)]
    return partial(RunningWindow, is_exact, max_micro_batches, zeros)


@dataclass(frozen=True)
class Totals:
    """The sums of a window over all ranks, on the host."""

    count: float  # Number of items in the window.
    loss: float  # Sum of the window's known losses, rounded once.
    micro_batches: int  # Number of micro-batches in the window.
    more: int  # Number of ranks that have another window.
    invalid_counts: int  # Number of micro-batches with an invalid count, plus number of errors on ranks.
    unknown_losses: int  # Number of micro-batches whose loss is unknown.
    not_used_all: int  # Number of ranks that had unused parameters when they launched the header.
    differ: bool  # Whether ranks have different positions or digests.
    batches_differ: bool  # Whether ranks that share a batch have different counts.
    is_unscaled: bool  # Whether ranks share batches and have a loss scaler, but no rank has scaled a loss.

    @classmethod
    def of(cls, numbers: Sequence[float], world_size: int) -> Totals:
        """Read the numbers of a reduced header from its vector, in the layout described above."""
        micro_batches, more, invalid, unknown, not_used_all = map(int, numbers[1:_POSITIONS])
        equal, losses = numbers[_POSITIONS:_LOSSES], numbers[_LOSSES:_SHARED]
        differ = list(map(mul, equal[::2], equal[::2])) != list(map(mul, equal[1::2], repeat(world_size)))
        loss = exact_scalars.total(losses)
        shared = numbers[_SHARED:]
        differs = any(shared[:_UNSCALED]) and not shared[_SILENT]
        unscaled = bool(shared and shared[_UNSCALED] and not shared[_SCALED])
        counted = (micro_batches, more, invalid, unknown, not_used_all)
        return cls(float(numbers[_COUNT]), loss, *counted, differ, differs, unscaled)

    def forbid(self, max_micro_batches: float) -> bool:
        """Whether the window must not be used."""
        is_wrong = self.invalid_counts > 0 or self.differ or self.batches_differ or self.is_unscaled
        return is_wrong or self.count == 0 or self.micro_batches > max_micro_batches


class Header:
    """The header of one window; the constructor launches its all-reduce on every rank.

    Cost: one all-reduce of 184 bytes (232 if ranks share batches), for which the constructor does not wait.
    """

    def __init__(
        self,
        comm: Comm,
        device: torch.device,
        *,
        local: LocalWindow,
        position: tuple[int, int],  # Completed windows, and steps taken.
        has_more: bool,  # Whether this rank has another window.
        digest: HeaderDigest,
        inv_scale: Tensor | None = None,
    ) -> None:
        self.inv_scale = inv_scale  # inverse loss scale of the window (0-dim float64); None without a scaler
        self._comm, self._max_micro_batches = comm, local.max_micro_batches
        self.position, self.digest = position, digest
        # The numbers that the host knows; see `again`.
        self._numbers = _numbers(local, position, has_more, digest)
        # The device memory to which these numbers were sent.
        self._sent = send(self._numbers, torch.float64, device, refills=True)
        self._vector = _with_device_values(self._sent, local, digest)
        _log.debug("window %d: launch header of %d micro-batches", position[0], len(local.counts))
        self._work: Work | None = comm.all_reduce(self._vector)
        self._inv_count: Tensor | None = None
        self._is_visible = _host_may_look(device)
        self.known_totals: Totals | None = None  # None until the host has read the totals.
        self.disagreement = ""  # How ranks differ; empty before ranks have compared the header.

    def again(
        self, *, local: LocalWindow, position: tuple[int, int], has_more: bool, digest: HeaderDigest
    ) -> Header:
        """Return the header of another window, for a replay of the graph that captured this header.

        Call `fill` before the graph runs; afterwards `vector` returns the reduced numbers.
        """
        other = copy(self)
        other.position, other.digest = position, digest
        other._numbers = _numbers(local, position, has_more, digest)  # noqa: SLF001 - a copy of this object
        other.known_totals, other.disagreement = None, ""
        return other

    def fill(self) -> None:
        """Copy the host's numbers to the memory that the graph reads."""
        refill(self._sent, self._numbers)

    def is_ready(self) -> bool:
        """Whether the host can use the totals without waiting; always True if a stream waits instead."""
        return self._work is None or self._comm.is_stream_ordered or self._work.is_completed()

    def is_refused(self) -> bool:
        """Wait, and return whether ranks disagree, so no collective may follow; False on an accelerator."""
        return self._is_visible and (self.known_totals or self.totals()).differ

    @property
    def was_refused(self) -> bool:
        """Whether the host already knows that ranks have different headers; does not wait."""
        return self._is_visible and self.known_totals is not None and self.known_totals.differ

    def all_used(self) -> bool:
        """Wait, and return whether every rank had used all of its parameters when it launched the header.

        Returns False on an accelerator.
        """
        return self._is_visible and self.totals().not_used_all == 0

    def totals(self) -> Totals:
        """Wait, and read the reduced numbers on the host."""
        if self.known_totals is None:
            self.known_totals = Totals.of(self.vector().tolist(), self._comm.world_size)
        return self.known_totals

    def inv_count(self) -> Tensor:
        """Wait, and return 1 / total count as a 0-dim float32 tensor on the device; 0 if the total is 0."""
        vector = self.vector()
        if self._inv_count is None and self._is_visible:
            total = self.totals().count
            self._inv_count = torch.tensor(1 / total if total > 0 else 0.0, dtype=torch.float32, device=HOST)
        elif self._inv_count is None:
            count = vector[_COUNT]
            self._inv_count = count.reciprocal().masked_fill(~(count > 0), 0.0).float()
        return self._inv_count

    def forbids(self) -> Tensor:
        """Return whether the window must not be used (0-dim bool on the device); `Totals` has the reason."""
        if self._is_visible:
            return torch.tensor(self.totals().forbid(self._max_micro_batches), dtype=torch.bool, device=HOST)
        vector = self.vector()
        totals, squares = vector[_POSITIONS:_LOSSES:2], vector[_POSITIONS + 1 : _LOSSES : 2]
        found = (vector[_COUNT] == 0) | (vector[_INVALID] > 0)
        found = found | (self._comm.world_size * squares != totals * totals).any()
        if self._max_micro_batches < math.inf:
            found |= vector[_MICRO_BATCHES] > self._max_micro_batches
        if len(vector) > _SHARED:
            found |= (vector[_SHARED:_UNSCALED] != 0).any() & (vector[_SILENT] == 0)
            found |= (vector[_UNSCALED] > 0) & (vector[_SCALED] == 0)
        return found

    def vector(self) -> Tensor:
        """Wait, and return the reduced numbers: float64 `[23]`, or `[29]` if ranks share batches."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            _log.debug("window %d: header received", self.position[0])
        return self._vector


def _host_may_look(device: torch.device) -> bool:
    """Whether the host can read values on `device` without waiting."""
    return not runs_ahead(device)


def _numbers(
    local: LocalWindow, position: tuple[int, int], has_more: bool, digest: HeaderDigest
) -> list[float]:
    """Return the numbers of a header, as far as the host knows them."""
    known, losses = local.known(local.counts), local.known(local.losses)
    valid = [count for count in known if local.is_valid(count)]
    invalid = len(known) - len(valid) + (_num_refusals(local) if local.faults else 0)
    unknown = len(local.losses) - sum(map(isinstance, local.losses, repeat(Tensor)))
    numbers = [math.fsum(valid), len(local.counts), has_more, invalid, unknown, not local.has_used_all]
    windows, steps = position
    for value in (windows % 2**PIECE_BITS, steps % 2**PIECE_BITS, *digest.pieces()):
        numbers += [value, value * value]
    return [*map(float, numbers), *exact_scalars.lanes_of(losses)]


def _num_refusals(local: LocalWindow) -> float:
    """Return the number of errors on this rank, except errors that depend on a flag on a device."""
    faults = local.faults
    return len(faults.refusals()) + sum(local.known(faults.flags()))


def _with_device_values(vector: Tensor, local: LocalWindow, digest: HeaderDigest) -> Tensor:
    """Add device values in place without reading them; append lanes if ranks share a batch."""
    local.add_to(vector)
    digest.add_to(vector[_DIGEST:_LOSSES])
    if local.batch is None:
        return vector
    batch = local.batch  # exactly one rank counts each batch
    lanes = batch.lanes(vector[[_COUNT, _MICRO_BATCHES]])
    if not batch.is_counting:
        vector[[_COUNT, _MICRO_BATCHES, _UNKNOWN]] = 0.0
        vector[_LOSSES:] = 0.0
    flags = local.has_scaled is False, local.has_scaled is True, local.is_silent and not batch.is_counting
    return torch.cat([vector, lanes, send([*map(float, flags)], torch.float64, vector.device)])


def stacked(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Stack one-element tensors of any real dtypes and devices into one float64 tensor on `device`."""
    if len({(value.dtype, value.device) for value in values}) > 1:
        values = [value.to(device, torch.float64, non_blocking=True) for value in values]
    scalars = torch.stack([value.reshape(()) for value in values]).detach()
    return scalars.to(device, torch.float64, non_blocking=True)
