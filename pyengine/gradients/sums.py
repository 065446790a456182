"""The sums of a window, wherever its gradients lie: flat buffers over a plan's slots, without `.grad`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Protocol

import torch
from torch import Tensor

from pyengine.comm.base import Allocates, Comm, Exchanges, Work, flat_zeros
from pyengine.comm.levels import spans_hosts
from pyengine.comm.staged import Staged
from pyengine.ops.exact import ExactSum
from pyengine.ops.exact_reference import BLOCK, POISONED
from pyengine.ops.plan import BucketPlan
from pyengine.ops.pointers import Pointers, TensorList
from pyengine.window.final_pass import FinalPass


class WindowSum(Protocol):
    """A sum over a plan's slots, in memory that it owns as long as it lives: `Fp32Sum`, `ExactSum`."""

    def over(self, plan: BucketPlan) -> WindowSum:
        """Return the same sum, in the same memory, for gradients of some of its slots, which `plan` names."""

    def parts(self, offset: int, numel: int) -> dict[str, Tensor]:
        """Return the memory of one slot's sum, by name: what a checkpoint holds of it (see `Saved`).

        Args:
            offset, numel: of the slot.
        """

    def deposit_(self, grads: TensorList | Pointers, /, *, first: bool, nonfinite: Tensor) -> None:
        """Add a micro-batch's gradients, one a slot.

        Args:
            grads: one entry a slot, `[slot.numel]`, read; None adds nothing.
            first: True overwrites: the sum holds nothing of this window yet.
            nonfinite: uint8 `[slots]`, OR-ed with 1 where a gradient was not finite, or too large for an
                exact sum (2^126).

        Cost: reads a gradient, writes an element of the sum, and reads one unless `first`.
        """


class Fp32Sum:
    """Narrow gradients summed in float32: nothing stops growing after 256 micro-batches.

    Gradients are bfloat16 or float16; `deposit_` moves 10 bytes an element, or 6 if `first`.

    Args:
        plan: slots of the buffer.
        flat: the buffer, float32 `[numel]`; owned by this object from now on.

    Attributes:
        flat: as given.
    """

    def __init__(self, plan: BucketPlan, flat: Tensor) -> None:
        self._plan, self.flat = plan, flat
        self._one = torch.ones((), device=flat.device)

    def over(self, plan: BucketPlan) -> Fp32Sum:
        other = copy(self)
        other._plan = plan
        return other

    def parts(self, offset: int, numel: int) -> dict[str, Tensor]:
        return {"sum": self.flat[offset : offset + numel]}

    def deposit_(self, grads: TensorList | Pointers, /, *, first: bool, nonfinite: Tensor) -> None:
        self._plan.accumulate_(self.flat, grads, self._one, first=first, nonfinite=nonfinite)

    def deposit_into_wire_(
        self,
        wire: Tensor,
        grads: TensorList | Pointers,
        scale: Tensor | None,
        *,
        first: bool,
        nonfinite: Tensor,
    ) -> None:
        """Write (sum + gradients) times `scale` into a wire buffer.

        Args:
            wire: of the wire's type, `[numel]`, written; may be `flat` itself.
            grads, first: as for `deposit_`.
            scale: float32, 0-dim; None for 1.
            nonfinite: uint8 `[slots]`, OR-ed with 1 where a value on the wire is not finite; where that is
                `flat` itself, unscaled, where a gradient is not.

        Cost: one pass; reads 4 bytes (0 if `first`) and a gradient, writes one wire element.
        """
        if wire is self.flat and scale is None:
            self.deposit_(grads, first=first, nonfinite=nonfinite)
        else:
            scale = self._one if scale is None else scale
            self._plan.accumulate_cast_(
                wire, self.flat, grads, self._one, scale, first=first, nonfinite=nonfinite
            )


