"""The reductions of a window's buckets: launched in order, and then awaited in order or abandoned."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pyengine.comm.base import Comm, Unbroken, Work
from pyengine.comm.staged import Staged
from pyengine.gradients.bucket import Bucket
from pyengine.ops.capture import is_capturing
from pyengine.ops.device import has_events, recorded_event
from pyengine.ops.trace import span
from pyengine.window.divisor import Divisor
from pyengine.window.header import Header

_log = logging.getLogger("pyengine.gradients")


class SendableBucket(Bucket):
    """A bucket whose sum `Transfers` reduces over ranks."""

    def seal(self) -> None:
        """Record that the last backward, which may still be running, has accumulated every gradient."""

    @abstractmethod
    def send(self, inv_count: Tensor | None, comm: Comm, *, poison: bool) -> Work:
        """Accumulate the gradients of the last backward, and launch the sum over ranks.

        Args:
            inv_count: factor by which the sum is multiplied before it is sent, float32, 0-dim; None for 1.
            comm: transport over the ranks that sum this bucket.
            poison: whether to send nan, so that no rank uses the window.
        """

    def sent_tensors(self) -> list[Tensor]:
        """Return the tensors that a side stream may read after `send`."""
        return []


B = TypeVar("B", bound=SendableBucket)


class Transfer(Generic[B]):
    """The reduction of one bucket in one window."""

    work: Work  # the sum over ranks, after its launch

    def __init__(self, bucket: B, comm: Comm) -> None:
        self.bucket, self.comm = bucket, comm
        # Whether the running backward has accumulated every gradient of the bucket.
        self.is_complete = False
        # Tensors kept alive while a side stream may read them for the reduction. The allocator may reuse the
        # memory for work on the backward's stream after the event `is_read`, or after the backward's stream
        # has waited for the collective on the side stream. `record_stream` is not used, because it costs a
        # microsecond per gradient and creates an event per gradient, which the allocator has to query.
        self.held: list[Tensor] = []
        # An event that marks the last read of these tensors on the side stream.
        self.is_read: torch.Event | None = None


class Transfers(Generic[B]):
    """The reductions of all buckets of one window.

    See [Note: order of collectives in a window] in engine/engine.py. Every rank launches its buckets in
    layout order, regardless of which bucket is complete first and of the bucket's group. A bucket may need
    several collectives. Each further collective is launched together with the next bucket, so that the
    previous collective has had time to complete. If ranks have different buckets, they could then launch
    collectives in different orders and deadlock. To avoid this, such ranks launch the first collectives of
    all buckets before any second collective, and all second collectives before any third. A bucket is
    launched only after the header has arrived, and only if ranks agree in the header.
    """

    def __init__(
        self,
        buckets: Sequence[tuple[B, Comm]],
        header: Header,
        divisor: Divisor,
        *,
        are_alike: bool,
    ) -> None:
        self.all = [Transfer(bucket, comm) for bucket, comm in buckets]
        self.header, self._divisor, self._are_alike = header, divisor, are_alike
        self._next = 0

    def complete(self, transfer: Transfer[B]) -> None:
        """Mark a bucket as complete, and launch every bucket that may be launched now."""
        transfer.is_complete = True
        transfer.bucket.seal()
        # The backward never waits for the header. If the header has not arrived, the bucket is launched
        # together with a later bucket.
        while (
            self._next < len(self.all)
            and self.all[self._next].is_complete
            and self.header.is_ready()
            and not self.header.is_refused()
        ):
            self._launch(poison=False)

    def launch_rest(self, *, poison: bool) -> None:
        """Launch every bucket that has not been launched; with `poison`, fill these buckets with nan."""
        if self.header.is_refused():
            return
        while self._next < len(self.all):
            self._launch(poison=poison)
        staged = [transfer.work for transfer in self.all if isinstance(transfer.work, Staged)]
        for _ in range(1 + max((work.rounds_left for work in staged), default=0)):
            self._launch_later_rounds(self.all)

    def wait_in_order(self) -> Iterator[B]:
        """Wait for each bucket in order, and yield it while later reductions still run."""
        for index, transfer in enumerate(self.all[: self._next]):
            with span("wait for bucket", index):
                transfer.work.wait()
                transfer.held = []
                yield transfer.bucket

    def drop(self) -> None:
        """Release the buckets of an abandoned window, even if collectives are still using their tensors."""
        for transfer in self.all[: self._next]:
            if transfer.held:
                with transfer.comm.side_stream(transfer.held):
                    transfer.held = []

    def _launch(self, *, poison: bool) -> None:
        transfer = self.all[self._next]
        with Unbroken(transfer.comm):
            self._launch_next(transfer, poison=poison)

    def _launch_next(self, transfer: Transfer[B], *, poison: bool) -> None:
        # The factor 1/count is computed from the header. A side stream waits for the header, so the backward
        # does not stall.
        comm = transfer.comm
        tensors = transfer.bucket.sent_tensors() if comm.is_stream_ordered else []
        _log.debug("launch bucket %d of %d%s", self._next, len(self.all), ", with nan" if poison else "")
        with span("launch bucket", self._next), comm.side_stream([]):
            inv_count = self._divisor.before_wire()
            transfer.work = transfer.bucket.send(inv_count, comm, poison=poison)
            transfer.held, device = tensors, transfer.bucket.device
            if tensors and has_events(device) and not is_capturing():
                # Events of captured work cannot be queried, so the tensors are held until `wait_in_order`.
                transfer.is_read = recorded_event(device, enable_timing=False)
        for earlier in self.all[: self._next]:
            if earlier.is_read is not None and earlier.is_read.query():
                earlier.held, earlier.is_read = [], None
        self._next += 1
        if self._are_alike and self._next > 1:
            self._launch_later_rounds(self.all[: self._next - 1])

    def _launch_later_rounds(self, transfers: Sequence[Transfer[B]]) -> None:
        """Launch the next collective of each bucket that needs several collectives.

        The last bucket is launched first, so that its collective runs while the CPU sums the earlier buckets.
        If a stream waits instead of the host, the last call also finishes the bucket on that stream.
        """
        staged = [(each.comm, each.work) for each in reversed(transfers) if isinstance(each.work, Staged)]
        with Unbroken(staged[0][0]) if staged else nullcontext():
            for comm, work in staged:
                if work.rounds_left or comm.is_stream_ordered:
                    with comm.side_stream([]):
                        work.step()
