"""Checks that the output of an op shares no memory with its inputs, unless the op works in place.

Threads run in no fixed order, so an op whose output overlaps its input could read memory that the op has
already overwritten. An op may work in place if its output is exactly the memory of the same slot, in the same
dtype. The core checks all addresses in a microsecond; if the core finds a possible overlap, Python checks the
addresses one by one and formats the error message.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from pyengine.ops.pointers import ADDRESSED, DTYPE_CODES, Pointers

# A tensor, and its name in error messages.
Named: TypeAlias = tuple[str, Tensor]
# A list with one tensor per slot, and the name of the list in error messages.
NamedList: TypeAlias = tuple[str, Pointers]


class Plan(Protocol):
    """The attributes of a `BucketPlan` that these checks use."""

    _slots: tuple[tuple[int, int], ...]  # (offset, numel).
    _native: Any  # None without the core.


class _Span(NamedTuple):
    begin: int
    end: int
    name: str
    dtype: torch.dtype
    slot: int  # index of the slot; -1 for memory outside of slots
    written: bool

    def is_in_place_of(self, other: _Span) -> bool:
        return (self.begin, self.end, self.dtype, self.slot) == (
            other.begin, other.end, other.dtype, other.slot
        ) and self.slot >= 0  # fmt: skip


def check_into_flat(plan: Plan, flat: Named, tensors: NamedList, *others: Named) -> None:
    """Check an op that writes the slots of `flat`, and reads `tensors` (one per slot) and `others`.

    `others` are 0-dim float32 scales, or float32 buffers of at least flat_numel elements with the same slots
    as `flat`.
    """
    (_, target), (_, sources) = flat, tensors
    if _has_no_addresses(plan, sources, target):
        return
    core, begin = plan._native, target.data_ptr()
    if core is not None and core.flat_is_apart(begin, DTYPE_CODES[target.dtype], sources.table):
        end = begin + target.nbytes
        ranges = [(*_range(other), other) for _, other in others]
        if all(last <= begin or first >= end or _is_same(other, target) for first, last, other in ranges):
            return
    spans = [*_of_slots(plan, flat, written=True), *_of_list(tensors)]
    for name, other in others:
        spans += [_span(name, other)] if other.dim() == 0 else _of_slots(plan, (name, other))
    _refuse(spans)


def check_out_of_flat(plan: Plan, tensors: NamedList, flat: Named, *scales: Named) -> None:
    """Check an op that writes `tensors` (one per slot), and reads `flat` and 0-dim scales."""
    (_, targets), (_, source) = tensors, flat
    if _has_no_addresses(plan, targets):
        return
    core, table = plan._native, targets.table
    if (
        core is not None
        and core.flat_is_apart(source.data_ptr(), DTYPE_CODES[source.dtype], table)
        and core.is_disjoint(table)
        and all(core.is_outside(table, *_range(scale)) for _, scale in scales)
    ):
        return
    _refuse([*_of_list(tensors, written=True), *_of_slots(plan, flat), *(_span(*scale) for scale in scales)])


def check_into_list(plan: Plan, out: NamedList, tensors: NamedList, scale: Named) -> None:
    """Check the memory of an op that reads `tensors` (one per slot) and `scale`, and writes `out`.

    `out` may be the same list as `tensors`.
    """
    (_, targets), (_, sources), (_, scalar) = out, tensors, scale
    if _has_no_addresses(plan, targets):
        return
    core, in_place = plan._native, targets is sources
    if (
        core is not None
        and core.is_disjoint(targets.table)
        and (in_place or core.lists_are_apart(targets.table, sources.table))
        and core.is_outside(targets.table, *_range(scalar))
    ):
        return
    _refuse([*_of_list(out, written=True), *([] if in_place else _of_list(tensors)), _span(*scale)])


def check_in_place(plan: Plan, lists: Sequence[NamedList], scale: Named) -> None:
    """Check an op that writes several lists of different dtypes in place, and reads a scale."""
    core, tables = plan._native, [pointers.table for _, pointers in lists]
    if any(_has_no_addresses(plan, pointers) for _, pointers in lists):
        return
    if (
        core is not None
        and all(core.is_disjoint(table) and core.is_outside(table, *_range(scale[1])) for table in tables)
        and all(core.lists_are_apart(one, two) for one, two in combinations(tables, 2))
    ):
        return
    _refuse([*(span for each in lists for span in _of_list(each, written=True)), _span(*scale)])


def check_into(plan: Plan, targets: Sequence[Named], tensors: NamedList) -> None:
    """Check an op that writes whole tensors and reads `tensors`, one per slot.

    None of `tensors` may overlap the written memory.
    """
    _, sources = tensors
    if _has_no_addresses(plan, sources, targets[0][1]):
        return
    core = plan._native
    if core is None or not all(core.is_outside(sources.table, *_range(target)) for _, target in targets):
        _refuse([*(_span(*target, written=True) for target in targets), *_of_list(tensors)])


def check_results(plan: Plan, results: Sequence[Named], lists: Sequence[NamedList], *others: Named) -> None:
    """Check that the small outputs of an op, for example its flags, share no memory with anything else.

    `lists` (one tensor per slot) and `others` are the other memory of the op, which may be written, too.
    """
    addressed = [each for each in lists if not _has_no_addresses(plan, each[1], results[0][1])]
    if addressed and not _are_apart(plan._native, results, addressed, others):
        read = [span for each in addressed for span in _of_list(each)]
        written = [_span(*each, written=True) for each in results]
        _refuse([*written, *(_span(*each) for each in others), *read])


def _are_apart(
    core: Any, results: Sequence[Named], lists: Sequence[NamedList], others: Sequence[Named]
) -> bool:
    """Whether no result overlaps other memory; False without the core. Loops are plain, for speed."""
    if core is None:
        return False
    ranges = [_range(tensor) for _, tensor in (*results, *others)]
    for index in range(len(results)):
        begin, end = ranges[index]
        for _, pointers in lists:
            if not core.is_outside(pointers.table, begin, end):
                return False
        for first, last in ranges[index + 1 :]:
            if begin < last and first < end:
                return False
    return True


def check_apart(targets: Sequence[tuple[str, Tensor | None]], sources: Sequence[Named]) -> None:
    """Check an op that writes all of `targets` and reads all of `sources`."""
    written = [(name, tensor) for name, tensor in targets if tensor is not None]
    if written[0][1].device.type in ADDRESSED:
        _refuse([*(_span(*target, written=True) for target in written), *(_span(*s) for s in sources)])


def _has_no_addresses(plan: Plan, tensors: Pointers, written: Tensor | None = None) -> bool:
    """Whether the tensors are on a device without addresses (lazy, meta).

    If all entries are None, the device is that of `written`, or the result is True.
    """
    if plan._native is not None:
        return tensors.table is None
    device = written.device if tensors.device is None and written is not None else tensors.device
    return device is None or device.type not in ADDRESSED


def _range(tensor: Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.nbytes


def _is_same(buffer: Tensor, target: Tensor) -> bool:
    """Whether the slots of two buffers have the same addresses; False for a scale."""
    return buffer.dim() > 0 and buffer.data_ptr() == target.data_ptr() and buffer.dtype == target.dtype


def _span(name: str, tensor: Tensor, *, slot: int = -1, written: bool = False) -> _Span:
    return _Span(*_range(tensor), name, tensor.dtype, slot, written)


def _of_slots(plan: Plan, flat: Named, *, written: bool = False) -> list[_Span]:
    name, tensor = flat
    return [
        _span(f"slot {slot} of {name}", tensor[offset : offset + numel], slot=slot, written=written)
        for slot, (offset, numel) in enumerate(plan._slots)
    ]


def _of_list(tensors: NamedList, *, written: bool = False) -> list[_Span]:
    name, pointers = tensors
    return [
        _span(f"{name}[{slot}]", tensor, slot=slot, written=written)
        for slot, tensor in enumerate(pointers.tensors)
        if tensor is not None
    ]


def _refuse(spans: list[_Span]) -> None:
    """Raise ValueError if a written span shares memory with another span, unless the op works in place."""
    near: list[_Span] = []
    for span in sorted(span for span in spans if span.begin < span.end):
        near = [other for other in near if other.end > span.begin]
        for other in near:
            if not (span.written or other.written):
                continue
            if span.written == other.written or not span.is_in_place_of(other):
                one, two = (span, other) if span.written else (other, span)
                raise ValueError(
                    f"{one.name} shares memory with {two.name} (they begin {abs(one.begin - two.begin)} "
                    f"bytes apart), and {one.name} is written; expected memory of its own, or exactly the "
                    "memory of the same slot in the same dtype: pass a clone() of one of them"
                )
        near.append(span)
