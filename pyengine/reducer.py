"""Buckets of a custom loop: when each becomes ready, in what order they travel, and how their results land."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from pyengine.accumulator import ExactBucket, Fp32Bucket, NativeBucket
from pyengine.accumulator.base import Saved
from pyengine.header import Header, LocalWindow
from pyengine.layout import Bucket, ParamSpec, backward_order, build
from pyengine.norm import FinalPass, PlainStepper, Stepper
from pyengine.transfers import Transfers
from pyengine.watch import Watch
from pyengine.wire import Wire


class Reducer(Protocol):
    """What the engine asks of whoever owns the gradients: flat buckets of ours, DDP's, or sums on a lazy device.

    Attributes:
        overlaps: whether reductions run inside the window's last backward; if not, that one is like the others.
        stepper: how an optimizer is stepped over these gradients.
    """

    params: Sequence[Parameter]
    names: Sequence[str]
    overlaps: bool
    stepper: Stepper

    def local_window(self, terms: int | None) -> LocalWindow:
        """Return what a window's counts and losses are noted in."""

    def open(self) -> None:
        """A window opens; nothing has been computed yet."""

    def begin(self) -> None:
        """Start the window's first backward with gradients of zero."""

    def before_forward(self, *, syncs: bool) -> None:
        """Hear that a micro-batch was handed out, and whether it is known to be the window's last."""

    def before_header(self) -> None:
        """Launch whatever collective must come before the window's header."""

    def add(self, micro_batch: int, backward: Callable[[], None]) -> None:
        """Run the backward of an earlier micro-batch and take in its gradients. Nothing may travel."""

    def reduce(self, header: Header, backward: Callable[[], None] | None, loss: Tensor | None) -> None:
        """Start every reduction of the window, overlapped with `backward` if there is one."""

    def give_up(self, header: Header) -> None:
        """After a failure inside `reduce`: start what is still missing, voided, so that no rank hangs or steps."""

    def finish(self, header: Header, final: FinalPass) -> None:
        """Wait for the reductions; publish `.grad`, norm and finite flags."""

    def scale_(self, scale: Tensor) -> None:
        """Multiply the published gradients by a 0-dim float32 tensor in one fused pass."""

    def blame(self) -> Callable[[int], list[int] | None]:
        """Return what tells in which micro-batches of this window a parameter was not finite here; None: not watched.

        It outlives the window.
        """

    def save(self) -> Saved:
        """Return copies of what earlier micro-batches of this window have left; nothing for unused parameters."""

    def load(self, saved: Saved, *, done: int) -> None:
        """Go on, in a window that has just begun, from what `save` returned after `done` micro-batches."""

    def refuses_load(self) -> list[str]:
        """Say why `load` cannot work here; empty if it can."""

    def order(self) -> list[int]:
        """Return the order of the buckets' parameters, agreed or observed here; empty if it is not known, or not ours."""

    def follow(self, order: list[int]) -> None:
        """Take over what `order` returned, between windows; every rank alike."""


@dataclass(frozen=True)
class Storage:
    """How buckets sum and travel: wire, accumulator kind, whether every micro-batch is watched for inf and nan, and the
    micro-batches of a full window over all ranks.
    """

    wire: Wire
    accumulator: str
    watch: bool
    terms: int

    def bucket(self, params: Sequence[Parameter], bucket: Bucket) -> NativeBucket | Fp32Bucket | ExactBucket:
        """Make the accumulator of one bucket: narrow parameters need a wider sum unless "native" is asked for."""
        mine = [params[slot.param] for slot in bucket.slots]
        device = mine[0].device
        if self.accumulator == "exact":
            return ExactBucket(bucket, mine, terms=self.terms, device=device)
        if self.accumulator == "fp32" and bucket.dtype.itemsize < torch.float32.itemsize:
            return Fp32Bucket(bucket, mine, wire=self.wire, device=device)
        return NativeBucket(bucket, mine, wire=self.wire, device=device, watch=self.watch)


