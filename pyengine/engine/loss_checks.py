"""Detection of losses with a wrong scale, divisor or reduction, from the autograd graph."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pyengine.ops.device import runs_ahead
from pyengine.step.grad_scaler import GradScaler
from pyengine.window.counter import WindowCounter
from pyengine.window.header import Count, LocalWindow

# The operations that may follow a loss function: divisions, products, negations and casts.
_SCALINGS = {"DivBackward0", "MulBackward0", "NegBackward0", "ToCopyBackward0"}


class LossChecks:
    """Raises an error for losses that are already scaled; warns of suspicious losses in the first window."""

    def __init__(self, counter: WindowCounter, world_size: int) -> None:
        self._counter, self._world_size = counter, world_size
        # True until the first reduction after construction or after loading a state.
        self.is_first_window = True
        self._warned: set[str] = set()

    def refuse_scaled(self, loss: Tensor | GradientEdge, scaler: GradScaler | None) -> None:
        """Raise ValueError if a loss was already multiplied by a loss scale: only `backward` may do so."""
        is_first = self.is_first_window
        if (scaler is None and not is_first) or not is_scaled(
            loss, None if scaler is None else scaler.scale_tensor, by_any=is_first
        ):
            return
        if scaler is None:
            raise ValueError(
                "assign the loss scaler, sync.scaler = scaler, and give sync.backward the loss itself, "
                "without scaler.scale: a GradScaler that the engine does not know has scaled this loss, and "
                "nothing would unscale the gradients"
            )
        raise ValueError(
            "give sync.backward (or mb.backward) the loss itself, without scaler.scale: it was already "
            "scaled, and with sync.scaler set the engine scales it again. In a micro_batch block call "
            "sync.scaler.scale(loss).backward()"
        )

    def warn_of_division(self, loss: Tensor, count: object) -> None:
        """Warn once, in the first window, about a loss divided by the number of micro-batches in a window."""
        accumulate = self._counter.accumulate
        if not self.is_first_window or accumulate == 1 or "division" in self._warned:
            return
        divisor = divided_by(loss, {accumulate, accumulate * self._world_size}, count)
        if divisor is not None:
            self._warned.add("division")
            warnings.warn(
                f"leave the division by {divisor} out of the loss if it accounts for "
                f"accumulate={accumulate}: the engine already divides by the counts of all micro-batches, "
                "and dividing twice makes the gradient too small. (If the divisor is something else, such as "
                "the size of a batch, the loss is right.)",
                stacklevel=3,
            )

    def warn_of_reduction(self, loss: Tensor, count: Count | None) -> None:
        """Warn once, in the first window, about a sum without a count or a mean with a count."""
        if not self.is_first_window or "reduction" in self._warned:
            return
        reduction = reduction_of(loss)
        if reduction == "sum" and count is None:
            remedy = "pass the number of its items, count=, or let the loss be a mean"
        elif reduction == "mean" and count is not None and _is_above_1(count):
            remedy = "leave count= out, or let the loss be a sum (reduction='sum')"
        else:
            return
        self._warned.add("reduction")
        how, size = ("without a count", "large") if count is None else ("with a count", "small")
        warnings.warn(
            f"{remedy}: the loss is a {reduction}, as torch's loss function returned it, {how}. The "
            f"engine divides by counts, so the gradient would be too {size} by a factor of about the "
            "number of items in a micro-batch",
            stacklevel=3,
        )

    def warn_of_mixed_counts(self, counts: LocalWindow) -> None:
        """Warn once if a window has micro-batches without a count and micro-batches with a count above 1."""
        is_left_out = counts.batch is not None and not counts.batch.is_counting
        if not counts.has_uncounted or is_left_out or "mixed counts" in self._warned:
            return
        known = counts.known(counts.counts)
        if len(known) == len(counts.counts) and max(known, default=0) <= 1:
            return
        self._warned.add("mixed counts")
        listed = ", ".join(f"{count:g}" for count in known[:8])
        warnings.warn(
            "pass count= in every micro-batch of a window or in none: a micro-batch without a count counts "
            f"as 1 item (this window's counts: {listed}{', ...' if len(counts.counts) > 8 else ''}), so its "
            "mean loss weighs as much as a single item of another micro-batch",
            stacklevel=3,
        )


def _is_above_1(count: Count) -> bool:
    """Whether a count is above 1; True for a count on a device, which the host does not read."""
    return (isinstance(count, Tensor) and runs_ahead(count.device)) or bool(count > 1)


def is_scaled(loss: Tensor | GradientEdge, scaler: Tensor | None, *, by_any: bool) -> bool:
    """Whether the graph shows that a GradScaler has already multiplied a loss or a term of the loss.

    Args:
        scaler: the scale of the engine's own loss scaler; None if the engine has no loss scaler.
        by_any: whether to search for other scalers as well. If the loss is multiplied by a 0-dim float32
            tensor, the search takes milliseconds.
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


# Graph nodes whose output is still scaled if an input is scaled: sums and multiples of losses.
_TERMS = {
    *("AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0", "NegBackward0", "ToCopyBackward0"),
    *("SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1", "StackBackward0", "ViewBackward0"),
}
_MAX_TERMS = 64


def _belongs_to_scaler(scale: Tensor) -> bool:
    """Whether a tensor is a GradScaler's scale; False for a Python number, which is saved as float64."""
    if scale.dtype is not torch.float32:
        return False
    # `isinstance` asks each object for its class, and a dead weak proxy would raise an error.
    return any(
        issubclass(type(owner), torch.amp.GradScaler)
        or (type(owner) is dict and owner.get("_scale") is scale)
        for owner in gc.get_referrers(scale)
    )


def divided_by(loss: Tensor, divisors: Collection[int], count: object) -> int | None:
    """Return the divisor of a mean, or of a loss with a count, if it is in `divisors`; otherwise None.

    The divisor is found in the graph. A division is ignored in three cases: a later multiplication undoes it
    (unless the factor is `count`, which turns a mean into a sum); the divisor is 2, as in the average of two
    losses; or the loss is a sum without a count, which may be divided by the number of items in a batch.
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
    """Return "mean" or "sum" if a loss is the unchanged result of a torch loss function, otherwise ""."""
    return _reduction_of(loss.grad_fn)


def _reduction_of(node: Any) -> str:
    reduction = getattr(node, "_saved_reduction", None)  # an enum in torch: none, mean, sum
    return {1: "mean", 2: "sum"}.get(reduction, "") if isinstance(reduction, int) else ""


def _saved(node: Any, *names: str) -> Tensor | None:
    """Return the first of these saved tensors of an autograd node, or None."""
    for name in names:
        try:
            value = getattr(node, f"_saved_{name}", None)
        except RuntimeError:  # the tensor was written to after the forward
            continue
        if isinstance(value, Tensor):
            return value
    return None


def _factor(node: Any) -> float | None:
    """Return the factor by which a node multiplies its input; None unless it is a number on the host."""
    is_product = node.name() == "MulBackward0"
    other = _saved(node, "other", "self") if is_product else _saved(node, "other")
    if other is None or other.dim() or runs_ahead(other.device):
        return None
    try:
        value = float(other)
    except RuntimeError:  # for example under FlopCounterMode, a TorchDispatchMode
        return None
    if is_product:
        return value
    return 1 / value if value else None
