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

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from pyengine.ops import library
from pyengine.ops.pointers import TensorList

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
    library.flatten_(out, entries, _scalar(scale, _tensor("out", out)), numels)
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
    library.unflatten_(present, flat, _scalar(scale, _tensor("flat", flat)), numels, slots)


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
    library.accumulate_(acc, entries, _scalar(scale, _tensor("acc", acc)), numels, first)
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
    return library.unscale_norm(present, _scalar(inv_scale, *present), slots)


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
    return library.unscale_norm_(present, _scalar(inv_scale, *present), slots)


def _tensor(name: str, tensor: object, remedy: str = "") -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}; needed a torch.Tensor{remedy}")
    return tensor


def _slots(name: str, tensors: Tensors, like: Tensors | None) -> tuple[TensorList, list[int]]:
    """Return the list, and the numel of each entry."""
    entries = list(tensors)
    sizes_name, sizes = (name, entries) if like is None else ("like", list(like))
    remedy = f": where {name} hold None, pass like=, tensors of the same numels such as the parameters"
    return entries, [_tensor(f"{sizes_name}[{i}]", size, remedy).numel() for i, size in enumerate(sizes)]


def _present(tensors: Tensors) -> tuple[list[int], list[Tensor]]:
    """Return the indices of entries that are not None, and these entries."""
    present = {i: _tensor(f"tensors[{i}]", tensor) for i, tensor in enumerate(tensors) if tensor is not None}
    return list(present), list(present.values())


def _scalar(scale: Scale, *beside: Tensor) -> Tensor:
    """Return a scale as a tensor; a number on the device of the first tensor `beside`."""
    if isinstance(scale, Tensor):
        return scale
    device = beside[0].device if beside else None
    return torch.full((), scale, dtype=torch.float32, device=device)
