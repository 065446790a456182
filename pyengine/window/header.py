"""The header: one short all-reduce a window in which ranks agree on count, loss, position and mistakes.

It is launched just before the window's last backward (everything in it is known by then), so it overlaps with
that backward, and it turns disagreement into an error on every rank instead of a hang or a wrong divisor. On
the CPU nothing follows a header in which ranks disagree: another engine's buckets would have other sizes.
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

# The vector: seven numbers, what must be equal on every rank (positions, then the pieces of the digest), each
# with its square, and the losses as lanes of `exact_scalars`.
_COUNT, _MICRO_BATCHES, _, _INVALID, _UNKNOWN, _, _POSITIONS = range(7)
_DIGEST = _POSITIONS + 4
_LOSSES = _DIGEST + 2 * NUM_PIECES
# Behind them, where ranks share batches, what must be 0: lanes of `SharedBatch`.
_SHARED = _LOSSES + exact_scalars.NUM_LANES
# ... how many ranks have scaled no loss although a scaler is set, and how many have: of a batch one rank may
# have all losses. And how many ranks leave the count to the one that counts the batch: then lanes cannot be
# compared.
_UNSCALED, _SCALED, _SILENT = -3, -2, -1

Count = int | float | Tensor

# A micro-batch's: beyond it float64 cannot count one by one, and sums over many could become inf.
MAX_COUNT = 2.0**53


def checked_count(count: object) -> Count:
    """Return a count that can be added up, or raise before anything has run; the header checks its value."""
    if type(count) is int and -MAX_COUNT < count < MAX_COUNT:
        return count  # nearly always
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise ValueError(
                f"count: got a tensor of shape {list(count.shape)}, need one number; use count.sum()"
            )
        if count.dtype is torch.bool or count.is_complex():
            raise TypeError(f"count: got a tensor of {count.dtype}, need a real number of items")
        return count
    if not isinstance(count, Real) or isinstance(count, bool):
        raise TypeError(
            f"count={count!r} is a {type(count).__name__}: need the number of items in the loss, or a 0-dim "
            "tensor of it; leave it out where the loss is a mean"
        )
    try:
        value = float(count)
    except OverflowError:
        return math.inf
    return count if isinstance(count, int | float) else value


# Odd, and without pattern in their bits: splitmix64's (Steele, Lea, Flood 2014), as signed numbers.
_GOLDEN, _MIX, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


@dataclass(frozen=True)
class SharedBatch:
    """The batch that this rank computes together with others, for example under tensor parallelism."""

    index: int  # which batch
    num_ranks: int  # how many share each
    is_counting: bool  # whether this rank counts the batch; one of them does

    def lanes(self, numbers: Tensor) -> Tensor:
        """Return lanes whose sum over all ranks is 0 if the ranks of each batch have the same numbers.

        The result is float64 `[NUM_PIECES]`, whole numbers of 20 bits times `num_ranks`. Where numbers,
        float64 `[n]`, differ all lanes are 0 once in 2^60: every batch mixes its bits in another way, so that
        one difference does not take away another.
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
    """The counts and losses of one rank's window: one entry a micro-batch."""

    # Exact sums need whole counts, so that the sum of counts does not depend on its order either.
    is_exact: bool = False
    max_micro_batches: float = math.inf  # over all ranks; inf: any number
    # Items each loss was summed over; numbers, or 0-dim tensors that stay on their device.
    counts: list[Count] = field(default_factory=list)
    losses: list[Tensor | None] = field(default_factory=list)  # detached, 0-dim; None: not known
    faults: Faults = field(default_factory=Faults)  # what else has gone wrong with the window on this rank
    batch: SharedBatch | None = None  # that this rank shares with others
    is_silent: bool = False  # whether this rank leaves some count to the one that counts the batch
    # Whether this rank had used all of its parameters when the header was launched.
    has_used_all: bool = False
    # Whether its losses were scaled when the header was launched; None without a loss scaler, or a backward.
    has_scaled: bool | None = None

    def append(self, loss: Tensor | None, count: Count) -> None:
        """Note a micro-batch.

        A loss that is not finite is 0 where it counts nothing: the mean over no item is nan.
        """
        if loss is not None and self._is_known(count) and float(count) == 0:
            loss = _finite_where(True, loss)
        self.counts.append(count.detach() if isinstance(count, Tensor) else count)
        self.losses.append(loss)

    def add_to(self, vector: Tensor) -> None:
        """Add to a header's vector what is on an accelerator, unread."""
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
        """Return the values that the host reads without waiting."""
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
        """Note the micro-batches of a window whose work runs again."""
        self.counts, self.losses = list(other.counts), list(other.losses)
        self.is_silent = other.is_silent

    def counts_on(self, device: torch.device) -> Tensor:
        """Return the counts, float64 `[micro-batches]`, without reading counts on a device."""
        counts = send(
            [0.0 if isinstance(n, Tensor) else float(n) for n in self.counts], torch.float64, device
        )
        for index, count in enumerate(self.counts):
            if isinstance(count, Tensor):
                counts[index] = count.reshape(())
        return counts

    def problems(self) -> list[str]:
        """Describe the invalid counts. Reads device counts: for error reports only."""
        return [
            f"count of micro-batch {index} is {float(count)}"
            for index, count in enumerate(self.counts)
            if not self.is_valid(float(count))
        ]

    def described(self) -> str:
        """Describe the counts and whose batch they are of. Reads device counts: for error reports only."""
        counts = ", ".join(f"{float(count):g}" for count in self.counts[:8])
        more = ", ..." if len(self.counts) > 8 else ""
        batch = 0 if self.batch is None else self.batch.index
        return f"batch {batch}: {len(self.counts)} micro-batches of counts [{counts}{more}]"

    def is_valid(self, count: float) -> bool:
        return 0 <= count <= MAX_COUNT and (not self.is_exact or count == math.floor(count))

    def are_valid(self, counts: Tensor) -> Tensor:
        """Do the same for counts on a device: float64 of any shape in, bool of that shape out."""
        valid = (counts >= 0) & (counts <= MAX_COUNT)
        return valid & (counts == counts.floor()) if self.is_exact else valid

    def nonfinite_losses(self) -> list[int]:
        """Return the micro-batches whose loss is inf or nan. Reads device losses: for error reports only."""
        losses = enumerate(self.losses)
        return [index for index, loss in losses if loss is not None and not math.isfinite(loss)]


