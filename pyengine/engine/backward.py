"""The start of a backward: argument checks, and a hook that runs before every backward of a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode


def checked_backward(
    loss: Tensor,
    *,
    gradient: Tensor | None,
    retain_graph: bool | None,
    create_graph: bool,
    inputs: Tensor | Sequence[Tensor] | None,
) -> Callable[[Tensor], None]:
    """Return a function that runs the backward of the scaled loss; raise ValueError for invalid arguments."""
    if not isinstance(loss, Tensor) or (loss.dim() != 0 and gradient is None):
        shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss: expected a 0-dim tensor, got {shape}; reduce it with sum (count=items) or mean"
        )
    if not loss.requires_grad:
        raise ValueError(
            "loss does not require a gradient: it was detached or computed under no_grad, or every "
            "parameter that it depends on is frozen"
        )
    if gradient is not None and gradient.shape != loss.shape:
        raise ValueError(
            f"gradient has shape {list(gradient.shape)}, expected the loss's shape, {list(loss.shape)}"
        )
    wanted = [inputs] if isinstance(inputs, Tensor) else inputs
    if wanted is not None and not (len(wanted) and all(item.requires_grad for item in wanted)):
        raise ValueError(
            "inputs: expected at least one tensor, and only tensors that require a gradient; or leave it out"
        )
    return lambda scaled: torch.autograd.backward(
        scaled, gradient, retain_graph=retain_graph, create_graph=create_graph, inputs=wanted
    )


class BeforeBackward(TorchFunctionMode):
    """Calls `action(roots)` before every backward in the body, on the calling thread."""

    def __init__(self, action: Callable[[Sequence[Tensor | GradientEdge]], None]) -> None:
        super().__init__()
        self._action = action

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            self._action(args[:1])
        elif func is torch.autograd.backward:
            self._action(args[0])
        return func(*args, **(kwargs or {}))
