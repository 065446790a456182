"""Gradients as slots (ranges) of a flat buffer.

A slot is a 1-D view, with elements in the order in which the parameter is stored.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.ops.plan import BucketPlan


def local(tensor: Any) -> Tensor:
    """Return this rank's local tensor of a DTensor, in the same memory; return other tensors unchanged."""
    part: Tensor = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor
    return part


def dense(grad: Tensor) -> Tensor:
    """Return a gradient as a strided tensor."""
    return grad if grad.layout is torch.strided else grad.to_dense()


def as_gradient(part: Tensor, param: Any) -> Tensor:
    """Return a local gradient, wrapped in a DTensor if `param` is a DTensor."""
    if not hasattr(param, "to_local"):
        return part
    whole: Tensor = type(param).from_local(
        part, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    return whole


def slots_of(flat: Tensor, plan: BucketPlan) -> list[Tensor]:
    """Return the slots of a flat buffer as views of shape `[slot.numel]`."""
    slots = zip(plan.offsets, plan.numels, strict=True)
    return [flat[offset : offset + numel] for offset, numel in slots]


def views_of(flat: Tensor, params: Sequence[Parameter], plan: BucketPlan) -> list[Tensor]:
    """Return the slots of a flat buffer as views with the shapes of their parameters.

    `.data` gives each view a separate version counter, which shows whether autograd has added to the slot.
    """
    return [
        flat.as_strided(param.size(), dense_strides(param), offset).data
        for param, offset in zip(params, plan.offsets, strict=True)
    ]


def dense_strides(param: Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter, or dense strides in the same order if its memory has gaps."""
    if param.is_contiguous():
        sizes = [max(size, 1) for size in param.shape]
        return tuple(itertools.accumulate(sizes[:0:-1], operator.mul, initial=1))[::-1] if sizes else ()
    return torch.empty_like(param.detach(), device="meta").stride()


def slot_gradient(param: Parameter) -> Tensor | None:
    """Return `param.grad` in the order of the slot; None if there is no gradient.

    The result is 1-D, or the gradient itself if it is contiguous. The result shares the memory of the
    gradient and is valid until `.grad` is replaced. A gradient is copied if it is sparse or lazily negated,
    or if its strides differ from those of the parameter.
    """
    if param.grad is None:
        return None
    grad = dense(
        param.grad
    ).resolve_neg()  # autograd negates lazily, for example the imaginary part of a conjugate
    if grad.is_contiguous() and param.is_contiguous():
        return grad
    like = torch.empty_like(param.detach(), dtype=grad.dtype)
    if grad.stride() != like.stride():
        grad = like.copy_(grad)
    return grad.as_strided((grad.numel(),), (1,), grad.storage_offset())
