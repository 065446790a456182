"""What a backward starts from: checks of the loss, and a look at every backward that a block runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from pyengine.ops.device import runs_ahead

# A loss may be cast, negated, and multiplied by a count, behind the division.
_SCALINGS = {"DivBackward0", "MulBackward0", "NegBackward0", "ToCopyBackward0"}


def checked_backward(
    loss: Tensor,
    *,
    gradient: Tensor | None,
    retain_graph: bool | None,
    create_graph: bool,
    inputs: Tensor | Sequence[Tensor] | None,
) -> Callable[[Tensor], None]:
    """Return the backward of a loss, to be run on the scaled one; raise ValueError if none can start."""
    if not isinstance(loss, Tensor) or (loss.dim() != 0 and gradient is None):
        shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss: got {shape}, need a 0-dim tensor; reduce it with sum (count=items) or mean")
    if not loss.requires_grad:
        raise ValueError(
            "loss: requires no gradient: it was detached or computed under no_grad, or every parameter "
            "in it is frozen"
        )
    if gradient is not None and gradient.shape != loss.shape:
        raise ValueError(
            f"gradient has shape {list(gradient.shape)}, need that of the loss, {list(loss.shape)}"
        )
    wanted = [inputs] if isinstance(inputs, Tensor) else inputs
    if wanted is not None and not (len(wanted) and all(item.requires_grad for item in wanted)):
        raise ValueError("inputs: need at least one tensor, and all that require a gradient; or leave it out")
    return lambda scaled: torch.autograd.backward(
        scaled, gradient, retain_graph=retain_graph, create_graph=create_graph, inputs=wanted
    )


def divided_by(loss: Tensor, divisors: Collection[int]) -> int | None:
    """Return the one of `divisors` by which a loss was divided as the last thing, from its graph alone.

    A division that is multiplied away again is none: that of a mean which is made the sum.
    """
    node, product = loss.grad_fn, 1.0
    while node is not None and node.name() in _SCALINGS:
        factor = _factor(node)
        product *= 1.0 if factor is None else factor
        for divisor in divisors:
            is_it = factor is not None and math.isclose(factor * divisor, 1.0, rel_tol=1e-6)
            if is_it and not math.isclose(product, 1.0, rel_tol=1e-6):
                return divisor
        node = next((following for following, _ in node.next_functions if following is not None), None)
    return None


def reduction_of(loss: Tensor) -> str:
    """Return "mean" or "sum" if a loss is just what one of torch's loss functions has returned, else ""."""
    reduction = getattr(loss.grad_fn, "_saved_reduction", None)  # torch's enum: none, mean, sum
    return {1: "mean", 2: "sum"}.get(reduction, "") if isinstance(reduction, int) else ""


def _factor(node: Any) -> float | None:
    """Return the number by which a node of the graph multiplies; None where it is no number of the host."""
    is_product = node.name() == "MulBackward0"
    other = getattr(node, "_saved_other", None)
    if other is None and is_product:
        other = node._saved_self  # noqa: SLF001 - autograd's names for saved tensors
    if not isinstance(other, Tensor) or other.dim() or runs_ahead(other.device):
        return None
    try:
        value = float(other)
    except RuntimeError:  # under a TorchDispatchMode, for example FlopCounterMode
        return None
    if is_product:
        return value
    return 1 / value if value else None


class BeforeBackward(TorchFunctionMode):
    """Calls `action(roots)` before every backward that the body runs on its thread, `loss.backward()` too."""

    def __init__(self, action: Callable[[Sequence[Tensor | GradientEdge]], None]) -> None:
        super().__init__()
        self._action = action

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            self._action(args[:1])
        elif func is torch.autograd.backward:
            self._action(args[0])
        return func(*args, **(kwargs or {}))
