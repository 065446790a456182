"""What an accumulator is, and what all kinds share: slot views, the used flags, the norm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.comm.base import Comm, Work, flat_zeros
from pyengine.gradients.accumulator.main_grad import pop_written, withdraw
from pyengine.gradients.accumulator.used_flags import FlagsBeside, FlagsInside, UsedFlags
from pyengine.gradients.arrival import Watch
from pyengine.gradients.landed_norms import LandedNorms, NormSlots
from pyengine.gradients.layout import Bucket
from pyengine.gradients.slot_group import SlotGroup, cut
from pyengine.gradients.slots import Saved, load_parts, saved_flags, slots_of, views_of
from pyengine.ops.device import Readback
from pyengine.ops.plan import BucketPlan
from pyengine.wire import Wire
from pyengine.wire.base import is_encoded


class BucketAccumulator(ABC):
    """The window's sum for the parameters of one bucket, and its way to the wire and back.

    Flat buffers are `[bucket.numel]`, on the parameters' device and owned by this object as long as it lives;
    the sum and `.grad` are valid until the next window's first backward overwrites them.

    Life of a window: `begin`, `add` after every earlier backward, `arm` before the last one, `has_arrived`
    during it, `send` once the bucket is complete, `from_wire` when it has landed.

    Args:
        bucket: place in the layout.
        params: the bucket's parameters in slot order, on one device.

    Attributes:
        device: of the parameters.
        flags: which slots were used, and whether the window is void.
        used: by slot, whether this rank has used it in this window; complete once the bucket is sent.
        norm_slots: what `from_wire` reads.
    """

    flags: UsedFlags
    used: list[bool]
    _sum: Tensor

    def __init__(self, bucket: Bucket, params: Sequence[Parameter]) -> None:
        self.device = device = params[0].device
        self.bucket = bucket
        self.params: Sequence[Parameter] = list(params)
        self.plan = BucketPlan([s.offset for s in bucket.slots], [s.numel for s in bucket.slots])
        self.one = torch.ones((), dtype=torch.float32, device=device)
        self._made = [(param.dtype, param.device, param.shape, param.stride()) for param in self.params]
        self._has_fused = False  # whether a layer adds to `main_grad` by itself
        self._groups = [
            SlotGroup(self.plan, params, slots)
            for slots in cut(self.plan.numels, bucket.dtype.itemsize, device)
        ]

    def set_buffers(self, flat: Tensor, result: Tensor, flags: UsedFlags) -> None:
        """Say where the sum over ranks lands, and what `.grad` views.

        Args:
            flat: of the wire's type, `[bucket.numel]`, owned by this bucket.
            result: of the parameters' type, `[bucket.numel]`; owned too, and may be `flat`.
            flags: the used flags.
        """
        self._wire, self._result, self.flags = flat, result, flags
        self._wire_slots = self.plan.pointers(slots_of(flat, self.bucket.slots))
        self._slots = (
            self._wire_slots if result is flat else self.plan.pointers(slots_of(result, self.bucket.slots))
        )
        self._look_at_landed(slots_of(flat, self.bucket.slots), slots_of(result, self.bucket.slots))
        self.bind()

    def _look_at_landed(self, landed: list[Tensor], published: list[Tensor]) -> None:
        """Say what `from_wire` reads and writes: the slots, and flags that are summed with them."""
        flags = self.flags.inside
        plan = self.plan
        if flags is not None:
            begin = self.bucket.flags
            plan = BucketPlan([*plan.offsets, begin], [*plan.numels, len(flags)])
        self.norm_slots = NormSlots(plan, [slot.param for slot in self.bucket.slots])
        beside = [] if flags is None else [flags]
        self._landed = plan.pointers([*landed, *beside])
        is_one = self._slots is self._wire_slots
        self._published = self._landed if is_one else plan.pointers([*published, *(None for _ in beside)])

    def bind(self) -> None:
        """Make the views of `result` that `.grad` is set to, and what else parameters get to see."""
        self._grads = views_of(self._result, self.params, self.bucket.slots)
        self._addresses = [grad.data_ptr() for grad in self._grads]

    def begin(self) -> None:
        """Start a window with a sum of zero: the first gradients overwrite it.

        Raises:
            ValueError: a parameter is not what the bucket was made for. (A cast or move of the model and back
                leaves it as it was, and gives the views of `.grad` other memory: they are made anew.)
        """
        for param, slot, made in zip(self.params, self.bucket.slots, self._made, strict=True):
            param.grad = None
            if (param.dtype, param.device, param.shape, param.stride()) != made:
                raise ValueError(
                    f"parameter {slot.name!r} is "
                    f"{_described(param.dtype, param.device, param.shape, param.stride())} now, and was "
                    f"{_described(*made)} when this engine was made: cast, move or convert the model first, "
                    "then make the engine (sync.close() lets the old one go)"
                )
        if [grad.data_ptr() for grad in self._grads] != self._addresses:
            self.bind()
        self.used = [False] * len(self.params)
        self._set_first(True)

    def forget_written(self) -> None:
        """Take notice of what layers have added to `main_grad` by themselves, and of nothing else."""
        self._has_fused = bool(pop_written(self.params)) or self._has_fused

    def watches(self) -> list[Watch]:
        """Return what is to be watched during the coming earlier backward, so that a group's gradients are
        accumulated while the cache has them. (Not kept: it refers to this bucket.)
        """
        return [
            Watch(group.params, partial(self._has_arrived_in, group), partial(self._store, group))
            for group in self._groups
        ]

    @abstractmethod
    def add(self) -> None:
        """Accumulate what `watches` has not, once the backward of an earlier micro-batch has returned."""

    @abstractmethod
    def arm(self) -> None:
        """Get ready to tell which gradients the coming backward has delivered."""

    @abstractmethod
    def has_arrived(self, slot: int) -> bool:
        """Whether the armed backward has delivered this slot's gradient."""

    @abstractmethod
    def seal(self) -> None:
        """Note that the armed backward has delivered every gradient, before it has ended."""

    @abstractmethod
    def late(self) -> list[int]:
        """Return the slots that the armed backward has added to after `seal`,
        whether or not `rounds` has begun.
        """

    @abstractmethod
    def send(self, inv_count: Tensor | None, comm: Comm, *, poison: bool) -> Work:
        """Start to sum the bucket over ranks.

        Args:
            inv_count: float32, 0-dim, multiplied in on the way to the wire; None for nothing.
            comm: over the bucket's ranks.
            poison: void the window.

        Cost: the last backward's gradients, which are accumulated in the pass that casts where there is one,
        and what the wire sends for the bucket.
        """

    def send_over(self, wire: Wire, comm: Comm, *, poison: bool) -> Work:
        """Start to sum the wire buffer over ranks, with the used flags in it or beside it."""
        self.flags.write(self.used, poison=poison)
        if not isinstance(self.flags, FlagsBeside):
            return wire.all_reduce_(self._wire, comm)
        self.flags.start(comm)
        return wire.all_reduce_(self._wire[: self.bucket.flags], comm)

    def sent_tensors(self) -> list[Tensor]:
        """Return every tensor that `send` uses: a side stream may read them for some time."""
        return [
            self.one,
            self._sum,
            self._wire,
            *(param.grad for param in self.params if param.grad is not None),
        ]

    def from_wire(self, scale: Tensor | None, norms: LandedNorms) -> None:
        """Publish the reduced buffer times `scale` as `.grad`, and read its norm and finite flags.

        Also for parameters that no rank used: `drop_unused` then takes their `.grad` away.

        Args:
            scale: float32, 0-dim, multiplied in; None for nothing.
            norms: of all buckets, made of their `norm_slots`.

        Cost: a read of an element on the wire; a write of `.grad` unless that is the same memory and `scale`
            is None.
        """
        is_published = self._slots is self._wire_slots and scale is None
        scale = self.one if scale is None else scale
        norms.read(self.bucket.index, self._landed, None if is_published else self._published, scale)

    def used_anywhere(self) -> Tensor | None:
        """Return which slots any rank used, bool `[slots]`, the caller's; None where this rank used all."""
        return None if all(self.used) else self.flags.landed() != 0

    @abstractmethod
    def blame(self) -> Callable[[int], list[int] | None]:
        """Return what tells the micro-batches of this window in which a slot was not finite; None: not
        watched.

        It outlives the window and holds none of its buffers.
        """

    def release(self) -> None:
        """Take everything off the parameters but `.grad`."""
        withdraw(self.params)

    def allocate(self, dtype: torch.dtype, comm: Comm | None = None) -> Tensor:
        """Return a flat buffer of zeros, `[bucket.numel]`; of a transport's memory, if it travels by one."""
        if comm is None:
            return torch.zeros(self.bucket.numel, dtype=dtype, device=self.device)
        return flat_zeros(comm, self.bucket.numel, dtype=dtype, device=self.device)

    def flags_for(self, wire: Wire, flat: Tensor) -> UsedFlags:
        """Make the used flags: in the wire buffer, `[bucket.numel]`, if the wire lets them arrive there."""
        if is_encoded(wire):
            return FlagsBeside(torch.zeros(len(self.params), dtype=torch.uint8, device=flat.device))
        return FlagsInside(flat[self.bucket.flags : self.bucket.flags + len(self.params)])

    def save(self) -> Saved:
        """Return what earlier micro-batches of this window have left, as `Reducer.save`."""
        rows = self._rows()
        return {
            slot.name: {
                name: part.clone() for name, part in {**self.parts(index), **_column(rows, index)}.items()
            }
            for index, slot in enumerate(self.bucket.slots)
            if self._is_used(index)
        }

    def load(self, saved: Saved, *, done: int) -> None:
        """Go on, in a window that has just begun, as `Reducer.load`."""
        names = [slot.name for slot in self.bucket.slots]
        for index, name in enumerate(names):
            load_parts(self.parts(index), saved.get(name))
        rows = saved_flags(saved, names, done, self.device)
        self._restore(rows, [name in saved for name in names])

    @abstractmethod
    def parts(self, index: int) -> dict[str, Tensor]:
        """Return the memory of one slot's sum, by name (see `Saved`)."""

    @abstractmethod
    def _store(self, group: SlotGroup) -> None:
        """Accumulate a group's gradients; overwrite its sum if `group.is_first`, which they end."""

    @abstractmethod
    def _is_used(self, index: int) -> bool:
        """Whether this rank has computed a gradient of the slot in this window."""

    @abstractmethod
    def _rows(self) -> list[Tensor]:
        """Return the flags of the micro-batches done, uint8 `[slots]` each; none if they are not watched."""

    @abstractmethod
    def _restore(self, rows: Tensor, used: list[bool]) -> None:
        """Go on from a sum that has been loaded: flags of its micro-batches, uint8 `[micro_batches, slots]`,
        and which slots have one.
        """

    def _has_arrived_in(self, group: SlotGroup, index: int) -> bool:
        return self.has_arrived(group.start + index)

    def _set_first(self, is_first: bool) -> None:
        for group in self._groups:
            group.is_first = is_first


def _described(dtype: torch.dtype, device: torch.device, shape: torch.Size, strides: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} with strides {list(strides)} on {device}"


def drop_unused(buckets: Sequence[BucketAccumulator]) -> list[int]:
    """Set `.grad` to None where no rank used the parameter, once all buckets are published; return the
    registration indices of these.

    Cost: the host waits once for the device, if this rank left some parameter unused.
    """
    partly = [(bucket, used) for bucket in buckets if (used := bucket.used_anywhere()) is not None]
    if not partly:
        return []
    dropped = []
    kept = iter(Readback(torch.cat([used for _, used in partly])).get())
    for bucket, _ in partly:
        for param, slot in zip(bucket.params, bucket.bucket.slots, strict=True):
            if not next(kept):
                param.grad = None
                dropped.append(slot.param)
    return dropped


def _column(rows: Sequence[Tensor], index: int) -> dict[str, Tensor]:
    return {"nonfinite": torch.stack(list(rows))[:, index]} if rows else {}
