"""What a backward starts from: checks of the loss, and a look at every backward that a block runs."""

from __future__ import annotations

import gc
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


def is_scaled(loss: Tensor | GradientEdge, scaler: Tensor | None, *, by_any: bool) -> bool:
    """Whether a GradScaler has multiplied a loss, or a term of it, already; from the graph alone.

    Args:
        scaler: the scale of the engine's own loss scaler; None if it has none.
        by_any: look for other scalers, too. Where a float32 0-dim tensor multiplies a loss, that takes
            milliseconds.
    """
    left, seen = [loss.grad_fn if isinstance(loss, Tensor) else loss.node], 0
    while left and seen < _MAX_TERMS:
        node, seen = left.pop(), seen + 1
        if node is None or node.name() not in _TERMS:
            continue
        left += [following for following, _ in node.next_functions]
        scale = _saved(node, "other", "self") if node.name() == "MulBackward0" else None
        if scale is None or scale.dim():
            continue
        if scale is scaler or (by_any and scaler is not scale and _belongs_to_scaler(scale)):
            return True
    return False


# Nodes behind which a scaled loss is one still: sums and multiples of losses.
_TERMS = {
    *("AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0", "NegBackward0", "ToCopyBackward0"),
    *("SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1", "StackBackward0", "ViewBackward0"),
}
_MAX_TERMS = 64


def _belongs_to_scaler(scale: Tensor) -> bool:
    """Whether a tensor is the scale of some GradScaler; Python numbers, which are float64, are none."""
    if scale.dtype is not torch.float32:
        return False
    # By type: `isinstance` asks objects for their class, and dead proxies raise.
    return any(
        issubclass(type(owner), torch.amp.GradScaler)
        or (type(owner) is dict and owner.get("_scale") is scale)
        for owner in gc.get_referrers(scale)
    )


def divided_by(loss: Tensor, divisors: Collection[int], count: object) -> int | None:
    """Return the one of `divisors` by which a mean, or a loss with a count, was divided; from its graph.

    A division that is multiplied away again is none, unless `count` is the factor: that makes a mean the sum.
    A division by 2, and of a sum without a count, has other reasons: two losses, or the items of a batch.
    """
    node, product, found = loss.grad_fn, 1.0, None
    while node is not None and node.name() in _SCALINGS:
        factor = _factor(node)
        if factor is not None and found is None and node.name() == "DivBackward0":
            found = next((each for each in divisors if each > 2 and math.isclose(factor * each, 1.0)), None)
        is_count = factor is not None and node.name() == "MulBackward0" and factor == count
        product *= 1.0 if factor is None or is_count else factor
        node = next((following for following, _ in node.next_functions if following is not None), None)
    if found is None or math.isclose(product, 1.0, rel_tol=1e-6):
        return None
    is_mean = node is not None and (node.name().startswith("Mean") or _reduction_of(node) == "mean")
    return found if is_mean or count is not None else None


def reduction_of(loss: Tensor) -> str:
    """Return "mean" or "sum" if a loss is just what one of torch's loss functions has returned, else ""."""
    return _reduction_of(loss.grad_fn)


def _reduction_of(node: Any) -> str:
    reduction = getattr(node, "_saved_reduction", None)  # torch's enum: none, mean, sum
    return {1: "mean", 2: "sum"}.get(reduction, "") if isinstance(reduction, int) else ""


def _saved(node: Any, *names: str) -> Tensor | None:
    """Return the first of the tensors that a node has saved under these names; None if it has none."""
    for name in names:
        try:
            value = getattr(node, f"_saved_{name}", None)
        except RuntimeError:  # written to since
            continue
        if isinstance(value, Tensor):
            return value
    return None


def _factor(node: Any) -> float | None:
    """Return the number by which a node of the graph multiplies; None where it is no number of the host."""
    is_product = node.name() == "MulBackward0"
    other = _saved(node, "other", "self") if is_product else _saved(node, "other")
    if other is None or other.dim() or runs_ahead(other.device):
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
