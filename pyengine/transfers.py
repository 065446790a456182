"""A window's buckets on their way: started in bucket order on every rank, each as soon as a backward has completed it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyengine.accumulator import BucketAccumulator
from pyengine.header import Header
from pyengine.wire import Wire, Work


class Transfer:
    """One bucket under way: whether the running backward has completed it, and its rounds of collectives."""

    def __init__(self, bucket: BucketAccumulator) -> None:
        self.bucket = bucket
        self.is_complete = False
        self.rounds_left = bucket.num_rounds
        self._work: Work | None = None

    def start(self, rounds: Iterator[Work]) -> None:
        """Launch the first round."""
        self._rounds = rounds
        self._launch()

    def go_on(self) -> None:
        """Launch the next round once the last has landed."""
        self.wait()
        self._launch()

    def wait(self) -> None:
        """Wait for what has been launched."""
        assert self._work is not None
        self._work.wait()

    def _launch(self) -> None:
        self._work = next(self._rounds)
        self.rounds_left -= 1


class Transfers:
    """All buckets of one window.

    Collectives start in the same order on every rank, whatever the order of readiness. A bucket's later rounds follow
    when the next bucket starts, so that its first one has had time to land.

    Args:
        buckets: in the order of the layout.
        header: of the window; a narrow wire folds its count in.
        wire, comm: how buckets travel.
    """

    def __init__(
        self, buckets: Sequence[BucketAccumulator], header: Header, *, wire: Wire, comm: Any
    ) -> None:
        self.all = [Transfer(bucket) for bucket in buckets]
        self._header, self._wire, self._comm = header, wire, comm
        self._next = 0

    def complete(self, transfer: Transfer) -> None:
        """Note that the running backward has completed a bucket, and start what can start."""
        transfer.is_complete = True
        while self._next < len(self.all) and self.all[self._next].is_complete:
            # A narrow wire needs the count first. Never stall the backward for it: the bucket goes with the next one.
            if self._wire.folds_count and not self._header.is_ready():
                return
            self._start(poison=False)

    def start_rest(self, *, poison: bool) -> None:
        """Start everything that has not been; `poison` voids the window."""
        while self._next < len(self.all):
            self._start(poison=poison)
        if self.all:
            self._go_on(self.all[-1])

    def landed(self) -> Iterator[BucketAccumulator]:
        """Wait for each bucket in turn, while later ones still travel."""
        for transfer in self.all:
            transfer.wait()
            yield transfer.bucket

    def _start(self, *, poison: bool) -> None:
        transfer = self.all[self._next]
        # A narrow wire needs the count of all ranks: waiting for it must not hold up the backward.
        with self._comm.beside(transfer.bucket.lent()):
            inv_count = self._header.inv_count() if self._wire.folds_count else None
            transfer.start(transfer.bucket.rounds(inv_count, self._wire, self._comm, poison=poison))
        self._next += 1
        if self._next > 1:
            self._go_on(self.all[self._next - 2])

    def _go_on(self, transfer: Transfer) -> None:
        while transfer.rounds_left:
            with self._comm.beside([]):
                transfer.go_on()