class RunningWindow(LocalWindow):
    """Adds losses and counts up as they come, so that what a micro-batch adds never depends on how many there
    are. `zeros` are four 0-dim float64 tensors, each a buffer of its own on the device; not written to.
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
        return not isinstance(value, Tensor)  # `append` has added tensors up

    def add_to(self, vector: Tensor) -> None:
        row = [self._zero] * len(vector)  # one addition: each write to an element would be five operations
        row[_LOSSES + exact_scalars.ROUNDED_LANE] = exact_scalars.rounded(self._loss)
        row[_COUNT], row[_INVALID] = self._count, self._invalid
        torch.add(vector, torch.stack(row), out=vector)


def _finite_where(is_nothing: Tensor | bool, losses: Tensor) -> Tensor:
    """Return losses, with 0 in place of inf and nan where nothing was counted: the mean of nothing is nan."""
    return torch.where(~losses.isfinite() & is_nothing, 0.0, losses)


def make_local_window(
    device: torch.device, *, is_exact: bool, max_micro_batches: float, batch: SharedBatch | None
) -> Callable[[], LocalWindow]:
    """Return what makes, for each window of an engine, an empty one to note counts and losses in."""
    if not is_lazy(device):
        return partial(LocalWindow, is_exact, max_micro_batches, batch=batch)
    zeros = [torch.zeros((), dtype=torch.float64, device=device) for _ in range(4)]
    return partial(RunningWindow, is_exact, max_micro_batches, zeros)


@dataclass(frozen=True)
class Totals:
    """Sums over all ranks of a window, on the host."""

    count: float  # items of the window
    loss: float  # sum of its losses, rounded once; without those that are not known
    micro_batches: int  # backwards run for it
    more: int  # ranks that have another window after it
    invalid_counts: int  # micro-batches whose count cannot be summed, and refusals
    unknown_losses: int  # micro-batches whose loss is not known
    not_used_all: int  # ranks that had not used all of their parameters when they launched the header
    differ: bool  # whether ranks are at different places, or claim different things
    batches_differ: bool  # whether ranks that share a batch have counted differently
    is_unscaled: bool  # whether ranks share batches, have a loss scaler, and no rank has scaled a loss

    @classmethod
    def of(cls, numbers: Sequence[float], world_size: int) -> Totals:
        """Read the numbers of a reduced header; see the layout of the vector above."""
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
    """The header of one window; making it launches its all-reduce on every rank.

    Cost: one all-reduce of 184 bytes (232 where ranks share batches), not waited for.
    """

    def __init__(
        self,
        comm: Comm,
        device: torch.device,
        *,
        local: LocalWindow,
        position: tuple[int, int],  # windows completed, steps taken
        has_more: bool,  # whether this rank has another window after this one
        digest: HeaderDigest,
        inv_scale: Tensor | None = None,
    ) -> None:
        self.inv_scale = inv_scale  # of the window's losses, float64 0-dim; None without a loss scale
        self._comm, self._max_micro_batches = comm, local.max_micro_batches
        self.position, self.digest = position, digest
        # What the host knows of it, and the memory to which that was sent; see `again`.
        self._numbers = _numbers(local, position, has_more, digest)
        self._sent = send(self._numbers, torch.float64, device, refills=True)
        self._vector = _with_device_values(self._sent, local, digest)
        _log.debug("window %d: launch header of %d micro-batches", position[0], len(local.counts))
        self._work: Work | None = comm.all_reduce(self._vector)
        self._inv_count: Tensor | None = None
        self._is_visible = _host_may_look(device)
        self.known_totals: Totals | None = None  # if the host has read them
        self.disagreement = ""  # in what ranks differ, once they have compared it: once a header

    def again(
        self, *, local: LocalWindow, position: tuple[int, int], has_more: bool, digest: HeaderDigest
    ) -> Header:
        """Return the header of another window that runs the graph in which this one was captured.

        `fill` it before the graph runs; afterwards its vector is the reduced one.
        """
        other = copy(self)
        other.position, other.digest = position, digest
        other._numbers = _numbers(local, position, has_more, digest)  # noqa: SLF001 - a copy of this object
        other.known_totals, other.disagreement = None, ""
        return other

    def fill(self) -> None:
        """Send the host's numbers to where the graph expects them."""
        refill(self._sent, self._numbers)

    def is_ready(self) -> bool:
        """Whether the totals may be used without a stall: waiting for a stream costs the host nothing."""
        return self._work is None or self._comm.is_stream_ordered or self._work.is_completed()

    def is_refused(self) -> bool:
        """Wait, and return whether ranks disagree, so that nothing may follow; False on a device."""
        return self._is_visible and (self.known_totals or self.totals()).differ

    @property
    def was_refused(self) -> bool:
        """The same, as far as it is known: does not wait."""
        return self._is_visible and self.known_totals is not None and self.known_totals.differ

    def all_used(self) -> bool:
        """Wait, and return whether every rank had used all of its parameters when it launched its header.

        False on a device.
        """
        return self._is_visible and self.totals().not_used_all == 0

    def totals(self) -> Totals:
        """Wait, and read the reduced numbers on the host."""
        if self.known_totals is None:
            self.known_totals = Totals.of(self.vector().tolist(), self._comm.world_size)
        return self.known_totals

    def inv_count(self) -> Tensor:
        """Wait, and return 1 / total count, float32 0-dim on the device; 0 when nothing was counted."""
        vector = self.vector()
        if self._inv_count is None and self._is_visible:
            total = self.totals().count
            self._inv_count = torch.tensor(1 / total if total > 0 else 0.0, dtype=torch.float32, device=HOST)
        elif self._inv_count is None:
            count = vector[_COUNT]
            self._inv_count = count.reciprocal().masked_fill(~(count > 0), 0.0).float()
        return self._inv_count

    def forbids(self) -> Tensor:
        """Return, bool 0-dim on the device, whether the window must not be used: `Totals` has the reason."""
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
        """Wait, and return the reduced numbers, float64 `[23]`, or `[29]` where ranks share batches."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            _log.debug("window %d: header received", self.position[0])
        return self._vector


def _host_may_look(device: torch.device) -> bool:
    """Whether reading a value waits for no device. There nothing follows a header in which ranks disagree."""
    return not runs_ahead(device)


def _numbers(
    local: LocalWindow, position: tuple[int, int], has_more: bool, digest: HeaderDigest
) -> list[float]:
    """Return what the host knows of a header."""
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
    """Return how many times this rank refuses the window, without refusals whose flag is on a device."""
    faults = local.faults
    return len(faults.refusals()) + sum(local.known(faults.flags()))


def _with_device_values(vector: Tensor, local: LocalWindow, digest: HeaderDigest) -> Tensor:
    """Add what is on the device, unread, in place; append lanes where ranks share a batch."""
    local.add_to(vector)
    digest.add_to(vector[_DIGEST:_LOSSES])
    if local.batch is None:
        return vector
    batch = local.batch  # one of the ranks that share it counts it
    lanes = batch.lanes(vector[[_COUNT, _MICRO_BATCHES]])
    if not batch.is_counting:
        vector[[_COUNT, _MICRO_BATCHES, _UNKNOWN]] = 0.0
        vector[_LOSSES:] = 0.0
    flags = local.has_scaled is False, local.has_scaled is True, local.is_silent and not batch.is_counting
    return torch.cat([vector, lanes, send([*map(float, flags)], torch.float64, vector.device)])


def stacked(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return tensors of one element each, of any real types and devices, as float64 `[n]` on `device`."""
    if len({(value.dtype, value.device) for value in values}) > 1:
        values = [value.to(device, torch.float64, non_blocking=True) for value in values]
    scalars = torch.stack([value.reshape(()) for value in values]).detach()
    return scalars.to(device, torch.float64, non_blocking=True)
