"""The fused operations without an engine or a plan: `pe.ops.accumulate_(acc, grads)`.

A list has contiguous float32, bfloat16 or float16 tensors of any shapes on one device, in one dtype except
for the norms. In a flat buffer they follow each other without gaps. A list with a None (a parameter without a
gradient) needs `like`: tensors of the same numels, for example the parameters. A scale is a number, or
float32 [] on that device, which the host does not read; products are rounded to float32. Bits and costs are
those of `BucketPlan`. Nothing here is differentiable. A write increments the version of the tensor, as in
PyTorch, so that autograd refuses to use a saved tensor that was overwritten.

On CUDA only the first call for a list of these sizes waits for the device. `torch.compile` traces through
every call, outside of its CUDA graphs. To capture a graph of your own, keep a `BucketPlan`.

All functions raise ValueError or TypeError for arguments that do not fit, before they write anything.
"""

from __future__ import annotations

import functools
import itertools
import math
import reprlib
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from pyengine.ops.overlap import check_in_place
from pyengine.ops.plan import add_up
from pyengine.ops.pointers import TensorList, check_flat, check_scale
from pyengine.ops.versions import BucketPlan

Tensors: TypeAlias = Iterable[Tensor | None]
Scale: TypeAlias = float | Tensor


@torch.no_grad()
def flatten(
    tensors: Tensors,
    *,
    scale: Scale = 1.0,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    like: Tensors | None = None,
) -> Tensor:
    """Return `cast(tensor * scale)` of every tensor in one flat tensor; zeros where the entry is None.

    Args:
        tensors: any shapes, read.
        scale: float32 [] or a number.
        dtype: float32, bfloat16 or float16 of a new result; None is that of the tensors.
        out: float32, bfloat16 or float16 [at least the sum of numels], written and returned instead of a new
            tensor.
        like: tensors of the same numels, needed where an entry is None.

    Cost: reads and writes one element each.

    Example:
        >>> pe.ops.flatten([torch.ones(2, 2), torch.ones(1)], scale=0.5, dtype=torch.bfloat16)
        tensor([0.5000, 0.5000, 0.5000, 0.5000, 0.5000], dtype=torch.bfloat16)
    """
    entries, numels = _slots("tensors", tensors, like)
    first = next((tensor for tensor in entries if tensor is not None), out)
    if first is None:
        raise ValueError("tensors holds no tensor, so the result's dtype and device are unknown; pass out=")
    if out is None:
        out = torch.empty(sum(numels), dtype=dtype or first.dtype, device=first.device)
    elif dtype is not None:
        raise ValueError(f"dtype={dtype} and out are given; needed one of them, since out has a dtype")
    _flatten_(out, entries, _scalar("scale", scale, _tensor("out", out)), numels)
    return out


@torch.no_grad()
def unflatten_(tensors: Tensors, flat: Tensor, *, scale: Scale = 1.0, like: Tensors | None = None) -> None:
    """Write `cast(slice of flat * scale)` into every tensor; a None is skipped, with its slice.

    Args:
        tensors: any shapes, written.
        flat: float32, bfloat16 or float16 [at least the sum of numels], read.
        scale, like: as in `flatten`.

    Cost: as `flatten`.

    Example:
        >>> pe.ops.unflatten_([grad := torch.empty(1, 2)], torch.ones(2), scale=0.5)
        >>> grad
        tensor([[0.5000, 0.5000]])
    """
    entries, numels = _slots("tensors", tensors, like)
    slots, present = _present(entries)
    _unflatten_(present, flat, _scalar("scale", scale, _tensor("flat", flat)), numels, slots)


@torch.no_grad()
def accumulate_(
    acc: Tensor, grads: Tensors, *, scale: Scale = 1.0, first: bool = False, like: Tensors | None = None
) -> Tensor:
    """Add `grad * scale` of every gradient to the flat `acc` and return it.

    Product and sum are rounded separately.

    Args:
        acc: float32 [at least the sum of numels], written; not read if `first`. Keeps an inf or nan for
            `unscale_norm`.
        grads: any shapes, read. None: zeros if `first`, otherwise its elements stay unchanged.
        scale, like: as in `flatten`.
        first: write instead of adding, so that nothing has to be cleared.

    Cost: reads the gradient, writes 4 bytes, and reads 4 unless `first`: 10 (6) for bfloat16.

    Example:
        >>> grad = torch.ones(2, dtype=torch.bfloat16)
        >>> acc = pe.ops.accumulate_(torch.empty(2), [grad], first=True)
        >>> pe.ops.accumulate_(acc, [grad], scale=0.5)
        tensor([1.5000, 1.5000])
    """
    entries, numels = _slots("grads", grads, like)
    _accumulate_(acc, entries, _scalar("scale", scale, _tensor("acc", acc)), numels, first)
    return acc


