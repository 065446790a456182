"""Base class of all gradient owners, which accumulate and reduce gradients."""

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
    """The residuals (rounding errors) that wires keep between windows, for one or more owners of buckets.

    Residuals are multiplied by the loss scale of the last window, just as that window's gradients are.
    """

    def __init__(
        self,
        owners: Sequence[tuple[WireMemory, Mapping[str, Hashable]]],
        wire: Wire,
        numels: Mapping[str, int],
    ) -> None:
        # For each owner: its memory, and a dict from parameter name to the key in this memory.
        self.owners, self.wire = list(owners), wire
        # Number of elements of each parameter's residual, by name.
        self.numels = dict(numels)
        self.is_kept = wire.keeps_residual
        # The loss scale of the residuals, a 0-dim float32 tensor; None until there is a loss scale.
        self._scale: Tensor | None = None

    def save(self) -> dict[str, Tensor]:
        """Return float32 copies of the residuals by name, each of shape `[numel]` in storage order."""
        saved = {}
        for memory, key_of in self.owners:
            parts = memory.parts()
            saved.update({name: parts[key].clone() for name, key in key_of.items() if key in parts})
        return saved

    def load(self, saved: Mapping[str, Tensor], scale: Tensor | None) -> None:
        """Overwrite all residuals; parameters not in `saved` get zeros. For `scale`, see `follow`."""
        self.follow(scale)
        for memory, key_of in self.owners:
            memory.load({key: saved[name] for name, key in key_of.items() if name in saved})

    def follow(self, scale: Tensor | None) -> None:
        """Rescale the residuals from the previous loss scale to `scale`, a 0-dim tensor.

        `scale` is None if losses are not scaled. (`_scale` is updated in place, because a captured window
        reads and writes its memory.)
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
        """Set the last window's residuals to zero if `is_unused`, a 0-dim tensor, is nonzero."""
        for memory, _ in self.owners:
            memory.drop(is_unused)


def not_reduced(details: str = "") -> RuntimeError:
    """Return the error that `finish` raises after a collective has failed on this rank."""
    return RuntimeError(
        f"gradients were not reduced: a collective failed on this rank{details}. This rank does not step, "
        "but other ranks may have stepped: restart all ranks from a checkpoint"
    )


