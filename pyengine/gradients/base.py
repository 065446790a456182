"""What the engine asks of whoever owns the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from pyengine.comm.base import Comm
from pyengine.gradients.residuals import Residuals
from pyengine.gradients.slots import Forms, Saved
from pyengine.step.stepper import Stepper
from pyengine.window.final_pass import FinalPass
from pyengine.window.header import Header


class Reducer(Protocol):
    """What the engine asks of whoever owns the gradients: flat buckets of ours, DDP's, or sums on a lazy
    device.

    All tensors lie on the parameters' device. `.grad` has its parameter's shape and dtype; its memory is the
    reducer's (under `attach` DDP's), holds the mean from `finish` on, and is overwritten from the next
    `begin` on.

    Attributes:
        params: in registration order, or DDP's; what is indexed by parameter below is in this order.
        names: theirs.
        stepper: how an optimizer is stepped over these gradients.
    """

    params: Sequence[Parameter]
    names: Sequence[str]
    stepper: Stepper

    def open(self) -> None:
        """A window opens; nothing has been computed yet."""

    def begin(self) -> None:
        """Start the window's first micro-batch with gradients of zero: `.grad` is None, the next sum
        overwrites.
        """

    def add(self) -> AbstractContextManager[None]:
        """Accumulate a micro-batch: what its backwards have brought to `.grad` by the end of the body.

        The body is the last of its backwards; others may have run before it. Once a micro-batch, and nothing
        may travel. When the body raises, the window is not used.

        Cost: an element of a sum of the parameters' own type, a read and a write in the first micro-batch,
        which autograd adds to in place in later ones; of a narrow gradient with an fp32 sum 6 and 10 bytes;
        of an exact sum 12 and 20 for float32, 10 and 18 for others.
        """

    def collect(self) -> None:
        """Do as `add`, once all backwards of the micro-batch have run, or none; also for what `Keeps.keep`
        has left, without a further micro-batch.
        """

    def reduce(self, header: Header) -> None:
        """Start every reduction of the window, all of whose micro-batches have been accumulated.

        Args:
            header: sent already; its 1/count and inverse loss scale are multiplied in where the window's
                `Divisor` says.

        Cost: an all-reduce a bucket, of an element of the wire's type for every element and used flag (of
        exact sums what `ExactOverRanks.rounds` says).
        """

    def give_up(self) -> None:
        """After a failure inside `reduce` or `overlap`: start what is still missing, voided,
        so that no rank hangs or steps.
        """

    def finish(self, final: FinalPass) -> None:
        """Wait for the reductions; publish `.grad`, sums of squares and finite flags.

        Args:
            final: gets `sumsq`, `nonfinite` and `void`.

        Cost: one read of an element on the wire and one write of `.grad`; 12 bytes an element more to round
        an exact sum.
        """

    def blame(self) -> Callable[[int], list[int] | None]:
        """Return what tells, by a parameter's index, in which micro-batches of this window its gradient was
        not finite here; None: not watched.

        It outlives the window. Calling what it returns waits for the device.
        """

    def save(self) -> Saved:
        """Return what earlier micro-batches of this window have left; nothing for unused parameters.

        Returns:
            By parameter name, the caller's: copies on the parameters' device (see `Saved`).

        Cost: a read and a write of the sums.
        """

    def load(self, saved: Saved, *, done: int) -> None:
        """Go on, in a window that has just begun, from what `save` returned after `done` micro-batches.

        Args:
            saved: read, on any device.

        Cost: a read and a write of the sums.
        """

    def release(self, *, keeps_grad: bool) -> None:
        """Leave the parameters as they were before; with `keeps_grad`, `.grad` stays,
        in memory of its own.
        """


@runtime_checkable
class Overlaps(Protocol):
    """A reducer whose reductions run inside the window's last backward."""

    def overlap(self, header: Header, roots: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Accumulate the window's last micro-batch, in place of `add`, and start every reduction as soon as
        the body has completed it.

        The body is the last of its backwards; others may have run before it.

        Args:
            header: as for `reduce`, whose cost this has.
            roots: what the body's backward starts from, any shape; their graph is read, not their values.
                Empty where that is not known: then less may overlap.

        Raises:
            RuntimeError: a gradient came after its reduction could start.
        """


@runtime_checkable
class Keeps(Protocol):
    """A reducer that can leave what a micro-batch brings where autograd adds that of the next one."""

    def keep(self) -> AbstractContextManager[None]:
        """Leave the gradients of the backward in the body where they are, to be accumulated with those of a
        later micro-batch, in place of `add` or `collect`. Nothing may travel.
        """


@runtime_checkable
class Stages(Protocol):
    """A reducer whose owner brings a micro-batch's gradients elsewhere than to `.grad` of its parameters."""

    def staged(self) -> Sequence[Any]:
        """Return by parameter what has its gradient as `.grad`, until the micro-batch is accumulated; None
        where nothing has.
        """


@runtime_checkable
class HoldsParts(Protocol):
    """A reducer of parameters that are not the same on every rank: shards, or experts.

    Attributes:
        counted: by parameter, whether this rank counts what it holds of it in the norm: over all ranks every
            element once; see `Holdings`. None: all ranks hold the same.
    """

    counted: Sequence[bool] | None


@runtime_checkable
class SumsParts(HoldsParts, Protocol):
    """A reducer that sums what its rank holds of DTensors.

    Attributes:
        parts: `params`, with what this rank holds of it in place of each DTensor.
    """

    parts: Sequence[Parameter]


@runtime_checkable
class KnowsGroups(Protocol):
    """A reducer that knows over which ranks each gradient is summed, and all of them hold the same."""

    def groups_of_params(self) -> tuple[Sequence[Comm], Sequence[int]]:
        """Return the transports, and by parameter the index of its own."""


@runtime_checkable
class SeesForwards(Protocol):
    """A reducer whose owner launches collectives of its own, in forwards."""

    def before_forward(self, *, syncs: bool) -> None:
        """Note that a micro-batch was handed out, and whether it is known to be the window's last."""

    def before_header(self) -> None:
        """Launch whatever collective must come before the window's header."""


@runtime_checkable
class Pads(Protocol):
    """A reducer whose owner launches collectives in every forward, so that every rank has to run as many.

    Attributes:
        held_bytes: memory that this rank holds through a window to communicate less in it.
    """

    held_bytes: int

    def pad(self) -> None:
        """Note that the micro-batch handed out is padding: nothing that comes of it may stay, neither
        gradients nor what its forward writes into buffers.
        """

    def spare(self, roots: Sequence[Tensor | GradientEdge]) -> None:
        """Let a backward of padding leave the `.grad` of all leaves as it is, also of those that the caller
        owns: parameters that units ignore, and whatever lies behind `roots`.

        Args:
            roots: what that backward starts from, where it is known.
        """


@runtime_checkable
class MovesGradients(Protocol):
    """A reducer whose owner gives `.grad` other memory by itself, between windows.

    Attributes:
        has_moved: whether it has since the last `finish`.
    """

    @property
    def has_moved(self) -> bool: ...


@runtime_checkable
class SumsElsewhere(Protocol):
    """A reducer of gradients that do not all come to `.grad`."""

    def strays(self) -> Sequence[int]:
        """Return the parameters, by index, whose gradient has come elsewhere since `forget_strays`."""

    def forget_strays(self) -> None:
        """Note that everything that has come is accounted for."""


@runtime_checkable
class Reorders(Protocol):
    """A reducer that lays its buckets out in the order in which gradients come."""

    def order(self) -> list[int]:
        """Return the order of the buckets' parameters, as registration indices: agreed or observed here;
        empty if it is not known.
        """

    def lay_out_as(self, order: list[int]) -> None:
        """Lay the buckets out as an `order` says, between windows; every rank alike. Parameters that it
        leaves out come last.
        """


@runtime_checkable
class KeepsResiduals(Protocol):
    """A reducer whose wire may keep what it loses.

    Attributes:
        residuals: of its parameters.
    """

    residuals: Residuals


@runtime_checkable
class SavesShards(Protocol):
    """A reducer that has shards in a saved window, in place of whole sums."""

    def forms(self) -> Forms:
        """Return, for every parameter of which that is so, the parts of its sum with their types and
        shapes.
        """


@runtime_checkable
class RefusesLoad(Protocol):
    """A reducer that cannot always go on from a saved window."""

    def refuses_load(self) -> list[str]:
        """Say why `load` cannot work here; empty if it can."""
