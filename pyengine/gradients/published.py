"""Gradients as they stand in `.grad` once a window has landed: read there, whoever owns them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_value_, get_total_norm

from pyengine.gradients.slots import local


@torch.no_grad()
def largest(params: Sequence[Parameter]) -> Tensor:
    """Return the largest absolute value of all gradients.

    Returns:
        float64 0-dim on their device, of what this rank holds; nan if one holds nan, 0 if there is none.

    Cost: reads one element.
    """
    grads = [grad for grad in parts(params) if grad is not None and grad.numel()]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=params[0].device)
    return get_total_norm(grads, math.inf).double()  # of a maximum every type holds all bits


@torch.no_grad()
def norms(params: Sequence[Parameter]) -> Tensor:
    """Return the 2-norm of what this rank holds of every gradient, float64 `[parameters]`, on their device;
    0 where there is none.

    Cost: reads one element, and copies it to float64.
    """
    none = torch.zeros((), dtype=torch.float64, device=params[0].device)
    return torch.stack([none if grad is None else grad.double().norm() for grad in parts(params)])


@torch.no_grad()
def clip_values_(params: Sequence[Parameter], value: float) -> None:
    """Clip every element to [-value, value], in place.

    Cost: reads and writes one element.
    """
    held: list[Any] = [SimpleNamespace(grad=grad) for grad in parts(params)]
    clip_grad_value_(held, value)


def parts(params: Sequence[Parameter]) -> list[Tensor | None]:
    """Return what this rank holds of every gradient, in its memory; None where there is none."""
    return [None if param.grad is None else local(param.grad) for param in params]
