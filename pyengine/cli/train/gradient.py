"""A window's gradient: taken from a model, computed the slow and certain way, and compared."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pyengine.cli.tasks.base import Batch, Task


def take(model: nn.Module) -> Tensor:
    """Return all gradients as one flat float64 vector, and clear them."""
    flat = torch.cat(
        [param.grad.double().reshape(-1) for param in model.parameters() if param.grad is not None]
    )
    for param in model.parameters():
        param.grad = None
    return flat


def of_one_big_batch(task: Task, model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """Return the gradient of the mean over all items of all batches: one backward of a float64 copy of the
    model.

    The copy is in eval mode: batch statistics differ by micro-batch, and with them no split equals the big
    batch.
    """
    exact = copy.deepcopy(model).double().eval()
    joined = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    loss, count = task.loss(exact, joined)
    (loss / count).backward()
    return take(exact)


def difference(got: Tensor, right: Tensor) -> float:
    """Return the relative distance in the 2-norm."""
    return float((got - right).norm() / right.norm())
