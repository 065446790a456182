"""The base class of all owners of gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.comm.base import Comm
from pyengine.gradients.bucket import Bucket, Observer
from pyengine.gradients.grad_record import GradRecord
from pyengine.gradients.padding import Padding
from pyengine.step.stepper import PlainStepper, Stepper
from pyengine.window.final_pass import FinalPass
from pyengine.window.header import Header
from pyengine.wire import FP32, Wire
from pyengine.wire.bucket_wire import WireMemory


class Residuals:
    """The residuals that wires keep between windows, of one or more owners of buckets.

    They are multiplied by a loss scale as gradients are, by that of the last window.
    """

    def __init__(
        self,
        owners: Sequence[tuple[WireMemory, Mapping[str, Hashable]]],
        wire: Wire,
        numels: Mapping[str, int],
    ) -> None:
        # The memory of each owner, and in it the key of each parameter by name.
        self.owners, self.wire = list(owners), wire
        # By name, the elements of each parameter's residual.
        self.numels = dict(numels)
        self.is_kept = wire.keeps_residual
        # By what they are multiplied, float32, 0-dim; None as long as there has been no loss scale.
        self._scale: Tensor | None = None

    def save(self) -> dict[str, Tensor]:
        """Return copies of the residuals by name, float32 `[numel]` in storage order."""
        saved = {}
        for memory, key_of in self.owners:
            parts = memory.parts()
            saved.update({name: parts[key].clone() for name, key in key_of.items() if key in parts})
        return saved

    def load(self, saved: Mapping[str, Tensor], scale: Tensor | None) -> None:
        """Overwrite all residuals, with zeros where `saved` has none; `scale` is that of `follow`."""
        self.follow(scale)
        for memory, key_of in self.owners:
            memory.load({key: saved[name] for name, key in key_of.items() if name in saved})

    def follow(self, scale: Tensor | None) -> None:
        """Multiply the residuals by `scale`, the loss scale from now on, 0-dim, in place of the one before.

        None: losses are not scaled. (A captured window reads and writes `_scale` where it is.)
        """
        if self._scale is None:
            if scale is None:
                return
            self._scale = torch.ones_like(scale)
        now = torch.ones_like(self._scale) if scale is None else scale
        for memory, _ in self.owners:
            memory.scale_(now / self._scale)
        self._scale.copy_(now)

    def drop_if(self, is_unused: Tensor) -> None:
        """Zero the last window's residuals if it must not be used: if `is_unused`, 0-dim, is not 0."""
        for memory, _ in self.owners:
            memory.drop(is_unused)


def not_reduced(details: str = "") -> RuntimeError:
    """Return the error of `finish` where a collective has failed on this rank."""
    return RuntimeError(
        f"gradients were not reduced: a collective failed on this rank{details}. This rank does not step, "
        "and other ranks may have stepped: restart all ranks from a checkpoint"
    )


