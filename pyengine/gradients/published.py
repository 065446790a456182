"""Gradients as they stand in `.grad` once a window has landed: read there, whoever owns them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm


@torch.no_grad()
def largest(params: Sequence[Parameter]) -> Tensor:
    """Return the largest absolute value of all gradients.

    Returns:
        float64 0-dim on their device; nan if one holds nan, 0 if there is none.

    Cost: reads one element.
    """
    grads = [grad for param in params if (grad := param.grad) is not None and grad.numel()]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=params[0].device)
    return get_total_norm(grads, math.inf).double()  # of a maximum every type holds all bits


@torch.no_grad()
def norms(params: Sequence[Parameter]) -> Tensor:
    """Return the 2-norm of every gradient, float64 `[parameters]`, on their device; 0 where there is none.

    Cost: reads one element, and copies it to float64.
    """
    none = torch.zeros((), dtype=torch.float64, device=params[0].device)
    return torch.stack([none if param.grad is None else param.grad.double().norm() for param in params])
