"""The base class of all owners of gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from pyengine.comm.base import Comm
from pyengine.gradients.bucket import Accumulator, Observer
from pyengine.gradients.residuals import Residuals
from pyengine.gradients.slots import Saved
from pyengine.step.stepper import Stepper
from pyengine.window.final_pass import FinalPass
from pyengine.window.header import Header
from pyengine.wire import FP32


class Reducer(ABC):
    """Own the gradients of an engine: accumulate them through a window, and reduce them at its end.

    There is one kind for each owner: the engine's flat buckets, DDP's buckets, FSDP2's units, and sums on a
    lazy device. A default says what happens where an owner has nothing to add.

    All tensors are on the parameters' device. `.grad` has its parameter's shape and dtype. Its memory belongs
    to the reducer (under `attach` to DDP), holds the mean from `finish` on, and is overwritten from the next
    `begin` on.
    """

    # ---- set by every reducer ----

    # In registration order, or in DDP's; every index of a parameter below refers to this order.
    params: Sequence[Parameter]
    names: Sequence[str]
    # How an optimizer is stepped over these gradients.
    stepper: Stepper

    # ---- what the owner is like ----

    # Whether the reductions run inside the window's last backward, by `overlap`. Otherwise the header is sent
    # behind that backward, and `reduce` follows it: a lazy device has to record a micro-batch's program
    # without the header, and exact sums of FSDP2's parameters are complete only when the backward has ended.
    overlaps = False
    # Whether every forward launches collectives, so that all ranks have to run as many. A rank that has run
    # out of data then runs padding.
    has_collective_forwards = False
    # By parameter, whether this rank counts its elements in the norm: over all ranks each element once (see
    # `Holdings`). None: all ranks hold the same.
    counted: Sequence[bool] | None = None
    # The outermost FSDP2 module, whose DTensor parameters say which ranks share a shard. None:
    # `groups_of_params` says it.
    model: Any = None
    # What the wire has lost of these gradients and still has to send.
    residuals = Residuals([], FP32())
    # Memory that this rank holds through a window in order to communicate less.
    held_bytes = 0

    @property
    def has_replaced_grad(self) -> bool:
        """Whether the owner has given `.grad` other memory by itself since the last `finish`."""
        return False

    @property
    def saves_local_sums(self) -> bool:
        """Whether `save` returns sums of what this rank holds of its parameters, which no other rank could
        load.
        """
        return bool(self.counted)

    def local_params(self) -> Sequence[Parameter]:
        """Return `params`, with this rank's part in place of each DTensor that the reducer itself divides."""
        return self.params

    def groups_of_params(self) -> tuple[Sequence[Comm], Sequence[int]]:
        """Return the transports over which gradients are summed, and by parameter the index of its own.

        Called only where `model` is None, and not on a lazy device.
        """
        raise NotImplementedError

    def buckets(self) -> Iterable[Accumulator]:
        """Return what sums the gradients of earlier micro-batches. The defaults below go through it."""
        return ()

    # ---- a window, in the order of the calls ----

    def open(self) -> None:
        """Open a window, in which nothing has been computed yet."""

    def before_forward(self, *, syncs: bool) -> None:
        """Note that a micro-batch was handed out, and whether it is known to be the window's last."""

    def begin_padding(self) -> None:
        """Note that the micro-batch handed out is padding: neither its gradients nor what its forward writes
        into buffers may remain. Called only where `has_collective_forwards`.
        """
        raise NotImplementedError

    def preserve_grads(self, roots: Sequence[Tensor | GradientEdge]) -> None:
        """Let a backward of padding leave the `.grad` of all leaves as it is, also of those that the caller
        owns: parameters that FSDP2 ignores, and whatever is behind `roots`.

        Args:
            roots: the tensors that the backward starts from, where they are known.
        """

    def begin(self) -> None:
        """Start the window's first micro-batch with gradients of zero: `.grad` is None, the next sum
        overwrites.
        """
        for bucket in self.buckets():
            bucket.begin()

    @contextmanager
    def add(self) -> Iterator[None]:
        """Accumulate a micro-batch: the gradients that its backwards have added to `.grad` by the end of the
        body.

        The body is the last of its backwards; others may have run before it. Called once a micro-batch, and
        launches no collective. When the body raises, the window is not used.

        Cost: an element of a sum of the parameters' own type, a read and a write in the first micro-batch,
        which autograd adds to in place in later ones; of a narrow gradient with an fp32 sum 6 and 10 bytes;
        of an exact sum 12 and 20 for float32, 10 and 18 for others.
        """
        yield
        self.collect()

    @contextmanager
    def leave_in_grad(self) -> Iterator[None]:
        """Leave the gradients of the backward in the body where autograd adds those of the next micro-batch,
        instead of `add` or `collect`. Launches no collective.
        """
        yield

    def collect(self) -> None:
        """Accumulate a micro-batch as `add` does, once all its backwards have run, or none; also the
        gradients that `keep` has left, without a further micro-batch.
        """
        for bucket in self.buckets():
            bucket.collect()

    def grad_holders(self) -> Sequence[Any] | None:
        """Return by parameter the tensor whose `.grad` is the micro-batch's gradient until it is accumulated,
        or None for a parameter without one. None instead of a list: the parameters themselves.
        """
        return None

    def written_outside_grad(self) -> Sequence[int]:
        """Return the parameters, by index, whose gradient was written elsewhere than to `.grad` since
        `clear_written_outside_grad`.
        """
        return ()

    def clear_written_outside_grad(self) -> None:
        """Note that all of `strays` are accounted for."""

    def observe(self, observer: Observer) -> None:
        """Call `observer` with this rank's own sums of every bucket, before they travel, in every window.

        Raises:
            NotImplementedError: the owner has no such sums in float: exact ones, FSDP2's, an XLA program's.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no sums of this rank alone that could be read before they travel"
        )

    def before_header(self) -> None:
        """Launch the owner's own collectives that have to come before the window's header."""

    def overlap(self, header: Header, roots: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Accumulate the window's last micro-batch, instead of `add`, and launch every reduction as soon as
        the body has completed it. Called only where `overlaps`.

        The body is the last of its backwards; others may have run before it.

        Args:
            header: as for `reduce`, whose cost this has.
            roots: the tensors from which the body's backward starts, of any shape; their graph is read, not
                their values. Empty where they are not known: then less may overlap.

        Raises:
            RuntimeError: a gradient came after its reduction could start.
        """
        raise NotImplementedError

    @abstractmethod
    def reduce(self, header: Header) -> None:
        """Launch every reduction of the window, all of whose micro-batches have been accumulated.

        Args:
            header: launched already; its 1/count and inverse loss scale are multiplied in where the window's
                `Divisor` says.

        Cost: an all-reduce a bucket, of an element of the wire's type for every element (of exact
        sums what `ExactOverRanks.rounds` says); and one of a byte a parameter.
        """

    @abstractmethod
    def give_up(self) -> None:
        """After a failure inside `reduce` or `overlap`: launch the reductions that are still missing, with
        values that void the window, so that no rank waits forever or steps.
        """

    @abstractmethod
    def finish(self, final: FinalPass) -> None:
        """Wait for the reductions; publish `.grad`, sums of squares and finite flags.

        Args:
            final: its `sumsq`, `nonfinite` and `void` are set.

        Cost: one read of an element on the wire and one write of `.grad`; 12 bytes an element more to round
        an exact sum.
        """

    def blame(self) -> Callable[[int], list[int] | None]:
        """Return a function that maps a parameter's index to the micro-batches of this window in which its
        gradient was not finite on this rank; None: not watched.

        The function outlives the window. Calling it waits for the device.
        """
        blames = {
            index: partial(bucket.blame(), slot)
            for bucket in self.buckets()
            for slot, index in enumerate(bucket.indices)
        }
        return lambda index: blames[index]() if index in blames else None

    # ---- states, and the end ----

    def order(self) -> list[int]:
        """Return the order of the buckets' parameters, as registration indices, as agreed on or observed on
        this rank; empty if it is not known, or if the engine does not choose it.
        """
        return []

    def lay_out_as(self, order: list[int]) -> None:
        """Lay the buckets out in an order that `order` has returned, between windows; every rank alike.
        Parameters that are not in it come last.
        """

    def save(self) -> Saved:
        """Return the sums of this window's earlier micro-batches; nothing for unused parameters.

        Returns:
            By parameter name, owned by the caller: copies on the parameters' device (see `Saved`).

        Raises:
            RuntimeError: the sums cannot be saved in the middle of a window.

        Cost: a read and a write of the sums.
        """
        saved: Saved = {}
        for bucket in self.buckets():
            saved |= bucket.save([self.names[index] for index in bucket.indices])
        return saved

    def load(self, saved: Saved, *, done: int) -> None:
        """Continue, in a window that has just begun, from what `save` returned after `done` micro-batches.

        Args:
            saved: read, on any device.

        Cost: a read and a write of the sums.
        """
        for bucket in self.buckets():
            bucket.load(saved, [self.names[index] for index in bucket.indices], done=done)

    def load_problems(self) -> list[str]:
        """Return the reasons why `load` cannot work here; empty if it can."""
        return []

    def sum_forms(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of the sums that `save` returns, for every parameter where these do not
        follow from the parameter and the accumulator.
        """
        return {}

    @abstractmethod
    def release(self, *, keeps_grad: bool) -> None:
        """Leave the parameters as they were before the engine; with `keeps_grad`, `.grad` remains, in memory
        of its own.
        """
