"""A window's buckets on their way: started in bucket order on every rank,
each as soon as a backward has completed it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Work
from pyengine.comm.staged import Staged
from pyengine.gradients.groups import Groups
from pyengine.gradients.own_buckets import OwnBucket
from pyengine.ops.device import has_events, recorded_event
from pyengine.ops.trace import span
from pyengine.window.divisor import Divisor
from pyengine.window.header import Header


class Lent:
    """Tensors of the backward's stream, kept while a side stream may still read them.

    Their memory goes back to the backward's stream once the side stream is known to be done, or once the
    former has waited for what the latter started: `record_stream` would cost a microsecond a gradient, and an
    event for each that the allocator has to ask after.

    Args:
        tensors: read by what the current stream, a side stream, has been given.
        device: where they lie.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self.tensors = list(tensors)
        self._event = recorded_event(device, enable_timing=False) if has_events(device) else None

    def is_over(self) -> bool:
        """Whether it is known that nobody reads them any more; nobody waits."""
        return self._event is not None and self._event.query()


class Transfer:
    """One bucket under way.

    Attributes:
        bucket: what travels.
        is_complete: whether every gradient of the running backward has come.
        is_held: whether it waits for the end of the backward: some gradient may come again.
        lent: what a side stream reads for it.
        work: its sum over ranks, once it has started.
    """

    work: Work

    def __init__(self, bucket: OwnBucket, *, is_held: bool) -> None:
        self.bucket = bucket
        self.is_complete = False
        self.is_held = is_held
        self.lent: Lent | None = None


class Transfers:
    """All buckets of one window.

    Collectives start in the same order on every rank, whatever the order of readiness, and of whatever group.
    Each later one of a bucket follows when a next bucket starts, so that the one before has had time to land.
    Ranks that have other buckets than this one may start them in another order, and would wait for each
    other: there all first ones come before any second one, and these before any third. None starts before the
    header has come, and none at all if ranks disagree in it.

    Args:
        buckets: in the order of the layout.
        header: of the window.
        divisor: what comes in on the way to the wire.
        groups: over which ranks each bucket is summed.
        held: indices of buckets that wait for the end of the backward.

    Attributes:
        header: as given.
    """

    def __init__(
        self,
        buckets: Sequence[OwnBucket],
        header: Header,
        divisor: Divisor,
        *,
        groups: Groups,
        held: Collection[int] = (),
    ) -> None:
        self.all = [Transfer(bucket, is_held=index in held) for index, bucket in enumerate(buckets)]
        self.header, self._divisor, self._groups = header, divisor, groups
        self._next = 0

    def complete(self, transfer: Transfer) -> None:
        """Note that the running backward has completed a bucket, and start what can start."""
        if transfer.is_held:
            return
        transfer.is_complete = True
        transfer.bucket.seal()
        while self._next < len(self.all) and self._may_start(self.all[self._next]):
            self._start(poison=False)

    def start_rest(self, *, poison: bool) -> None:
        """Start every bucket that has not been; `poison` voids the window."""
        if self.header.is_refused():
            return
        while self._next < len(self.all):
            self._start(poison=poison)
        staged = [transfer.work for transfer in self.all if isinstance(transfer.work, Staged)]
        for _ in range(1 + max((work.rounds_left for work in staged), default=0)):
            self._start_later(self.all)

    def late(self) -> list[tuple[OwnBucket, int]]:
        """Return the slots, with their buckets, that the backward has added to after it had seemed to
        complete them.
        """
        complete = [transfer.bucket for transfer in self.all if transfer.is_complete]
        return [(bucket, slot) for bucket in complete for slot in bucket.late()]

    def landed(self) -> Iterator[OwnBucket]:
        """Wait for each bucket in turn, while later ones still travel."""
        for index, transfer in enumerate(self.all[: self._next]):
            with span("land bucket", index):
                transfer.work.wait()
                transfer.lent = None
                yield transfer.bucket

    def drop(self) -> None:
        """Let go of buckets that nobody waits for: what has started still runs over their memory."""
        for transfer in self.all[: self._next]:
            if transfer.lent is not None:
                with self._comm(transfer).side_stream(transfer.lent.tensors):
                    transfer.lent = None

    def _may_start(self, transfer: Transfer) -> bool:
        """Whether a bucket may go now. The backward never stalls for the header:
        the bucket goes with the next one.
        """
        return transfer.is_complete and self.header.is_ready() and not self.header.is_refused()

    def _start(self, *, poison: bool) -> None:
        transfer = self.all[self._next]
        # A wire of means needs the count of all ranks: waiting for it must not hold up the backward.
        comm = self._comm(transfer)
        tensors = transfer.bucket.sent_tensors() if comm.is_stream_ordered else []
        with span("launch bucket", self._next), comm.side_stream([]):
            inv_count = self._divisor.before_wire()
            transfer.work = transfer.bucket.send(inv_count, comm, poison=poison)
            if comm.is_stream_ordered:
                transfer.lent = Lent(tensors, transfer.bucket.device)
        self._take_back()
        self._next += 1
        if self._groups.are_alike:
            self._start_later(self.all[: self._next - 1])

    def _take_back(self) -> None:
        """Let go of what side streams are done with."""
        for transfer in self.all[: self._next]:
            if transfer.lent is not None and transfer.lent.is_over():
                transfer.lent = None

    def _comm(self, transfer: Transfer) -> Comm:
        return self._groups.comms[transfer.bucket.spec.group]

    def _start_later(self, transfers: Sequence[Transfer]) -> None:
        """Start the next collective of buckets under way; where a stream waits, it does the rest, too.

        The last bucket comes first: what it sends travels while those before it are added up.
        """
        for transfer in reversed(transfers):
            comm, work = self._comm(transfer), transfer.work
            if isinstance(work, Staged) and (work.rounds_left or comm.is_stream_ordered):
                with comm.side_stream([]):
                    work.step()