@torch.no_grad()
def unscale_norm(tensors: Tensors, inv_scale: Scale = 1.0) -> tuple[Tensor, Tensor]:
    """Return the 2-norm over all `tensor * inv_scale`, and whether any is not finite.

    Nothing is written.

    Args:
        tensors: any shapes and mixed dtypes (a launch for each), read. None counts zero, and needs no `like`.
        inv_scale: float32 [] or a number: 1 / loss scale, 1 / count, or both.

    Returns:
        norm: float32 [], rounded once from the root of a float64 sum in a fixed order.
        found_inf: float32 [], 1 if some `tensor * inv_scale` is inf or nan, else 0.

    Cost: reads one element.

    Example:
        >>> pe.ops.unscale_norm([torch.tensor([6.0, 8.0]), torch.zeros(1)], 0.5)
        (tensor(5.), tensor(0.))
    """
    slots, present = _present(tensors)
    return _unscale_norm(present, _scalar("inv_scale", inv_scale, *present), slots)


@torch.no_grad()
def unscale_norm_(tensors: Tensors, inv_scale: Scale = 1.0) -> tuple[Tensor, Tensor]:
    """Multiply every tensor by `inv_scale` in place; return norm and found_inf of the results.

    One pass, in place of `GradScaler.unscale_` and the norm of `clip_grad_norm_`. To clip, multiply by
    `(max_norm / (norm + 1e-6)).clamp(max=1.0)` in the next pass.

    Args:
        tensors: as in `unscale_norm`, written: gradients, not parameters.
        inv_scale: as there.

    Cost: reads and writes one element.

    Example:
        >>> pe.ops.unscale_norm_([grad := torch.tensor([6.0, 8.0])], 0.5)
        (tensor(5.), tensor(0.))
        >>> grad
        tensor([3., 4.])
    """
    slots, present = _present(tensors)
    for slot, tensor in zip(slots, present, strict=True):
        if isinstance(tensor, torch.nn.Parameter):
            raise TypeError(
                f"tensors[{slot}] is a Parameter; needed its gradient: pass [p.grad for p in params]"
            )
    return _unscale_norm_(present, _scalar("inv_scale", inv_scale, *present), slots)


def _tensor(name: str, tensor: object, remedy: str = "") -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}; needed a torch.Tensor{remedy}")
    return tensor


def _slots(name: str, tensors: Tensors, like: Tensors | None) -> tuple[TensorList, list[int]]:
    entries = list(tensors)
    sizes_name, sizes = (name, entries) if like is None else ("like", list(like))
    remedy = f": where {name} hold None, pass like=, tensors of the same numels such as the parameters"
    return entries, [_tensor(f"{sizes_name}[{i}]", size, remedy).numel() for i, size in enumerate(sizes)]


def _present(tensors: Tensors) -> tuple[list[int], list[Tensor]]:
    """Return the indices of entries that are not None, and these entries."""
    present = {i: _tensor(f"tensors[{i}]", tensor) for i, tensor in enumerate(tensors) if tensor is not None}
    return list(present), list(present.values())


_LARGEST = torch.finfo(torch.float32).max


def _scalar(name: str, scale: Scale, *beside: Tensor) -> Tensor:
    """Return a scale as a tensor; a number on the device of the first tensor `beside`."""
    if isinstance(scale, Tensor):
        return scale
    if not isinstance(scale, Real):
        raise TypeError(f"{name} is {type(scale).__name__}; needed a real number, or float32 []")
    if _LARGEST < abs(scale) < math.inf:
        raise ValueError(f"{name}={reprlib.repr(scale)}; needed a number in the range of float32")
    device = beside[0].device if beside else None
    return torch.full((), scale, dtype=torch.float32, device=device)


# ---- the same as operators `torch.ops.pyengine`, for `torch.compile`: a graph has each as one node ----

# Compiled code calls torch's dispatcher. Other code calls the same functions directly: for a list of hundreds
# of tensors the dispatcher takes several times as long as the call of a kernel.
_P = ParamSpec("_P")
_R = TypeVar("_R")
# The cache may drop a plan while a CUDA graph would still read its memory.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)