class ExactOverRanks(ExactSum):
    """An exact sum, and the rounds in which ranks merge theirs and round the result.

    Between hosts each rank adds up and rounds a part of its own, of whole blocks: integers travel once, and
    what they have become once, as float32, 1.5 times the bytes of a float32 all-reduce. Within one host,
    where bytes are cheap and copies are not, and where ranks cannot exchange parts, the integers go through
    an all-reduce. Where ranks reduce in memory that they share, the sum lies there and is added up in place.

    Args:
        plan, terms: as for `ExactSum`.
        numel: elements that are needed; rounded up to whole blocks for every rank.
        device: where it lies.
        comm: by which it travels.
        num_flags: flags that travel with the first round.

    Attributes:
        num_rounds: how many collectives follow each other in `rounds`.
        flags: uint8 `[num_flags]`, written before `rounds`; the largest over all ranks after the first.
        rounded: float32 `[numel]` of the sum, in the memory of `hi`: holds the rounded sum behind `rounds`,
            until the next deposit, a first one.
    """

    def __init__(
        self,
        plan: BucketPlan,
        *,
        numel: int,
        terms: int,
        device: torch.device,
        comm: Comm,
        num_flags: int = 0,
    ) -> None:
        whole = comm.world_size * BLOCK
        numel = -(-numel // whole) * whole
        limbs = flat_zeros(comm, 2 * numel, dtype=torch.int32, device=device)
        super().__init__(plan, numel=numel, terms=terms, device=device, limbs=limbs)
        self._comm = comm
        can_exchange = isinstance(comm, Exchanges) and not isinstance(comm, Allocates)
        self.num_rounds = 3 if comm.world_size > 1 and can_exchange and spans_hosts(comm) else 2
        self.rounded: Tensor = self.hi.view(torch.float32)
        num_marks = self.bins.numel() + num_flags
        self._marks = flat_zeros(comm, num_marks, dtype=torch.uint8, device=device)
        self._merged_bins = self._marks[: self.bins.numel()]
        self.flags = self._marks[self.bins.numel() :]

    def rounds(self, *, poison: bool = False) -> Staged:
        """Start to agree on the largest bin of every block, then add the integers and round them.

        Args:
            poison: make the sum nan on every rank.

        Cost: an all-reduce of a byte a block and flag. Then, with W ranks that exchange parts, two
            all-to-alls of 4 bytes an element and an all-gather of 4, which take 1.5 times the bytes of a
            float32 all-reduce, and memory for 8 while they are under way; 8 bytes an element are read, and
            12 / W written. Within a host an all-reduce of 8 bytes an element; 8 read, and 4 written. Before
            it 2 bytes a block are read, and where a bin grows 4 read and 8 written an element.
        """
        return Staged(self._rounds(poison=poison), self.num_rounds, self.hi.device)

    def _rounds(self, *, poison: bool) -> Iterator[Work]:
        if poison:
            self._merged_bins.fill_(POISONED)
        else:
            self._merged_bins.copy_(self.bins)
        yield self._comm.all_reduce_max(self._marks)
        self.align_(self._merged_bins)
        if self.num_rounds == 3:
            assert isinstance(self._comm, Exchanges)
            yield from self._exchanged(self._comm)
        else:
            yield self._comm.all_reduce(self.limbs)
            self.round_(self.rounded)

    def _exchanged(self, comm: Exchanges) -> Iterator[Work]:
        """Add up and round a part on every rank."""
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
        """Return every tensor that `rounds` uses."""
        return [self.limbs, self.bins, self._marks]


class SlotNorms:
    """One read of reduced gradients: their norm and finite flags.

    Args:
        plan: their slots.
        params: indices of the slots' parameters, in the order of registration.
        device: where they lie.

    Attributes:
        params: int64 `[slots]`, as given.
    """

    def __init__(self, plan: BucketPlan, params: Sequence[int], device: torch.device) -> None:
        self._plan = plan
        self.params = torch.tensor(params, device=device)
        self._sumsq = torch.zeros(len(params), dtype=torch.float64, device=device)
        self._nonfinite = torch.zeros(len(params), dtype=torch.uint8, device=device)

    def read(
        self,
        sources: TensorList | Pointers,
        out: TensorList | Pointers | None,
        scale: Tensor,
        final: FinalPass,
    ) -> None:
        """Read the slots once, times `scale`; leave norm and finite flags in `final`.

        Args:
            sources: one entry a slot, `[slot.numel]`, read.
            out: written, in its own dtype; may be `sources`. None writes nothing.
            scale: float32, 0-dim.
            final: its `sumsq` and `nonfinite` are written at `params`.

        Cost: reads one element; writes one if `out` is given.
        """
        self._plan.unscale_norm(sources, out, scale, sumsq=self._sumsq, nonfinite=self._nonfinite.zero_())
        final.sumsq.index_copy_(0, self.params, self._sumsq)
        final.nonfinite.index_copy_(0, self.params, self._nonfinite)

    def scale_(self, tensors: TensorList | Pointers, scale: Tensor) -> None:
        """Multiply the slots in place by `scale`, float32, 0-dim: reads and writes one element each."""
        self._plan.unscale_norm(tensors, tensors, scale, sumsq=self._sumsq, nonfinite=self._nonfinite)

    def flags(self, sources: TensorList | Pointers, one: Tensor) -> Tensor:
        """Return which slots are not finite, uint8 `[slots]`, the caller's.

        Args:
            sources: as for `read`.
            one: float32, 0-dim, 1.

        Cost: reads one element.
        """
        flags = torch.zeros_like(self._nonfinite)
        self._plan.unscale_norm(sources, None, one, sumsq=self._sumsq, nonfinite=flags)
        return flags
