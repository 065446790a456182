"""Exact (order-independent) sums of a window over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work, spans_hosts
from pyengine.comm.staged import Staged
from pyengine.gradients.slots import slots_of
from pyengine.gradients.sums import Sum
from pyengine.ops.exact import ExactSum
from pyengine.ops.exact_reference import BLOCK, POISONED
from pyengine.ops.plan import BucketPlan
from pyengine.ops.pointers import Pointers, TensorList


@dataclass(frozen=True)
class Terms:
    """The number of terms in the exact sum of a full window."""

    total: int  # Over all ranks.
    most: int  # On the rank with the most terms, if every rank runs its assigned micro-batches.


class ExactOverRanks(ExactSum, Sum):
    """An exact sum of integers on one rank, and the collectives that add and round the sums of all ranks.

    If ranks span several hosts, each rank sums and rounds one chunk of whole blocks. The integers are sent
    once, and the rounded chunk is sent once as float32. Together these collectives send 1.5 times as many
    bytes as a float32 all-reduce. In two cases the integers are all-reduced instead: within one host, where
    sending bytes is cheaper than copying, and over a transport without an all-to-all. If ranks reduce in
    shared memory, the sum is in that memory and is computed in place.
    """

    def __init__(self, plan: BucketPlan, *, terms: Terms, device: torch.device, comm: Comm) -> None:
        whole = comm.world_size * BLOCK  # the same number of whole blocks for every rank
        numel = -(-max(plan.flat_numel, 1) // whole) * whole
        limbs = comm.allocate(2 * numel, torch.int32, device)
        super().__init__(plan, numel=numel, terms=terms.total, device=device, limbs=limbs)
        self._comm = comm
        self._exchanges = can_exchange(comm) and spans_hosts(comm)
        self._num_rounds = 3 if self._exchanges else 2
        # A float32 tensor of shape `[numel]`, in the memory of `hi`. It holds the rounded sum after `rounds`,
        # until the next deposit, which must have `first=True`.
        self.rounded: Tensor = self.hi.view(torch.float32)
        self._merged_bins = comm.allocate(self.bins.numel(), torch.uint8, device)

    def rounds(self, *, poison: bool = False) -> Staged:
        """Return the collectives that add the sums of all ranks and round the result.

        The first collective all-reduces the largest bin (exponent range) of every block. The later
        collectives add the integers. `poison` makes the sum nan on every rank.

        Cost: an all-reduce of one byte per block. If W ranks exchange chunks, two all-to-alls of 4 bytes per
        element and an all-gather of 4 bytes per element follow. These collectives send 1.5 times as many
        bytes as a float32 all-reduce, and use 8 bytes of memory per element until they have completed; 8
        bytes per element are read, and 12 / W bytes are written. Within a host, an all-reduce of 8 bytes per
        element follows; 8 bytes per element are read, and 4 bytes are written. Before the collectives, 2
        bytes per block are read. If the bin of a block grows, 4 bytes per element are read and 8 bytes are
        written.
        """
        return Staged(self._rounds(poison=poison), self._num_rounds, self.hi.device)

    def _rounds(self, *, poison: bool) -> Iterator[Work]:
        if poison:
            self._merged_bins.fill_(POISONED)
        else:
            self._merged_bins.copy_(self.bins)
        yield self._comm.all_reduce_max(self._merged_bins)
        self.align_(self._merged_bins)
        if self._exchanges:
            yield from self._exchanged()
        else:
            yield self._comm.all_reduce(self.limbs)
            self.round_(self.rounded)

    def _exchanged(self) -> Iterator[Work]:
        """Sum and round one chunk on every rank, then all-gather the chunks."""
        comm = self._comm
        size = self.hi.numel() // comm.world_size
        mine = self.between(comm.rank * size, (comm.rank + 1) * size)
        received = torch.empty_like(self.limbs)
        works = [comm.all_to_all(into, limb) for into, limb in zip(received, self.limbs, strict=True)]
        yield works[1]
        works[0].wait()
        for limb, rows in zip(mine.limbs, received.view(2, comm.world_size, size), strict=True):
            torch.sum(rows, 0, dtype=torch.int32, out=limb)
        del received, rows
        own = mine.hi.view(torch.float32)
        mine.round_(own)
        yield comm.all_gather(self.rounded, own)

    def round_tensors(self) -> list[Tensor]:
        return [self.limbs, self.bins, self._merged_bins]


@dataclass
class _Form:
    """The form of a window's sum: a single float term, or integers."""

    is_integers: bool = False