def _operator(
    schema: str, fake: Callable[..., object] = lambda *arguments: None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Register a function as `torch.ops.pyengine.<its name without _>`, used in compiled code."""

    def register(run: Callable[_P, _R]) -> Callable[_P, _R]:
        public = run.__name__[1:]
        name = f"pyengine::{public}"
        torch.library.define(name, schema, tags=_TAGS)
        torch.library.impl(name, "CompositeExplicitAutograd", run)
        torch.library.register_fake(name, fake)
        registered = getattr(torch.ops.pyengine, public)

        @functools.wraps(run)
        def call(*arguments: _P.args, **named: _P.kwargs) -> _R:
            return (registered if torch.compiler.is_compiling() else run)(*arguments, **named)

        return call

    return register


@_operator("(Tensor(a!) out, Tensor?[] tensors, Tensor scale, SymInt[] numels) -> ()")
def _flatten_(out: Tensor, tensors: TensorList, scale: Tensor, numels: Sequence[int]) -> None:
    """`numels` are those of every entry, also where it is None; so in all operators."""
    check_flat("out", out, sum(numels), out.device)
    _plan(*numels).pack_(out, tensors, scale)


# In a schema that torch.compile accepts, a written list cannot have None. Such lists are passed without None,
# and with the slots of their tensors.
@_operator("(Tensor(a!)[] tensors, Tensor flat, Tensor scale, SymInt[] numels, SymInt[] slots) -> ()")
def _unflatten_(
    tensors: TensorList, flat: Tensor, scale: Tensor, numels: Sequence[int], slots: Sequence[int]
) -> None:
    """`slots` are the indices of the tensors in the list with None."""
    _plan(*numels).unpack_(_spread(tensors, slots, len(numels)), flat, scale)


@_operator("(Tensor(a!) acc, Tensor?[] grads, Tensor scale, SymInt[] numels, bool first) -> ()")
def _accumulate_(acc: Tensor, grads: TensorList, scale: Tensor, numels: Sequence[int], first: bool) -> None:
    nonfinite = torch.empty(len(numels), dtype=torch.uint8, device=acc.device)  # not used
    _plan(*numels).accumulate_(acc, grads, scale, first=first, nonfinite=nonfinite)


def _fake_norm(tensors: TensorList, inv_scale: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(inv_scale), torch.empty_like(inv_scale)


@_operator("(Tensor[] tensors, Tensor inv_scale, SymInt[] slots) -> (Tensor, Tensor)", _fake_norm)
def _unscale_norm(tensors: TensorList, inv_scale: Tensor, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
    return _unscale_by_dtype(_spread(tensors, slots), inv_scale, is_written=False)


@_operator("(Tensor(a!)[] tensors, Tensor inv_scale, SymInt[] slots) -> (Tensor, Tensor)", _fake_norm)
def _unscale_norm_(tensors: TensorList, inv_scale: Tensor, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
    return _unscale_by_dtype(_spread(tensors, slots), inv_scale, is_written=True)


def _unscale_by_dtype(tensors: TensorList, inv_scale: Tensor, *, is_written: bool) -> tuple[Tensor, Tensor]:
    """Run once for each dtype, with None for tensors of the others; add sums in the order of the list."""
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
    if is_written and len(groups) > 1:
        check_in_place(plan, [("tensors", group) for group in groups], ("inv_scale", inv_scale))
    # One more element than tensors: a sum needs at least one. Its total also shows what `nonfinite` shows.
    sumsq = torch.zeros(len(groups), len(tensors) + 1, dtype=torch.float64, device=device)
    nonfinite = torch.empty(len(tensors), dtype=torch.uint8, device=device)
    for row, group in zip(sumsq, groups, strict=True):
        out = group if is_written else None
        plan.unscale_norm(group, out, inv_scale, sumsq=row[:-1], nonfinite=nonfinite)
    total = add_up(sumsq.sum(0))
    return total.sqrt().float(), (~torch.isfinite(total)).float()


def _spread(tensors: TensorList, slots: Sequence[int], num_slots: int | None = None) -> TensorList:
    spread: list[Tensor | None] = [None] * (max(slots, default=-1) + 1 if num_slots is None else num_slots)
    for slot, tensor in zip(slots, tensors, strict=True):
        spread[slot] = tensor
    return spread


# Every call has the layout as its argument; a model has a handful of layouts.
@functools.lru_cache(maxsize=32)
def _plan(*numels: int) -> BucketPlan:
    return BucketPlan([*itertools.accumulate(numels, initial=0)][:-1], numels)