class Then(AbstractContextManager[None]):
    """Context manager that calls `action` after the body unless the body raises an error.

    `Then` is a class because a generator-based context manager would cost four times as much.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._action()


class Reducer(ABC):
    """Owner of an engine's gradients: accumulates them over a window and reduces them at its end.

    There is one direct subclass for each place where gradients are accumulated: the engine's flat buckets,
    FSDP2's units, and sums on a lazy device. Methods that a subclass does not need have a default
    implementation.

    All tensors are on the parameters' device. `.grad` has the shape and dtype of its parameter. The reducer
    owns the memory of `.grad`, which holds the mean after `finish` and may be overwritten after the next
    `begin`.
    """

    # ---- attributes that every reducer sets ----

    # The parameters in registration order. Every parameter index below refers to this order.
    params: Sequence[Parameter]
    # The names of the parameters, in the same order.
    names: Sequence[str]

    # ---- properties of the owner ----

    # Whether `overlap` launches the reductions inside the window's last backward. If False, `reduce` is
    # called after the last backward, when the header has been launched. The value is False on a lazy device,
    # which records the program of a micro-batch without the header, and for exact sums under FSDP2, which are
    # complete only after the backward.
    overlaps = False
    # Whether every forward launches collectives. If True, all ranks must run the same number of forwards, and
    # a rank without data runs padding.
    has_collective_forwards = False
    # Whether the micro-batches between a window's first and last also launch collectives.
    gathers_in_each_micro_batch = True
    # Per parameter, whether this rank includes the parameter's elements in the norm, so that every element is
    # included once over all ranks (see `ShardedNorm`). None if all ranks hold the same elements.
    counted: Sequence[bool] | None = None
    # Whether this rank has all elements of all parameters, so that a norm needs no collective.
    holds_all = False
    # The outermost FSDP2 module, whose DTensor parameters show which ranks share a shard. None if
    # `groups_of_params` returns the groups.
    model: Any = None
    # The rounding errors that a narrow wire has caused in these gradients. They are added in a later window.
    residuals = Residuals([], FP32(), {})
    # Bytes of memory that this rank keeps throughout a window in order to communicate less often.
    held_bytes = 0
    # Functions that are called in every window with this rank's sums of each bucket, before the all-reduce.
    # None if the owner has no local float sums (as with exact sums, FSDP2's units, or an XLA program).
    observers: list[Observer] | None = None
    # Runs padding: micro-batches that only other ranks need. None if no forward launches collectives.
    padding: Padding | None = None

    @cached_property
    def grad_record(self) -> GradRecord:
        """Detects gradients that outside code has written to between micro-batches."""
        return GradRecord(self.params)

    @cached_property
    def stepper(self) -> Stepper:
        """Steps an optimizer with these gradients, or skips the step."""
        return PlainStepper()

    def local_params(self) -> Sequence[Parameter]:
        """Return `params`, with the local tensor in place of each DTensor that FSDP2 does not shard."""
        return self.params

    def groups_of_params(self) -> tuple[Sequence[Comm], Sequence[int]]:
        """Return the transports, and for each parameter the index of its transport.

        Called only if `model` is None, and not on a lazy device.
        """
        raise NotImplementedError

    def buckets(self) -> Iterable[Bucket]:
        """Return the buckets that hold the sums of earlier micro-batches.

        The default implementations of the methods below use these buckets.
        """
        return ()

    # ---- the life of a window, in the order of calls ----

    def open(self) -> None:
        """Open a window, before any forward of the window."""

    def abandon(self) -> None:
        """Put the model back into its state between windows, after the window was dropped or used."""

    def begin(self) -> None:
        """Start the first micro-batch: clear `.grad`; the next gradients overwrite the sums."""
        for bucket in self.buckets():
            bucket.begin()

    def add(self) -> AbstractContextManager[None]:
        """Accumulate the gradients that a micro-batch's backwards have added to `.grad`.

        The body is the last backward of the micro-batch; other backwards may have run before it. Called once
        per micro-batch. Launches no collective. If the body raises an error, the window is not used.
        """
        return Then(self.collect)

    def leave_in_grad(self) -> AbstractContextManager[None]:
        """Keep the body's gradients in `.grad`, where autograd adds the next micro-batch's gradients.

        Called instead of `add` or `collect`. Launches no collective.
        """
        return nullcontext()

    def collect(self) -> None:
        """Accumulate the gradients of a micro-batch after all its backwards have run.

        Can also be called without another micro-batch, to accumulate the gradients that `leave_in_grad` has
        left in `.grad`.
        """
        for bucket in self.buckets():
            bucket.collect()

    def is_used(self, index: int) -> bool:
        """Whether any accumulated micro-batch has used a parameter on this rank; True if unknown."""
        del index
        return True

    def has_used_all(self) -> bool:
        """Whether the accumulated micro-batches have used all parameters on this rank.

        The result is also False if this is unknown. If the result is False on any rank, all ranks all-reduce
        flags of the used parameters.
        """
        return False

    def overlap(self, header: Header, roots: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Accumulate the last micro-batch, and launch reductions inside its backward.

        Called instead of `add`, only if `overlaps` is True. The body is the last backward of the micro-batch;
        other backwards may have run before it.

        Args:
            header: see `reduce`.
            roots: tensors from which the body's backward starts; only their graph is read. If `roots` is
                empty, less communication may overlap.

        Raises:
            RuntimeError: a gradient arrived when its bucket may already have been reduced.
        """
        raise NotImplementedError

    @abstractmethod
    def reduce(self, header: Header) -> None:
        """Launch every reduction of the window, after all its micro-batches have been accumulated.

        `header` has already been launched. The window's `Divisor` determines where gradients are multiplied
        by 1/count and by the inverse loss scale.
        """

    @abstractmethod
    def give_up(self) -> None:
        """Launch, with nan as input, the reductions that a failed `reduce` or `overlap` has skipped.

        Because of the nan, no rank uses the window. Without these reductions, other ranks would wait forever.
        """

    @abstractmethod
    def finish(self, final: FinalPass) -> None:
        """Wait for the reductions, write the mean to `.grad`, and set the results in `final`."""

    def blame(self) -> Callable[[int], list[int] | None]:
        """Return a function that maps a parameter index to the micro-batches with a non-finite gradient.

        The function returns None if micro-batches are not checked. The function remains valid after the
        window, and waits for the device.
        """
        blames = [(bucket.indices, bucket.blame()) for bucket in self.buckets()]

        def blame(index: int) -> list[int] | None:
            found = (of_slot(indices.index(index)) for indices, of_slot in blames if index in indices)
            return next(found, None)

        return blame

    # ---- saved state and release ----

    def order(self) -> list[int]:
        """Return the registration indices in the bucket order on which ranks have agreed.

        Empty if ranks have not agreed on an order, or if the engine does not choose the order.
        """
        return []

    def lay_out_as(self, order: list[int]) -> None:
        """Lay out the buckets in a given order, as returned by `order`; other parameters come last.

        Called between windows, with the same order on every rank.
        """

    @abstractmethod
    def release(self, *, keeps_grad: bool) -> None:
        """Restore the parameters' original state; with `keeps_grad`, keep `.grad` in separate memory."""
