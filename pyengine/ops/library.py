"""The ops of `functional.py` as operators `torch.ops.pyengine`, for `torch.compile`.

A graph has each as one node. Compiled code calls torch's dispatcher. Other code calls the same functions
directly: for a list of hundreds of tensors the dispatcher takes several times as long as the call of a
kernel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from pyengine.ops.plan import add_up
from pyengine.ops.pointers import TensorList, check_flat, check_scale
from pyengine.ops.versions import BucketPlan

_P = ParamSpec("_P")
_R = TypeVar("_R")
# The cache may drop a plan while a CUDA graph would still read its memory.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)


def _operator(
    schema: str, fake: Callable[..., object] = lambda *arguments: None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Register a function as `torch.ops.pyengine.<its name>`, used in compiled code."""

    def register(run: Callable[_P, _R]) -> Callable[_P, _R]:
        name = f"pyengine::{run.__name__}"
        torch.library.define(name, schema, tags=_TAGS)
        torch.library.impl(name, "CompositeExplicitAutograd", run)
        torch.library.register_fake(name, fake)
        registered = getattr(torch.ops.pyengine, run.__name__)

        @functools.wraps(run)
        def call(*arguments: _P.args, **named: _P.kwargs) -> _R:
            return (registered if torch.compiler.is_compiling() else run)(*arguments, **named)

        return call

    return register


@_operator("(Tensor(a!) out, Tensor?[] tensors, Tensor scale, SymInt[] numels) -> ()")
def flatten_(out: Tensor, tensors: TensorList, scale: Tensor, numels: Sequence[int]) -> None:
    """Run `functional.flatten` into `out`, one of three dtypes [at least the sum of numels].

    scale: float32 []; numels: int [n], of every entry, also where it is None. So in all operators.
    """
    check_flat("out", out, sum(numels), out.device)
    _plan(*numels).pack_(out, tensors, scale)


# In a schema that torch.compile accepts, a written list cannot have None. Such lists are passed without None,
# and with the slots of their tensors.
@_operator("(Tensor(a!)[] tensors, Tensor flat, Tensor scale, SymInt[] numels, SymInt[] slots) -> ()")
def unflatten_(
    tensors: TensorList, flat: Tensor, scale: Tensor, numels: Sequence[int], slots: Sequence[int]
) -> None:
    """Run `functional.unflatten_` over `flat`, one of three dtypes [at least the sum of numels].

    slots: int [as many as tensors], their indices in the list with None.
    """
    _plan(*numels).unpack_(_spread(tensors, slots, len(numels)), flat, scale)


@_operator("(Tensor(a!) acc, Tensor?[] grads, Tensor scale, SymInt[] numels, bool first) -> ()")
def accumulate_(acc: Tensor, grads: TensorList, scale: Tensor, numels: Sequence[int], first: bool) -> None:
    """Run `functional.accumulate_` into `acc`, float32 [at least the sum of numels]."""
    nonfinite = torch.empty(len(numels), dtype=torch.uint8, device=acc.device)  # not used
    _plan(*numels).accumulate_(acc, grads, scale, first=first, nonfinite=nonfinite)


def _fake_norm(tensors: TensorList, inv_scale: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(inv_scale), torch.empty_like(inv_scale)


@_operator("(Tensor[] tensors, Tensor inv_scale, SymInt[] slots) -> (Tensor, Tensor)", _fake_norm)
def unscale_norm(tensors: TensorList, inv_scale: Tensor, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Run `functional.unscale_norm`; both results are new memory, float32 []."""
    return _unscale_norm(_spread(tensors, slots), inv_scale, is_written=False)


@_operator("(Tensor(a!)[] tensors, Tensor inv_scale, SymInt[] slots) -> (Tensor, Tensor)", _fake_norm)
def unscale_norm_(tensors: TensorList, inv_scale: Tensor, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Run `functional.unscale_norm_`, whose tensors are written."""
    return _unscale_norm(_spread(tensors, slots), inv_scale, is_written=True)


def _unscale_norm(tensors: TensorList, inv_scale: Tensor, *, is_written: bool) -> tuple[Tensor, Tensor]:
    """Run once for each dtype, with None for tensors of the other dtypes.

    Sums are added in the order of the list.
    """
    check_scale("inv_scale", inv_scale, inv_scale.device)
    plan, device = _plan(*(0 if t is None else t.numel() for t in tensors)), inv_scale.device
    dtypes = dict.fromkeys(t.dtype for t in tensors if t is not None)
    # All groups are checked before the first is written.
    groups = [
        plan._gather(
            "tensors",
            [t if t is not None and t.dtype == dtype else None for t in tensors],
            ("inv_scale", inv_scale),
        )
        for dtype in dtypes
    ]
    # One more element than tensors: a sum needs at least one. Its total also shows what `nonfinite` shows.
    sumsq = torch.zeros(len(groups), len(tensors) + 1, dtype=torch.float64, device=device)
    nonfinite = torch.empty(len(tensors), dtype=torch.uint8, device=device)
    for row, group in zip(sumsq, groups, strict=True):
        out = group if is_written else None
        plan.unscale_norm(group, out, inv_scale, sumsq=row[:-1], nonfinite=nonfinite)
    total = add_up(sumsq.sum(0))
    return total.sqrt().float(), (~torch.isfinite(total)).float()


def _spread(tensors: TensorList, slots: Sequence[int], num_slots: int | None = None) -> TensorList:
    """Return a list with tensors at their slots and None elsewhere."""
    spread: list[Tensor | None] = [None] * (max(slots, default=-1) + 1 if num_slots is None else num_slots)
    for slot, tensor in zip(slots, tensors, strict=True):
        spread[slot] = tensor
    return spread


# Every call has the layout as its argument; a model has a handful of layouts.
@functools.lru_cache(maxsize=32)
def _plan(*numels: int) -> BucketPlan:
    return BucketPlan([*itertools.accumulate(numels, initial=0)][:-1], numels)