class TermsOverRanks(ExactOverRanks):
    """An exact sum of one float term per rank; the rank that sums a chunk converts the terms to integers.

    Ranks therefore send no more bytes than in a float32 all-reduce, and the result has the same bits as with
    `ExactOverRanks`. If any rank has more than one term in a window, all ranks send integers.

    A finite term of 2^126 or more makes the sum nan, but is not flagged.

    The first collective, an all-reduce of one byte, determines whether any rank holds integers. If no rank
    does, an all-to-all and an all-gather of 4 bytes per element follow, which together send as many bytes as
    a float32 all-reduce. Then 4 bytes per element are read, and with W ranks 8 / W bytes of the integers are
    read or written. The sum takes 8.02 / W more bytes of memory per element than `ExactOverRanks`.
    """

    def __init__(self, plan: BucketPlan, *, terms: Terms, device: torch.device, comm: Comm) -> None:
        super().__init__(plan, terms=terms, device=device, comm=comm)
        self._num_rounds = 3
        self._exchanges = False  # integers are rare here, so all-reduce them without extra buffers
        self._full_plan, self._terms, self._form = plan, terms.total, _Form()
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._has_integers = comm.allocate(1, torch.uint8, device)
        # The term of this rank is in the memory of one half of the integers (a limb). The terms from other
        # ranks are in the memory of the other half.
        self._received = self.lo.view(torch.float32)
        size = self.hi.numel() // comm.world_size
        self._mine = slice(comm.rank * size, (comm.rank + 1) * size)
        part = _between(plan, self._mine)
        self._part = ExactSum(part, numel=size, terms=terms.total, device=device)
        self._rows = [part.pointers(slots_of(row, part)) for row in self._received.view(-1, size)]
        self._ignored_flags = torch.zeros(len(part.numels), dtype=torch.uint8, device=device)

    def begin(self) -> None:
        self._form.is_integers = False

    def deposit_(self, tensors: TensorList | Pointers, *, first: bool, nonfinite: Tensor) -> None:
        if not first and not self._form.is_integers:
            self._become_integers()
        if self._form.is_integers:
            super().deposit_(tensors, first=first, nonfinite=nonfinite)
        else:
            self._plan.accumulate_(self.rounded, tensors, self._one, first=True, nonfinite=nonfinite)

    def _rounds(self, *, poison: bool) -> Iterator[Work]:
        self._has_integers.fill_(self._form.is_integers)
        yield self._comm.all_reduce_max(self._has_integers)
        if self._has_integers.item():
            if not self._form.is_integers:
                self._become_integers()
            yield from super()._rounds(poison=poison)
            return
        if poison:
            self.rounded.fill_(torch.nan)
        yield self._comm.all_to_all(self._received, self.rounded)
        for number, row in enumerate(self._rows):
            self._part.deposit_(row, first=number == 0, nonfinite=self._ignored_flags)
        own = self.rounded[self._mine]
        self._part.round_(own)
        yield self._comm.all_gather(self.rounded, own)

    def round_tensors(self) -> list[Tensor]:
        return [*super().round_tensors(), self._part.limbs, self._part.bins, self._has_integers]

    def _become_integers(self) -> None:
        """Convert the float term to integers."""
        term = self.rounded.clone()
        self._form.is_integers = True
        self.limbs.zero_()
        self.bins.zero_()
        ignored_flags = torch.zeros(len(self._full_plan.numels), dtype=torch.uint8, device=term.device)
        self.over(self._full_plan).deposit_(
            slots_of(term, self._full_plan), first=True, nonfinite=ignored_flags
        )


def exact_over_ranks(plan: BucketPlan, *, terms: Terms, device: torch.device, comm: Comm) -> ExactOverRanks:
    """Return the exact sum that sends the fewest bytes; see `ExactOverRanks`."""
    sends_terms = terms.most == 1 and can_exchange(comm) and not comm.is_stream_ordered
    kind = TermsOverRanks if sends_terms else ExactOverRanks
    return kind(plan, terms=terms, device=device, comm=comm)


def can_exchange(comm: Comm) -> bool:
    """Whether each rank can sum one chunk for all ranks; False if ranks reduce in shared memory."""
    return comm.world_size > 1 and comm.can_exchange and not comm.has_own_memory


def _between(plan: BucketPlan, bounds: slice) -> BucketPlan:
    """Return the slots, or parts of slots, within `bounds`, with offsets relative to `bounds.start`."""
    found = []
    for offset, numel in zip(plan.offsets, plan.numels, strict=True):
        start, stop = max(offset, bounds.start), min(offset + numel, bounds.stop)
        if start < stop:
            found.append((start - bounds.start, stop - start))
    offsets, numels = zip(*found or [(0, 0)], strict=True)
    return BucketPlan(offsets, numels)