class BucketReducer:
    """Gradients in flat buckets that we own.

    Reductions start in bucket order on every rank, whatever the order of readiness, so collectives always match. The
    first window uses the reverse of the registration order; rank 0 notes the order in which its gradients really come,
    and before the second window all ranks lay their buckets out in that.

    Args:
        specs: descriptions of `params`, in registration order.
        params: all parameters; those that require no gradient are left alone.
        cap_bytes: size of a bucket.
        comm: transport.
        storage: how buckets sum and travel.
    """

    overlaps = True
    stepper: Stepper = PlainStepper()

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        params: Sequence[Parameter],
        *,
        cap_bytes: int,
        comm: Any,
        storage: Storage,
    ) -> None:
        self.params: Sequence[Parameter] = list(params)
        self.names: Sequence[str] = [spec.name for spec in specs]
        self._specs, self._cap_bytes = list(specs), cap_bytes
        self._storage, self._wire, self._comm = storage, storage.wire, comm
        self._observed: list[int] | None = None
        self._order_is_settled = comm.world_size == 1
        # A parameter's gradient is accumulated on the stream that was current when this node was made. Kept alive, all
        # nodes have one stream, and autograd makes it wait for whichever streams a backward runs on.
        self._nodes = [get_gradient_edge(param).node for param in self.params if param.requires_grad]
        self._lay_out(backward_order(specs))

    def _lay_out(self, order: Sequence[int]) -> None:
        # Old buffers go before new ones come.
        self._buckets: list[NativeBucket | Fp32Bucket | ExactBucket] = []
        self._transfers: Transfers | None = None
        self.layout = build(self._specs, order, cap_bytes=self._cap_bytes, world_size=self._comm.world_size)
        self._buckets = [self._storage.bucket(self.params, bucket) for bucket in self.layout.buckets]
        self._place = {
            slot.param: (bucket.index, position)
            for bucket in self.layout.buckets
            for position, slot in enumerate(bucket.slots)
        }
        # 1/count can wait for the optimizer only if no bucket has to be rewritten anyway.
        self._defers_count = all(bucket.in_place for bucket in self._buckets)

    def local_window(self, terms: int | None) -> LocalWindow:
        """Return what a window's counts and losses are noted in."""
        return LocalWindow(terms)

    def open(self) -> None:
        """Do nothing: old sums are overwritten by the first backward, so that a zero_grad before it does no harm."""

    def begin(self) -> None:
        """Start the window's first backward with gradients of zero."""
        if self._observed is not None and not self._order_is_settled:
            self.follow(self._comm.all_gather_object(self._observed)[0])
        for bucket in self._buckets:
            bucket.begin()

    def before_forward(self, *, syncs: bool) -> None:
        """Do nothing: forwards are not ours."""

    def before_header(self) -> None:
        """Do nothing: no other collective exists."""

    def add(self, micro_batch: int, backward: Callable[[], None]) -> None:
        """Run an earlier backward and take its gradients in, those that need a pass of ours while they are hot."""
        with _watching([watch for bucket in self._buckets for watch in bucket.watches()]):
            backward()
        for bucket in self._buckets:
            bucket.add(micro_batch)

    def reduce(self, header: Header, backward: Callable[[], None] | None, loss: Tensor | None) -> None:
        """Start every bucket's reduction, each as soon as the running backward has completed it."""
        del loss
        self._transfers = Transfers(self._buckets, header, wire=self._wire, comm=self._comm)
        if backward is not None:
            self._overlap(self._transfers, backward)
        self._transfers.start_rest(poison=False)
        if self._observed is None:
            self._observed = backward_order(self._specs)  # a window without a backward tells nothing

    def give_up(self, header: Header) -> None:
        """Send the buckets that a failed backward left behind, voided; all ranks then skip the window."""
        del header
        if self._transfers is not None:
            self._transfers.start_rest(poison=True)

    def finish(self, header: Header, final: FinalPass) -> None:
        """Wait for each bucket in turn and publish it while later ones still travel."""
        inv_count = header.inv_count()
        late = None if self._wire.folds_count or self._defers_count else inv_count
        assert self._transfers is not None
        for bucket in self._transfers.landed():
            bucket.from_wire(late, final)
        self._transfers = None
        if self._defers_count and not self._wire.folds_count:
            final.multiply(inv_count)
        final.settle()

    def scale_(self, scale: Tensor) -> None:
        """Multiply the published gradients, one fused pass a bucket."""
        for bucket in self._buckets:
            bucket.scale_(scale)

    def blame(self) -> Callable[[int], list[int] | None]:
        """Return what tells in which micro-batches of this window a parameter was not finite here; None: not watched."""
        place, tell = self._place, [bucket.blame() for bucket in self._buckets]

        def blame(param: int) -> list[int] | None:
            bucket, slot = place[param]
            return tell[bucket](slot)

        return blame

    def save(self) -> Saved:
        """Return copies of what earlier micro-batches of this window have left; nothing for unused parameters."""
        return {name: parts for bucket in self._buckets for name, parts in bucket.save().items()}

    def load(self, saved: Saved, *, done: int) -> None:
        """Go on, in a window that has just begun, from what `save` returned after `done` micro-batches."""
        for bucket in self._buckets:
            bucket.load(saved, done=done)

    def refuses_load(self) -> list[str]:
        """Return nothing: every load works here."""
        return []

    def order(self) -> list[int]:
        """Return the order of the buckets' parameters, as registration indices: agreed, or observed here."""
        if self._comm.world_size > 1 and self._order_is_settled:
            return [slot.param for bucket in self.layout.buckets for slot in bucket.slots]
        return list(self._observed or [])

    def follow(self, order: list[int]) -> None:
        """Lay the buckets out in an order that all ranks know; parameters that it leaves out come last."""
        self._order_is_settled = True
        expected, seen = backward_order(self._specs), set(order)
        order = [*order, *(index for index in expected if index not in seen)]
        if order != [slot.param for bucket in self.layout.buckets for slot in bucket.slots]:
            # Both view the old buffers, which must go before new ones come.
            for param in self.params:
                param.grad = param.main_grad = None  # type: ignore[attr-defined]
            self._lay_out(order)

    def _overlap(self, transfers: Transfers, backward: Callable[[], None]) -> None:
        """Run the last backward and start each bucket from inside it."""
        hooks = self._observe() if self._observed is None and not self._order_is_settled else []
        for bucket in self._buckets:
            bucket.arm()
        watches = [
            Watch(transfer.bucket.params, transfer.bucket.has_arrived, partial(transfers.complete, transfer))
            for transfer in transfers.all
        ]
        try:
            with _watching(watches):
                backward()
        finally:
            for hook in hooks:
                hook.remove()

    def _observe(self) -> list[Any]:
        """Note the order in which gradients come, once."""
        observed: list[int] = []
        self._observed = observed
        return [
            self.params[index].register_post_accumulate_grad_hook(
                lambda _, index=index: observed.append(index)
            )
            for index in backward_order(self._specs)
        ]


@contextmanager
def _watching(watches: Sequence[Watch]) -> Iterator[None]:
    """Watch during the body, a backward."""
    try:
        for watch in watches:
            watch.start()
        yield
    finally:
        for watch in watches:
            watch.stop()
