"""Buckets whose buffers the engine owns, with one class per kind of sum."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import attrgetter, is_, is_not, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.comm.base import Comm, Work
from pyengine.gradients.arrival import Watch, post_accumulate_hooks
from pyengine.gradients.bucket import Mark, Observer, SlotGroup, grad_marks, mark
from pyengine.gradients.exact_sums import Terms, exact_over_ranks
from pyengine.gradients.grad_versions import GradVersions
from pyengine.gradients.layout import BucketSpec
from pyengine.gradients.local_part import LocalPart, whole
from pyengine.gradients.norms import ReducedNorms
from pyengine.gradients.settings import Settings, sum_dtype
from pyengine.gradients.slots import slots_of, views_of
from pyengine.gradients.sums import FLAT_SUMS, InPlaceSum, Sum
from pyengine.gradients.transfers import SendableBucket
from pyengine.ops.plan import BucketPlan
from pyengine.wire import Wire

_grad, _version = attrgetter("grad"), attrgetter("_version")
_data_ptr = methodcaller("data_ptr")


class OwnBucket(SendableBucket):
    """A bucket that owns its buffers, each of shape `[spec.numel]`.

    The sum and `.grad` are valid until the next window's first backward overwrites them.

    Until the window's last micro-batch, the order of calls is the same as for `Bucket`. In the last
    micro-batch, call `arm` before the backward, `has_arrived` and `seal` during the backward, `send` when the
    bucket is complete, and `from_wire` when the sum over ranks has arrived.

    Args:
        wire_buffer: buffer in the communication dtype, for the sum over ranks.
        result: buffer in the parameters' dtype that backs `.grad`; may be `wire_buffer`.
    """

    observers: Sequence[Observer] | None = None  # functions that receive the local sums

    def __init__(
        self, spec: BucketSpec, params: Sequence[Parameter], total: Sum, wire_buffer: Tensor, result: Tensor
    ) -> None:
        self.spec = spec
        super().__init__(params, [slot.param for slot in spec.slots], plan_of(spec), total)
        self.one = torch.ones((), dtype=torch.float32, device=self.device)
        self._wire, self._result = wire_buffer, result
        self._wire_slots = self.plan.pointers(slots_of(wire_buffer, self.plan))
        is_one = result is wire_buffer
        self._slots = self._wire_slots if is_one else self.plan.pointers(slots_of(result, self.plan))
        self._descriptions = _descriptions(self.params)
        self._locations = _locations(self.params)
        self._versions = GradVersions([whole(param) for param in self.params])
        self.bind()

    def bind(self) -> None:
        """Create the views for `.grad`."""
        self._grads = views_of(self._result, self.params, self.plan)
        self._addresses = list(map(Tensor.data_ptr, self._grads))

    def begin(self) -> None:
        """Start a window; its first gradients overwrite the sum.

        If the model was cast or moved and then restored, the parameters are unchanged but `.grad` has new
        memory. In this case the views in `.grad` are recreated.
        """
        if (now := _locations(self.params)) != self._locations:
            self._check_descriptions()
            self._locations = now
        for param in self.params:
            param.grad = None
        if list(map(Tensor.data_ptr, self._grads)) != self._addresses:
            self.bind()
        super().begin()
        # Marks (identity and version) of the gradients at `seal`, when the last backward had completed the
        # bucket; all None after `send`.
        self._sealed: list[Mark] = []
        self._late: list[int] = []  # slots whose gradients changed between `seal` and `send`

    def _check_descriptions(self) -> None:
        """Raise ValueError if a parameter was cast, moved to another device or converted."""
        slots = zip(self.spec.slots, _descriptions(self.params), self._descriptions, strict=True)
        for slot, now, was in slots:
            if now != was:
                raise ValueError(
                    f"parameter {slot.name!r} is {_describe(now)} now, and was {_describe(was)} when this "
                    "engine was made: cast, move or convert the model first, then make the engine "
                    "(sync.close() releases the old one)"
                )

    def record_grads(self) -> None:
        """Record the gradients at the end of a micro-batch."""
        self._versions.record()

    def changed_grads(self) -> list[int]:
        """Return the slots whose gradients have been written to or replaced since `record_grads`."""
        return self._versions.changed()

    def replaced_grads(self) -> list[int]:
        """Return the slots with gradients that other code has replaced and that `changed_grads` may miss."""
        return []

    def follow_replaced_grads(self) -> None:
        """Treat gradients replaced so far as replaced by this micro-batch's backwards.

        From now on `replaced_grads` does not report them.
        """

    def seal(self) -> None:
        """Record the gradients once the last backward, which may still be running, has accumulated them."""
        self._sealed = grad_marks(self.params)

    def late(self) -> list[int]:
        """Return the slots to which the last backward wrote after `seal`."""
        return self._late + self._changed()

    def _all_reduce(self, wire: Wire, comm: Comm, scale: Tensor | None, *, poison: bool) -> Work:
        if poison:
            self._wire.fill_(torch.nan)
        for observe in self.observers or ():
            observe(self.indices, slots_of(self._wire, self.plan), scale)
        return wire.all_reduce_(self._wire, comm)

    def sent_tensors(self) -> list[Tensor]:
        grads = [param.grad for param in self.params if param.grad is not None]
        return [self.one, self._wire, *grads, *self.flagged, *self.total.scalars()]

    def from_wire(self, scale: Tensor | None, norms: ReducedNorms) -> None:
        """Write the reduced gradients to `.grad`, and compute their norms.

        A parameter that no rank has used also gets a `.grad` here; the reducer later sets it to None. Cost:
        per element, one read of the reduced buffer and one write of `.grad`. The write is omitted if `.grad`
        shares the memory of the buffer and `scale` is None.
        """
        is_published = self._slots is self._wire_slots and scale is None
        scale = self.one if scale is None else scale
        norms.read(self.spec.index, self._wire_slots, None if is_published else self._slots, scale)
        for param, grad in zip(self.params, self._grads, strict=True):
            if param.grad is not grad:
                param.grad = grad

    def _unseal(self) -> None:
        """Record which gradients have changed since `seal`, before `.grad` is cleared."""
        if self._sealed:
            self._late, self._sealed = self._changed(), [None] * len(self.params)

    def _changed(self) -> list[int]:
        marks = zip(grad_marks(self.params), self._sealed, strict=True)
        return [slot for slot, (now, then) in enumerate(marks) if now != then]


class FlatBucket(OwnBucket):
    """Gradients that are added from `.grad` to a flat sum, for example bf16 gradients to an fp32 sum.

    With an fp32 sum, the first micro-batch moves 6 bytes per element (it stores the sum without zeroing the
    buffer first), and each later micro-batch moves 10 bytes. If the communication dtype is narrower than that
    of the sum, the last micro-batch's gradients are added, scaled, cast and checked in a single pass, which
    moves 8 bytes per element.

    Args:
        dtype: dtype of the sum.
    """

    def __init__(
        self,
        spec: BucketSpec,
        params: Sequence[Parameter],
        dtype: torch.dtype,
        *,
        wire: Wire,
        comm: Comm,
    ) -> None:
        device, travels = params[0].device, wire.dtype == dtype
        flat = _flat(spec, dtype, device, comm if travels else None)
        wire_buffer = flat if travels else _flat(spec, wire.dtype, device, comm)
        result = wire_buffer if wire.dtype == spec.dtype else _flat(spec, spec.dtype, device)
        self._sum = FLAT_SUMS[dtype](plan_of(spec), flat)
        self._over_wire = wire
        super().__init__(spec, params, self._sum, wire_buffer, result)
        self._all_slots = SlotGroup(self.plan, params, self._sum, range(len(params)))

    def send(self, inv_count: Tensor | None, comm: Comm, *, poison: bool) -> Work:
        self._unseal()
        grads, flags = self._all_slots.pop(self.used), self._start_row()
        self._first_row_of_sum = len(self.flagged) - 1
        self._sum.deposit_into_wire_(self._wire, grads, inv_count, first=self.is_empty, nonfinite=flags)
        self._set_first(False)
        return self._all_reduce(self._over_wire, comm, inv_count, poison=poison)

    def sent_tensors(self) -> list[Tensor]:
        # Allocate the flags on the current stream instead of the side stream, because an error report reads
        # them on the current stream.
        self._start_row()
        return [*super().sent_tensors(), self._sum.flat]


class ExactBucket(OwnBucket):
    """Gradients of any dtype, summed exactly as integers on a grid chosen from the largest values.

    The sum takes 8.02 bytes of memory per element, plus 2 bytes for bf16 or fp16 gradients. With fp32
    gradients the first micro-batch moves 12 bytes per element and each later micro-batch moves 20 bytes. For
    the bytes sent, see `ExactOverRanks.rounds`. `.grad` of float32 parameters shares the memory of the sum.
    """

    def __init__(self, spec: BucketSpec, params: Sequence[Parameter], *, terms: Terms, comm: Comm) -> None:
        device = params[0].device
        self._exact = exact_over_ranks(plan_of(spec), terms=terms, device=device, comm=comm)
        rounded = self._exact.rounded[: spec.numel]
        result = rounded if spec.dtype == torch.float32 else _flat(spec, spec.dtype, device)
        super().__init__(spec, params, self._exact, rounded, result)

    def send(self, inv_count: Tensor | None, comm: Comm, *, poison: bool) -> Work:
        del inv_count, comm  # `finish` divides the rounded sum, and the sum has its own transport
        self._unseal()
        self.collect()
        return self._exact.rounds(poison=poison)

    def sent_tensors(self) -> list[Tensor]:
        self._start_row()  # see `FlatBucket.sent_tensors`
        return [*super().sent_tensors(), *self._exact.round_tensors()]


class InPlaceBucket(OwnBucket):
    """Gradients summed in their own dtype, in the buffer that backs `.grad`.

    During the backward of the first micro-batch, gradients are copied into the buffer about a megabyte at a
    time, while they are still in the cache; the buffer is not zeroed first. From then on `.grad` is a view of
    the sum, and autograd adds to it in place. The sum is reduced in place if it has the communication dtype.
    Otherwise the sum is multiplied by 1/count, cast into a communication buffer, and cast back after the
    reduction.

    Autograd's in-place add increments the version of a view. In the last backward each view has a separate
    version counter, which shows whether the gradient of its slot has arrived. Before the last backward, the
    views of slots that the first micro-batch has used share the version counter of the buffer, so that a
    single number shows whether code outside the engine has written to a gradient between micro-batches. Other
    code may also replace a gradient with another tensor. After every micro-batch one slot is checked for a
    replaced gradient. All slots are checked before and after a block of the caller's backwards, and before
    the last backward.

    With `watch`, every micro-batch is checked for non-finite gradients so that a report can name the
    micro-batch. The check reads the sum once more per micro-batch.
    """

    def __init__(
        self, spec: BucketSpec, params: Sequence[Parameter], *, wire: Wire, comm: Comm, watch: bool
    ) -> None:
        device, self._is_watching = params[0].device, watch
        self._is_in_place = wire.dtype == spec.dtype and not wire.folds_count
        self._flat = _flat(spec, spec.dtype, device, comm if self._is_in_place else None)
        wire_buffer = self._flat if self._is_in_place else _flat(spec, wire.dtype, device, comm)
        plan = plan_of(spec)
        self._sumsq = torch.zeros(len(params), dtype=torch.float64, device=device)
        self._over_wire = wire
        super().__init__(spec, params, InPlaceSum(plan, self._flat), wire_buffer, self._flat)

    def bind(self) -> None:
        super().bind()
        self._shared: list[Tensor] | None = None  # like `_grads`, but with the version counter of `_flat`

    def begin(self) -> None:
        super().begin()
        self._is_first = True
        # The tensors in `.grad` once the gradients of the first micro-batch are stored, unless autograd or a
        # hook has replaced them.
        self._views = list(self._grads)
        self._is_sharing = False  # Whether the views of used slots come from `_shared`.
        # Slots that `record_grads` checks in addition to the version of `_flat`; None for all slots.
        self._watched: list[int] | None = None
        self._first_row_of_sum = 0  # Every row of flags describes the sum, not a single micro-batch.
        # Versions of the views at the start of the window, or at the time when the views were created.
        self._begun = self._own_versions()
        # Versions of the views before the last backward; `seal` updates them.
        self._stored = self._begun
        self._is_sealed = self._is_sent = False

    def record_grads(self) -> None:
        if self._is_sent:
            return  # `_stored` holds the versions
        if self._watched is None:
            super().record_grads()
        else:
            self._then = self._look(self._watched)

    def changed_grads(self) -> list[int]:
        if self._is_sent:
            return self.late()
        if self._watched is None:
            return super().changed_grads()
        if (now := self._look(self._watched)) == self._then:
            return []
        if replaced := self.replaced_grads():
            return replaced
        slots = zip(self._watched, now[2:], self._then[2:], strict=True)
        changed = {slot for slot, mark, then in slots if mark != then}
        if now[0] != self._then[0]:
            changed |= set(range(len(self.params))) - set(self._watched)
        return sorted(changed)

    def replaced_grads(self) -> list[int]:
        if self._watched is None:
            return []
        slots = enumerate(zip(self.params, self._views, strict=True))
        replaced = [slot for slot, (param, view) in slots if param.grad is not view]
        return [slot for slot in replaced if slot not in self._watched]

    def follow_replaced_grads(self) -> None:
        if self._watched is not None:
            self._watched += self.replaced_grads()

    def _look(self, slots: Sequence[int]) -> list[Any]:
        is_there = self.params[self._sample].grad is self._views[self._sample]
        return [self._flat._version, is_there, *map(mark, map(self.params.__getitem__, slots))]

    def watches(self) -> list[Watch]:
        if not self._is_first:
            return []  # autograd adds in place
        self._is_sharing = True
        if any(
            map(is_not, map(_grad, self.params), itertools.repeat(None))
        ):  # earlier backwards of this micro-batch have left gradients
            self._store()
            return []
        return self._watches()

    def collect(self) -> None:
        """Store the gradients of the first micro-batch; autograd has already added later gradients."""
        if self._is_first:
            self._is_sharing = True
            self._store()
            slots = enumerate(zip(self.used, map(post_accumulate_hooks, self.params), strict=True))
            self._watched = [slot for slot, (used, hooks) in slots if hooks or not used]
            self._sample = self.used.index(True) if True in self.used else 0
        elif self._is_watching:
            self._rebind_moved()
            self._store()
        self._record_nonfinite()

    def arm(self) -> None:
        """Store the gradients of earlier backwards, and give each view a separate version counter."""
        if not self._is_first or any(param.grad is not None for param in self.params):
            self._store_all()

    def has_arrived(self, slot: int) -> bool:
        if self._is_first:
            return self.params[slot].grad is not None
        return self._grads[slot]._version != self._stored[slot]

    def is_used(self, slot: int) -> bool:
        grad, view = self.params[slot].grad, self._grads[slot]
        is_other = grad is not None and grad is not view
        return self.used[slot] or is_other or view._version != self._begun[slot]

    def seal(self) -> None:
        """Store every gradient in the sum, and record the versions of the slots."""
        self._store()
        self._stored = self._own_versions()
        self._is_sealed = True

    def late(self) -> list[int]:
        slots = enumerate(zip(self.params, self._grads, self._stored, strict=True))
        return [
            slot for slot, (param, grad, then) in slots if param.grad is not grad or grad._version != then
        ]

    def send(self, inv_count: Tensor | None, comm: Comm, *, poison: bool) -> Work:
        if not self._is_sealed:
            self._store_all()
        self._is_sent = True
        self._record_nonfinite()
        self._note_used()
        if not self._is_in_place:
            self.plan.pack_(self._wire, self._slots, self.one if inv_count is None else inv_count)
        scale = None if self._is_in_place else inv_count
        return self._all_reduce(self._over_wire, comm, scale, poison=poison)

    def sent_tensors(self) -> list[Tensor]:
        return [*super().sent_tensors(), self._flat]

    def blame(self) -> Callable[[int], list[int] | None]:
        return super().blame() if self._is_watching else lambda slot: None

    def _own_versions(self) -> list[int]:
        return list(map(_version, self._grads))

    def _note_used(self) -> None:
        """Mark slots as used if autograd has added to their gradients."""
        slots = zip(self.used, self._begun, self._stored, strict=True)
        self.used = [used or begun != now for used, begun, now in slots]

    def _record_nonfinite(self) -> None:
        """Record which slots contain non-finite values, if this bucket checks for them."""
        if self._is_watching:
            flags = torch.zeros(len(self.params), dtype=torch.uint8, device=self.device)
            self.plan.unscale_norm(self._slots, None, self.one, sumsq=self._sumsq, nonfinite=flags)
            self.flagged.append(flags)

    def _store_all(self) -> None:
        """Store every gradient, even if the model was moved, and give each view its own version counter."""
        if not self._is_first:
            self._rebind_moved()
        self._store()
        if self._is_sharing:
            self._is_sharing, self._watched = False, None
            self._views = list(self._grads)
            for param, view in zip(self.params, self._grads, strict=True):
                param.grad = view
        self._stored = self._own_versions()

    def _store(self) -> None:
        """Store every gradient in the sum, and make `.grad` a view of the sum."""
        if self._is_first:
            for group in self._groups:
                if group.is_first:
                    self._accumulate(group)
            self._is_first = False
        else:
            self._store_replaced()

    def _accumulate(self, group: SlotGroup) -> None:
        """Overwrite the old sum with the first gradients of a group of slots."""
        group.total.deposit_(group.pop(self.used), first=True, nonfinite=self.one)
        group.is_first = False
        if self._is_sharing:
            slots = zip(self.used, self._shared_views(), self._grads, strict=True)
            mine = itertools.islice(slots, group.start, group.stop)
            self._views[group.start : group.stop] = [shared if used else own for used, shared, own in mine]
        for param, view in zip(group.params, self._views[group.start : group.stop], strict=True):
            param.grad = view

    def _shared_views(self) -> list[Tensor]:
        """Return one view per slot; all views share the version counter of the buffer."""
        if self._shared is None:
            with torch.no_grad():
                slots = zip(self._grads, self.plan.offsets, strict=True)
                self._shared = [
                    self._flat.as_strided(grad.size(), grad.stride(), offset).detach()
                    for grad, offset in slots
                ]
        return self._shared

    def _store_replaced(self) -> None:
        """Store the gradients of parameters whose `.grad` was replaced by another tensor."""
        grads = list(map(_grad, self.params))
        if all(map(is_, grads, self._views)):
            return
        slots = enumerate(zip(self.params, grads, self._views, self._grads, strict=True))
        for slot, (param, grad, view, own) in slots:
            if grad is view:
                continue
            if grad is None:
                own.zero_()
                self.used[slot], self._begun[slot] = False, own._version
            else:
                own.copy_((grad.to_dense() if grad.is_sparse else grad).detach())
            param.grad = view

    def _rebind_moved(self) -> None:
        """Recreate the views of slots that were copied when the model was cast or moved."""
        if list(map(Tensor.data_ptr, self._views)) == self._addresses:
            return
        moved, self._stored = self._views, self._own_versions()
        self._note_used()
        self.bind()
        self._views, self._watched, self._is_sharing = list(self._grads), None, False
        for index, (old, view) in enumerate(zip(moved, self._grads, strict=True)):
            if old.data_ptr() == self._addresses[index] and self.params[index].grad is old:
                self.params[index].grad = view  # the memory of the slot stays the same
        self._begun = self._own_versions()
        self._stored = list(self._begun)


def own_bucket(
    spec: BucketSpec,
    params: Sequence[Parameter],
    settings: Settings,
    *,
    wire: Wire,
    terms: Terms,
    comm: Comm,
) -> OwnBucket:
    """Create the bucket that `spec` describes, to be reduced over `wire`."""
    if settings.kind == "exact":
        return ExactBucket(spec, params, terms=terms, comm=comm)
    dtype = sum_dtype(settings.kind, spec.dtype)
    # A DTensor's `.grad` wraps the view, so autograd's in-place add would not change the view's version.
    has_parts = any(isinstance(param, LocalPart) for param in params)
    if dtype != spec.dtype or has_parts:
        dtype = dtype if dtype != spec.dtype else torch.float32
        return FlatBucket(spec, params, dtype, wire=wire, comm=comm)
    return InPlaceBucket(spec, params, wire=wire, comm=comm, watch=settings.raises)


def plan_of(spec: BucketSpec) -> BucketPlan:
    return BucketPlan([slot.offset for slot in spec.slots], [slot.numel for slot in spec.slots])


def _flat(spec: BucketSpec, dtype: torch.dtype, device: torch.device, comm: Comm | None = None) -> Tensor:
    """Return a flat buffer of zeros, allocated by `comm` unless `comm` is None."""
    if comm is None:
        return torch.zeros(spec.numel, dtype=dtype, device=device)
    return comm.allocate(spec.numel, dtype, device)


def _locations(params: Sequence[Parameter]) -> list[int]:
    return list(map(_data_ptr, params))


# The properties of a parameter that must not change during training.
_Description = tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]


def _descriptions(params: Sequence[Parameter]) -> list[_Description]:
    return [(param.dtype, param.device, param.shape, param.stride()) for param in params]


def _describe(description: _Description) -> str:
    dtype, device, shape, strides = description
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} with strides {list(strides)} on {device}"
