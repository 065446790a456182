"""The communication hook's part in one window of `attach`."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.futures import Future

from pyengine.comm import TorchDist
from pyengine.comm.promise import Promise
from pyengine.gradients.ddp.bucket_norms import BucketNorms
from pyengine.gradients.ddp.buckets import DDPBuckets, ExactDDPBucket, Fp32DDPBucket, GradSums
from pyengine.gradients.ddp.hook import HookState, Launched, completed, exchange, launch
from pyengine.gradients.ddp.passes import Passes
from pyengine.gradients.used_anywhere import Told
from pyengine.ops.device import runs_ahead
from pyengine.window.divisor import Divisor
from pyengine.window.header import Header


class Reduction:
    """What becomes of a window's buckets: sums over ranks, with the window's divisor.

    Args:
        state: the hook's.
        header: of the window; nothing follows one in which ranks disagree.
        divisor: of the window.
        buckets: sums of earlier micro-batches in memory of their own, if any.
        in_grad: sums that autograd keeps in `.grad`, if any.
        norms: of what lands.

    Attributes:
        header, divisor: as given.
        may_hold: whether a bucket that comes before the header may wait for a later one, so that the backward
            need not: where DDP is sure to hand out its last one.
        is_complete: whether every bucket has been handed out.
        poison: whether what is sent from now on voids the window.
        failures: what has broken collectives: nobody knows then what the other ranks have.
        under_way: buckets that DDP has handed out, sent or still waiting for the header, with their futures.
        used: which parameters ranks have used; None where that was not told.
        without_grad: parameters that had no `.grad` when DDP handed their bucket out.
        kept: those in whose `.grad` earlier micro-batches had left something to be sent, before the last
            backward.
    """

    def __init__(
        self,
        state: HookState,
        header: Header,
        divisor: Divisor,
        buckets: DDPBuckets | None,
        in_grad: GradSums | None,
        norms: BucketNorms,
    ) -> None:
        self._state, self.header, self.divisor = state, header, divisor
        self._buckets, self._in_grad, self._norms = buckets, in_grad, norms
        norms.begin()
        self.may_hold = self.is_complete = self.poison = False
        self._held: list[tuple[Any, Promise]] = []
        self.failures: list[Exception] = []
        self.under_way: list[tuple[Any, Any]] = []
        self.without_grad: list[Any] = []
        self.kept: list[Any] = []
        self.used: Told | None = None

    def reduce(self, bucket: Any) -> Future[Tensor]:
        """Start to sum a bucket that DDP hands out, and those before it that have waited for the header.

        Returns:
            A future of the bucket's buffer, `[numel]` in the gradients' type: DDP's memory, summed over ranks
            and times what the divisor leaves to this place. Behind a header in which ranks disagree: as it
            is.
        """
        self.without_grad += [param for param in bucket.parameters() if param.grad is None]
        if self._in_grad is not None:
            self._in_grad.check_last(bucket)
        flat = bucket.buffer()
        if self.may_hold and not (bucket.is_last() or runs_ahead(flat.device) or self.header.is_ready()):
            promise = Promise()
            self._held.append((bucket, promise))
            future = self._state.call_back(promise.future, Future.value)  # DDP wants errors that are its own
        else:
            self.send_held()
            future = self._send(bucket)
        self.under_way.append((bucket, future))
        self.is_complete = self.is_complete or bucket.is_last()
        return future

    def send_held(self) -> None:
        """Start to sum the buckets that have waited for the header, in their order."""
        while self._held:
            bucket, promise = self._held[0]
            future = self._send(bucket)
            del self._held[0]  # not before: what cannot be sent is tried again, and fails again
            self._state.call_back(future, promise.keep)

    def _send(self, bucket: Any) -> Future[Tensor]:
        if self.header.is_refused():
            return completed(bucket.buffer())
        return exchange(self._state, bucket, partial(self._start, bucket), failures=self.failures)

    def _start(self, bucket: Any, comm: TorchDist) -> Launched:
        total = None if self._buckets is None else self._buckets.of(bucket)
        norms = self._norms.of(bucket)
        if isinstance(total, ExactDDPBucket):
            return total.launch(bucket.buffer(), self.divisor.after_wire, norms, poison=self.poison)

        def fill(flat: Tensor, scale: Tensor) -> bool:
            if self.poison:
                flat.fill_(float("nan"))
                return True
            return isinstance(total, Fp32DDPBucket) and total.fill(bucket.buffer(), flat, scale)

        passes = Passes(
            before=lambda _: self.divisor.before_wire(),
            after=lambda _: self.divisor.after_wire(),
            fill=fill,
            norms=norms,
        )
        return launch(self._state, bucket, comm, passes)
