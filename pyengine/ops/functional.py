"""The fused operations for use without an engine or a plan, for example `pe.ops.accumulate_(acc, grads)`.

A list contains contiguous float32, bfloat16 or float16 tensors of any shape on one device; all functions
except the norms require a single dtype. In a flat buffer the tensors follow each other without gaps. A list
with None entries (parameters without a gradient) needs `like`: tensors with the same numels, for example the
parameters. A scale is a number or a 0-dim float32 tensor on the same device; the host does not read the
tensor. Products are rounded to float32. Results and costs are the same as with a `BucketPlan`. The functions
are not differentiable. A write increments the version of the tensor, as in PyTorch, so autograd detects
writes to saved tensors.

On CUDA, only the first call with a particular combination of tensor sizes waits for the device.
`torch.compile` traces through every call, and keeps the calls outside of its CUDA graphs. To capture calls in
your own CUDA graph, create and keep a `BucketPlan`.

All functions raise ValueError or TypeError for invalid arguments before they write anything.
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
    """Return `cast(tensor * scale)` of every tensor in one flat tensor, with zeros for None entries.

    Args:
        tensors: any shapes, read.
        scale: float32 [] or a number.
        dtype: dtype of a new result: float32, bfloat16 or float16. None means the dtype of the tensors.
        out: float32, bfloat16 or float16 [at least the sum of numels], written and returned instead of a new
            tensor.
        like: tensors with the same numels as `tensors`; required if any entry of `tensors` is None.

    Cost: one read and one write per element.

    Example:
        >>> pe.ops.flatten([torch.ones(2, 2), torch.ones(1)], scale=0.5, dtype=torch.bfloat16)
        tensor([0.5000, 0.5000, 0.5000, 0.5000, 0.5000], dtype=torch.bfloat16)
    """
    entries, numels = _slots("tensors", tensors, like)
    first = next((tensor for tensor in entries if tensor is not None), out)
    if first is None:
        raise ValueError(
            "tensors contains no tensor, so the result's dtype and device are unknown; pass out="
        )
    if out is None:
        out = torch.empty(sum(numels), dtype=dtype or first.dtype, device=first.device)
    elif dtype is not None:
        raise ValueError(
            f"dtype={dtype} and out are both given; pass only one of them, because out already has a dtype"
        )
    _flatten_(out, entries, _scalar("scale", scale, _tensor("out", out)), numels)
    return out


@torch.no_grad()
def unflatten_(tensors: Tensors, flat: Tensor, *, scale: Scale = 1.0, like: Tensors | None = None) -> None:
    """Write `cast(slice of flat * scale)` into every tensor; None entries and their slices are skipped.

    Args:
        tensors: any shapes, written.
        flat: float32, bfloat16 or float16 [at least the sum of numels], read.
        scale, like: see `flatten`.

    Cost: one read and one write per element.

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
    """Add `grad * scale` of every gradient to the flat `acc` and return `acc`.

    The product and the sum are rounded separately.

    Args:
        acc: float32 [at least the sum of numels], written; not read if `first`. An inf or nan stays in `acc`,
            so that `unscale_norm` finds it.
        grads: any shapes, read. For None, the elements are zeroed if `first`, and otherwise unchanged.
        scale, like: see `flatten`.
        first: whether to overwrite `acc` instead of adding to it, so that `acc` need not be cleared.

    Cost: the function reads each gradient once, writes 4 bytes per element, and reads 4 bytes per element
    unless `first`. In total it moves 10 bytes per bfloat16 element, or 6 if `first`.

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
    """Return the 2-norm over all `tensor * inv_scale`, and whether any element is inf or nan.

    The tensors are not changed.

    Args:
        tensors: any shapes and mixed dtypes (one launch per dtype), read. None counts as zero and needs no
            `like`.
        inv_scale: float32 [] or a number: 1 / loss scale, 1 / count, or their product.

    Returns:
        norm: float32 [], the square root of a float64 sum in a fixed order, rounded once.
        found_inf: float32 [], 1 if any `tensor * inv_scale` is inf or nan, otherwise 0.

    Cost: one read per element.

    Example:
        >>> pe.ops.unscale_norm([torch.tensor([6.0, 8.0]), torch.zeros(1)], 0.5)
        (tensor(5.), tensor(0.))
    """
    slots, present = _present(tensors)
    return _unscale_norm(present, _scalar("inv_scale", inv_scale, *present), slots)


@torch.no_grad()
def unscale_norm_(tensors: Tensors, inv_scale: Scale = 1.0) -> tuple[Tensor, Tensor]:
    """Multiply every tensor by `inv_scale` in place; return the norm and found_inf of the results.

    This single pass replaces `GradScaler.unscale_` and the norm of `clip_grad_norm_`. To clip, multiply the
    gradients by `(max_norm / (norm + 1e-6)).clamp(max=1.0)` in the next pass.

    Args:
        tensors: gradients, as in `unscale_norm`; modified in place, so do not pass parameters.
        inv_scale: see `unscale_norm`.

    Cost: one read and one write per element.

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
                f"tensors[{slot}] is a Parameter; expected its gradient: pass [p.grad for p in params]"
            )
    return _unscale_norm_(present, _scalar("inv_scale", inv_scale, *present), slots)


