"""What an accumulator is, and the pieces that all kinds share: slot views and the used flags."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine._ops import BucketPlan
from pyengine._pointers import Pointers, TensorList
from pyengine.host import send
from pyengine.layout import Bucket
from pyengine.norm import FinalPass
from pyengine.watch import Watch
from pyengine.wire import Comm, Wire, Work

# By parameter name: the parts of its sum, 1-D or by blocks in storage order, and "nonfinite", uint8 [micro-batches].
Saved = dict[str, dict[str, Tensor]]


class BucketAccumulator(Protocol):
    """The window's sum for the parameters of one bucket, and its way to the wire and back.

    Life of a window: `begin`, `add` after every earlier backward, `arm` before the last one, `has_arrived` during it,
    `rounds` once the bucket is complete, `from_wire` after the last of them.

    Attributes:
        num_rounds: collectives that `rounds` launches.
    """

    params: Sequence[Parameter]
    num_rounds: int

    def begin(self) -> None:
        """Start a window with a sum of zero."""

    def watches(self) -> list[Watch]:
        """Return what is to be watched during the coming earlier backward (not kept: it refers to this bucket)."""

    def add(self, micro_batch: int) -> None:
        """Take in the gradients of an earlier micro-batch, whose backward has returned."""

    def arm(self) -> None:
        """Get ready to tell which gradients the coming backward has delivered."""

    def has_arrived(self, slot: int) -> bool:
        """Whether the armed backward has delivered this slot's gradient."""

    def lent(self) -> list[Tensor]:
        """Return every tensor that `rounds` uses, for streams that must outlive them."""

    def rounds(self, inv_count: Tensor | None, wire: Wire, comm: Comm, *, poison: bool) -> Iterator[Work]:
        """Launch the bucket's collectives one after the other; go on only when the last one has landed.

        `inv_count` is multiplied in on the way to the wire if given, `poison` voids the window.
        """

    def from_wire(self, inv_count: Tensor | None, final: FinalPass) -> None:
        """Publish the reduced buffer as `.grad` (times `inv_count` if given) with its norm and finite flags."""

    def scale_(self, scale: Tensor) -> None:
        """Multiply the published gradients by a 0-dim float32 tensor: one fused read and write."""

    def blame(self) -> Callable[[int], list[int] | None]:
        """Return what tells the micro-batches of this window in which a slot was not finite; None: not watched.

        It outlives the window and holds none of its buffers.
        """

    def save(self) -> Saved:
        """Return copies of what earlier micro-batches of this window have left; nothing for unused parameters."""

    def load(self, saved: Saved, *, done: int) -> None:
        """Go on, in a window that has just begun, from what `save` returned after `done` micro-batches."""