class Then(AbstractContextManager[None]):
    """Calls `action` behind a body that has raised nothing. A class: a generator costs four times as much."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._action()


class Reducer(ABC):
    """Own the gradients of an engine: accumulate them over a window and reduce them at its end.

    There is one subclass for each owner: the engine's flat buckets, FSDP2's units, and sums on a lazy device.
    A default implementation serves owners that have nothing to add.

    All tensors are on the parameters' device. `.grad` has the shape and dtype of its parameter. The memory of
    `.grad` belongs to the reducer, holds the mean from `finish` on, and is overwritten from the next `begin`
    on.
    """

    # ---- set by every reducer ----

    # In registration order. Every parameter index below refers to this order.
    params: Sequence[Parameter]
    names: Sequence[str]

    # ---- properties of the owner ----

    # Whether `overlap` launches the reductions inside the window's last backward. False: the header is
    # launched after that backward, and `reduce` follows. A lazy device has to record a micro-batch's program
    # without the header, and exact sums of FSDP2's parameters are complete only when the backward has ended.
    overlaps = False
    # Whether every forward launches collectives. Then all ranks have to run the same number of forwards, and
    # a rank without data runs padding.
    has_collective_forwards = False
    # By parameter, whether this rank adds its elements to the norm, so that over all ranks every element is
    # added once (see `ShardedNorm`). None: all ranks hold the same elements.
    counted: Sequence[bool] | None = None
    # Whether this rank holds all elements of all parameters where ranks count their own.
    holds_all = False
    # The outermost FSDP2 module, whose DTensor parameters show which ranks share a shard. None:
    # `groups_of_params` returns the groups.
    model: Any = None
    # The part of these gradients that a narrow wire has rounded away and adds to a later window.
    residuals = Residuals([], FP32(), {})
    # Bytes that this rank holds through a window in order to communicate less often.
    held_bytes = 0
    # Called with this rank's own sums of every bucket, in every window before the all-reduce. None: the owner
    # has no such float sums, but exact ones, FSDP2's units, or an XLA program.
    observers: list[Observer] | None = None
    # Runs micro-batches that only other ranks need. None: no forward is collective, so there are none.
    padding: Padding | None = None

    @cached_property
    def grad_record(self) -> GradRecord:
        """Shows which gradients others have written to between micro-batches."""
        return GradRecord(self.params)

    @cached_property
    def stepper(self) -> Stepper:
        """Steps an optimizer over these gradients, or skips the step."""
        return PlainStepper()

    def local_params(self) -> Sequence[Parameter]:
        """Return `params` with this rank's local tensor of each DTensor that FSDP2 does not shard."""
        return self.params

    def groups_of_params(self) -> tuple[Sequence[Comm], Sequence[int]]:
        """Return the transports, and by parameter its transport's index.

        Called only where `model` is None, and not on a lazy device.
        """
        raise NotImplementedError

    def buckets(self) -> Iterable[Bucket]:
        """Return the sums of earlier micro-batches' gradients, over which default methods loop."""
        return ()

    # ---- a window, in the order of calls ----

    def open(self) -> None:
        """Open a window, before any of its forwards."""

    def abandon(self) -> None:
        """Put the model into its state between windows: the open window was dropped, or has been used."""

    def begin(self) -> None:
        """Start the first micro-batch: `.grad` is None, and the next gradients overwrite the sums."""
        for bucket in self.buckets():
            bucket.begin()

    def add(self) -> AbstractContextManager[None]:
        """Accumulate the gradients that a micro-batch's backwards have added to `.grad`.

        The body is the last of the micro-batch's backwards; others may have run before it. Called once a
        micro-batch. Launches no collective. When the body raises, the window is not used.
        """
        return Then(self.collect)

    def leave_in_grad(self) -> AbstractContextManager[None]:
        """Leave the gradients of the body in `.grad`, where autograd adds those of the next micro-batch.

        Used instead of `add` or `collect`. Launches no collective.
        """
        return nullcontext()

    def collect(self) -> None:
        """Accumulate a micro-batch whose backwards, if any, have all run.

        Also accumulates gradients that `leave_in_grad` has left, without a further micro-batch.
        """
        for bucket in self.buckets():
            bucket.collect()

    def is_used(self, index: int) -> bool:
        """Whether a micro-batch accumulated so far has used a parameter on this rank; True if not known."""
        del index
        return True

    def has_used_all(self) -> bool:
        """Whether the micro-batches accumulated so far have used all parameters on this rank.

        False also where that is not known. The owner then all-reduces flags of what each rank has used.
        """
        return False

    def overlap(self, header: Header, roots: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Accumulate the last micro-batch; launch reductions inside its backward.

        Used instead of `add`, and only where `overlaps`. The body is the last of the micro-batch's backwards;
        others may have run before it.

        Args:
            header: as for `reduce`.
            roots: the tensors that the body's backward starts from; only their graph is read. Empty where
                they are not known: then less may overlap.

        Raises:
            RuntimeError: a gradient arrived after its reduction could have been launched.
        """
        raise NotImplementedError

    @abstractmethod
    def reduce(self, header: Header) -> None:
        """Launch every reduction of the window, whose micro-batches have all been accumulated.

        `header` is launched already. The window's `Divisor` decides where 1/count and the inverse loss scale
        are multiplied in.
        """

    @abstractmethod
    def give_up(self) -> None:
        """Launch the reductions that a failure in `reduce` or `overlap` has left out, with nan.

        The nan void the window on every rank, so that no rank waits forever and no rank steps.
        """

    @abstractmethod
    def finish(self, final: FinalPass) -> None:
        """Wait for the reductions; publish `.grad`, and set `sumsq`, `nonfinite` and `void` of `final`."""

    def blame(self) -> Callable[[int], list[int] | None]:
        """Return a function of a parameter index: this rank's micro-batches with a non-finite gradient.

        The function returns None where micro-batches are not checked. It outlives the window; calling it
        waits for the device.
        """
        blames = [(bucket.indices, bucket.blame()) for bucket in self.buckets()]

        def blame(index: int) -> list[int] | None:
            found = (of_slot(indices.index(index)) for indices, of_slot in blames if index in indices)
            return next(found, None)

        return blame

    # ---- states, and the end ----

    def order(self) -> list[int]:
        """Return the registration indices in the order of the buckets on which ranks have agreed.

        Empty if they have not, or if the engine does not choose the order.
        """
        return []

    def lay_out_as(self, order: list[int]) -> None:
        """Lay the buckets out in an order that `order` has returned; other parameters come last.

        Called between windows, on every rank with the same order.
        """

    @abstractmethod
    def release(self, *, keeps_grad: bool) -> None:
        """Restore the parameters as before the engine; `keeps_grad` leaves `.grad`, in its own memory."""
