"""The layout of gradients in buckets.

A layout is plain data, computed only from the parameters' descriptions and the bucket cap. Ranks with equal
parameters therefore compute the same layout without communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# 64 elements are 128 bytes in a 2-byte communication dtype and 256 bytes in fp32. One offset therefore serves
# both buffers of a bucket, and every slot is aligned to a pair of cache lines (and can use NCCL's 128-byte
# fast path).
ALIGN_ELEMENTS = 64


@dataclass(frozen=True)
class ParamSpec:
    """The properties of a parameter that determine its layout."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    # The strides of a parameter that is not contiguous (for example channels_last), which determine the order
    # of its elements in the bucket; empty for contiguous parameters.
    strides: tuple[int, ...] = ()
    group: int = 0  # Index of the group of ranks that sums the gradient.
    stored: str = ""  # How a frozen parameter that is not a plain tensor is stored, as text.

    @classmethod
    def of(cls, name: str, param: torch.nn.Parameter) -> ParamSpec:
        strides = () if param.is_contiguous() else param.stride()
        return cls(name, tuple(param.shape), param.dtype, param.requires_grad, strides)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """The range of one parameter in a bucket, in elements."""

    param: int  # registration index
    name: str
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketSpec:
    """A flat range of `numel` elements that is reduced as a whole, over one group of ranks."""

    index: int
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    numel: int
    group: int = 0


@dataclass(frozen=True)
class Layout:
    """The buckets of all gradients, in the order in which a backward fills them."""

    params: tuple[ParamSpec, ...]
    buckets: tuple[BucketSpec, ...]

    @property
    def numel(self) -> int:
        """The number of elements in all buckets, including padding."""
        return sum(bucket.numel for bucket in self.buckets)


# All slots of a bucket have the same dtype and group.
_Kind = tuple[torch.dtype, int]


def backward_order(params: Sequence[ParamSpec]) -> list[int]:
    """Return the expected order of gradients in a backward: last registered first."""
    return [index for index in reversed(range(len(params))) if params[index].requires_grad]


def build(
    params: Sequence[ParamSpec],
    order: Sequence[int],
    *,
    cap_bytes: int,
    first_bytes: int | None = None,
) -> Layout:
    """Assign parameters to buckets in the order of their gradients.

    Args:
        order: registration indices of the parameters to lay out: the result of `backward_order`, or an
            observed order.
        cap_bytes: a bucket is closed when it contains this many bytes of gradients; parameters are never
            split.
        first_bytes: a smaller cap for the first bucket of each dtype and group. The buckets of a group must
            not depend on parameters of other groups, which may differ between the ranks of this group.
    """
    first_cap = cap_bytes if first_bytes is None else min(cap_bytes, first_bytes)
    open_slots: dict[_Kind, list[Slot]] = {}
    closed: list[tuple[_Kind, list[Slot]]] = []
    begun: set[_Kind] = set()  # combinations of dtype and group that have a closed bucket
    for index in order:
        spec = params[index]
        kind = spec.dtype, spec.group
        slots = open_slots.setdefault(kind, [])
        slots.append(Slot(index, spec.name, _end(slots), spec.numel))
        if _end(slots) * spec.dtype.itemsize >= (cap_bytes if kind in begun else first_cap):
            closed.append((kind, open_slots.pop(kind)))
            begun.add(kind)
    closed.extend(open_slots.items())
    buckets = (
        BucketSpec(index, dtype, tuple(slots), _end(slots) or ALIGN_ELEMENTS, group)
        for index, ((dtype, group), slots) in enumerate(closed)
    )
    return Layout(tuple(params), tuple(buckets))


def first_difference(params: Sequence[Sequence[ParamSpec]], ranks: Sequence[int] = ()) -> str | None:
    """Describe the first parameter that differs between `ranks`; return None if all parameters are equal."""
    if all(specs is params[0] or specs == params[0] for specs in params):  # often the same object
        return None
    lengths = {rank: len(specs) for rank, specs in enumerate(params)}
    for index in range(max(lengths.values())):
        specs = [_describe(specs[index]) if index < len(specs) else "no such parameter" for specs in params]
        if len(set(specs)) > 1:
            return f"parameter {index}: {_by_rank(specs, ranks or range(len(specs)))}"
    return None


def _end(slots: list[Slot]) -> int:
    if not slots:
        return 0
    return -(-(slots[-1].offset + slots[-1].numel) // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


def _describe(spec: ParamSpec) -> str:
    frozen = "" if spec.requires_grad else ", requires_grad=False"
    strides = f" with strides {list(spec.strides)}" if spec.strides else ""
    dtype = str(spec.dtype).removeprefix("torch.")
    return f"{spec.name!r} {list(spec.shape)} {dtype}{strides}{frozen}{spec.stored}"


def _by_rank(specs: Sequence[str], ranks: Sequence[int]) -> str:
    owners: dict[str, list[int]] = {}
    for rank, text in zip(ranks, specs, strict=True):
        owners.setdefault(text, []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, ranks))} has {text}" for text, ranks in owners.items())