class BucketBase:
    """Shared part of the accumulators: the parameters of one bucket in slot order and their used flags.

    Args:
        bucket: place in the layout.
        params: the bucket's parameters in slot order.
        device: where the buffers live.
    """

    num_rounds = 1
    _sum: Tensor
    _wire: Tensor

    def __init__(self, bucket: Bucket, params: Sequence[Parameter], device: torch.device) -> None:
        self.bucket = bucket
        self.params: Sequence[Parameter] = list(params)
        self.plan = BucketPlan([s.offset for s in bucket.slots], [s.numel for s in bucket.slots])
        self.one = torch.ones((), device=device)
        self._registration = torch.tensor([s.param for s in bucket.slots], device=device)
        self._sumsq = torch.zeros(len(params), dtype=torch.float64, device=device)
        self._nonfinite = torch.zeros(len(params), dtype=torch.uint8, device=device)
        for param in self.params:
            # Set by layers whose backward writes main_grad itself.
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def allocate(self, dtype: torch.dtype) -> Tensor:
        """Return a zeroed flat buffer for the bucket."""
        return torch.zeros(self.bucket.numel, dtype=dtype, device=self.one.device)

    def lent(self) -> list[Tensor]:
        """Return every tensor that `rounds` uses."""
        return [self._sum, self._wire, *(param.grad for param in self.params if param.grad is not None)]

    def rounds(self, inv_count: Tensor | None, wire: Wire, comm: Comm, *, poison: bool) -> Iterator[Work]:
        """Sum the bucket over the wire in one round."""
        yield wire.all_reduce_(self.to_wire(inv_count, poison=poison), comm)

    def to_wire(self, inv_count: Tensor | None, *, poison: bool) -> Tensor:
        """Return the flat buffer to reduce."""
        raise NotImplementedError

    def take_fused(self) -> list[int]:
        """Return, once, the slots whose layer has added to main_grad itself."""
        params = enumerate(self.params)
        fused = [i for i, param in params if param.grad_added_to_main_grad]  # type: ignore[attr-defined]
        for index in fused:
            self.params[index].grad_added_to_main_grad = False  # type: ignore[attr-defined]
        return fused

    def save(self) -> Saved:
        """Return copies of what earlier micro-batches of this window have left; nothing for unused parameters."""
        rows = self._rows()
        return {
            slot.name: {
                name: part.clone() for name, part in {**self.parts(index), **_column(rows, index)}.items()
            }
            for index, slot in enumerate(self.bucket.slots)
            if self._is_used(index)
        }

    def load(self, saved: Saved, *, done: int) -> None:
        """Go on, in a window that has just begun, from what `save` returned after `done` micro-batches."""
        rows = self._nonfinite.new_zeros(done, len(self.params))
        for index, slot in enumerate(self.bucket.slots):
            kept = saved.get(slot.name, {})
            for name, part in self.parts(index).items():
                part.copy_(kept[name]) if kept else part.zero_()
            if "nonfinite" in kept:
                rows[:, index] = kept["nonfinite"]
        self._go_on(rows, [slot.name in saved for slot in self.bucket.slots])

    def parts(self, index: int) -> dict[str, Tensor]:
        """Return the memory of one slot's sum."""
        return {"sum": self.slots(self._sum)[index]}

    def _is_used(self, index: int) -> bool:
        """Whether this rank has computed a gradient of the slot in this window."""
        raise NotImplementedError

    def _rows(self) -> list[Tensor]:
        """Return the flags of the micro-batches done, a row each; none if they are not watched."""
        raise NotImplementedError

    def _go_on(self, rows: Tensor, used: list[bool]) -> None:
        """Take up a sum that has been loaded: flags of its micro-batches, and which slots have one."""
        raise NotImplementedError

    def slots(self, flat: Tensor) -> list[Tensor]:
        """Return the slots of a flat buffer, 1-D, in storage order."""
        return [flat[s.offset : s.offset + s.numel] for s in self.bucket.slots]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the slots shaped and strided like their parameters.

        `.data` gives each its own version counter, so a single counter tells whether autograd has added to a slot.
        """
        return [
            flat.as_strided(p.size(), dense_strides(p), s.offset).data
            for p, s in zip(self.params, self.bucket.slots, strict=True)
        ]

    def write_used(self, flat: Tensor, used: Sequence[bool], *, poison: bool) -> None:
        """Put the used flags behind the slots: 0, 1, or nan for a window that this rank had to give up."""
        flags = self._flags(flat)
        if poison:
            flags.fill_(float("nan"))
        elif all(used):
            flags.fill_(1)
        else:
            flags.copy_(send(used, flat.dtype, flat.device))

    def used_anywhere(self, flat: Tensor, used: Sequence[bool]) -> Sequence[bool]:
        """Return which slots any rank used; looks at the reduced flags only where this rank used none."""
        return used if all(used) else (self._flags(flat) != 0).tolist()

    def void(self, flat: Tensor) -> Tensor:
        """Return nan if a flag is nan, which says that some rank gave the window up, else 0; float32, 0-dim."""
        return self._flags(flat).float().sum() * 0

    def norm(
        self,
        sources: TensorList | Pointers,
        out: TensorList | Pointers | None,
        scale: Tensor,
        final: FinalPass,
    ) -> None:
        """Read the slots once: scale, write to `out` unless None, and leave norm and finite flags in `final`."""
        self._nonfinite.zero_()
        self.plan.unscale_norm(sources, out, scale, sumsq=self._sumsq, nonfinite=self._nonfinite)
        final.sumsq.index_copy_(0, self._registration, self._sumsq)
        final.nonfinite.index_copy_(0, self._registration, self._nonfinite)

    def _flags(self, flat: Tensor) -> Tensor:
        return flat[self.bucket.flags : self.bucket.flags + len(self.params)]


def dense_strides(param: Tensor) -> tuple[int, ...]:
    """Return the parameter's own strides if it is dense (channels_last, say), else the contiguous ones."""
    return torch.empty_like(param, device="meta").stride()


def slot_gradient(param: Parameter) -> Tensor | None:
    """Return `param.grad` 1-D in the slot's order; copies only gradients that are sparse or strided otherwise."""
    grad = param.grad
    if grad is None:
        return None
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    if grad.is_contiguous() and param.is_contiguous():
        return grad
    like = torch.empty_like(param, dtype=grad.dtype)
    if grad.stride() != like.stride():
        grad = like.copy_(grad)
    return grad.as_strided((grad.numel(),), (1,), grad.storage_offset())


def _column(rows: Sequence[Tensor], index: int) -> dict[str, Tensor]:
    return {"nonfinite": torch.stack(list(rows))[:, index]} if rows else {}


def flagged_in(flagged: Sequence[Tensor], slot: int) -> list[int]:
    """Return the positions whose flags name the slot (a host read)."""
    return [index for index, flags in enumerate(flagged) if flags[slot]]