def _tensor(name: str, tensor: object, remedy: str = "") -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}; expected a torch.Tensor{remedy}")
    return tensor


def _slots(name: str, tensors: Tensors, like: Tensors | None) -> tuple[TensorList, list[int]]:
    entries = list(tensors)
    sizes_name, sizes = (name, entries) if like is None else ("like", list(like))
    remedy = f": if {name} has None entries, pass like= with tensors of the same numels, e.g. the parameters"
    return entries, [_tensor(f"{sizes_name}[{i}]", size, remedy).numel() for i, size in enumerate(sizes)]


def _present(tensors: Tensors) -> tuple[list[int], list[Tensor]]:
    """Return the indices and values of all entries except None."""
    present = {i: _tensor(f"tensors[{i}]", tensor) for i, tensor in enumerate(tensors) if tensor is not None}
    return list(present), list(present.values())


_LARGEST = torch.finfo(torch.float32).max


def _scalar(name: str, scale: Scale, *beside: Tensor) -> Tensor:
    """Return a scale as a tensor; a number is sent to the device of the first tensor in `beside`."""
    if isinstance(scale, Tensor):
        return scale
    if not isinstance(scale, Real):
        raise TypeError(f"{name} is {type(scale).__name__}; expected a real number or a 0-dim float32 tensor")
    if _LARGEST < abs(scale) < math.inf:
        raise ValueError(f"{name}={reprlib.repr(scale)}; expected a number in the range of float32")
    device = beside[0].device if beside else None
    return torch.full((), scale, dtype=torch.float32, device=device)


# ---- the operators in `torch.ops.pyengine`: one node per call in graphs of `torch.compile` ----

# Compiled code calls the functions through torch's dispatcher. Other code calls the functions directly,
# because for a list of hundreds of tensors the dispatcher takes several times as long as a kernel call.
_P = ParamSpec("_P")
_R = TypeVar("_R")
# The operators are unsafe in CUDA graphs, because the cache may drop a plan whose memory a graph still reads.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)


def _operator(
    schema: str, fake: Callable[..., object] = lambda *arguments: None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Register a function as `torch.ops.pyengine.<its name without _>`, which compiled code calls."""

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
    """Run `flatten`. In all operators, `numels` has one number per entry, including None entries."""
    check_flat("out", out, sum(numels), out.device)
    _plan(*numels).pack_(out, tensors, scale)


# A list that is written cannot contain None in a schema that torch.compile accepts. Therefore the list is
# passed without its None entries, together with the slots of its tensors.
@_operator("(Tensor(a!)[] tensors, Tensor flat, Tensor scale, SymInt[] numels, SymInt[] slots) -> ()")
def _unflatten_(
    tensors: TensorList, flat: Tensor, scale: Tensor, numels: Sequence[int], slots: Sequence[int]
) -> None:
    """Run `unflatten_`; `slots` contains the index of each tensor in the list with None entries."""
    _plan(*numels).unpack_(_spread(tensors, slots, len(numels)), flat, scale)


@_operator("(Tensor(a!) acc, Tensor?[] grads, Tensor scale, SymInt[] numels, bool first) -> ()")
def _accumulate_(acc: Tensor, grads: TensorList, scale: Tensor, numels: Sequence[int], first: bool) -> None:
    nonfinite = torch.empty(len(numels), dtype=torch.uint8, device=acc.device)  # these flags are not used
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
    """Compute the norm for each dtype separately, and add the sums in the order of the list."""
    check_scale("inv_scale", inv_scale, inv_scale.device)
    plan, device = _plan(*(0 if t is None else t.numel() for t in tensors)), inv_scale.device
    dtypes = dict.fromkeys(t.dtype for t in tensors if t is not None)
    # Check all groups before any group is written.
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
    # Each row of `sumsq` has one element more than there are tensors, because a sum needs at least one
    # element. The flags in `nonfinite` are not used, because a nonfinite total contains the same information.
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


# Plans are cached by layout. The cache is small, because a model has few layouts.
@functools.lru_cache(maxsize=32)
def _plan(*numels: int) -> BucketPlan:
    return BucketPlan([*itertools.accumulate(numels, initial=0)][:-1], numels)
