"""Gradients that no optimizer has used, which are carried into the next window."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from pyengine.gradients.published import local_grads
from pyengine.gradients.slots import as_gradient, dense, local
from pyengine.ops.device import runs_ahead

_MAX_NAMED = 3


class KeptGrads:
    """Keeps gradients that no optimizer has used, like a plain PyTorch loop without `zero_grad`.

    The gradient of a parameter is kept until an optimizer uses it or the user clears it, so that optimizers
    may step at different intervals. A kept gradient is already a mean; the engine adds it to the next
    window's mean.
    """

    def __init__(self, names: Sequence[str], params: Sequence[Parameter]) -> None:
        self._names, self._params = names, params
        self._known: set[int] = set()  # parameters that any optimizer has stepped so far
        self._has_warned = False
        self.clear()

    def clear(self) -> None:
        self._used: set[int] | None = None  # Indices of used gradients; None before the window is used.
        self._found_inf: Tensor | None = None  # The `found_inf` flag of the step that used the window.
        self._kept: dict[int, Tensor] = {}  # Gradients carried into this window, by parameter index.
        self._is_added = False
        self.is_handed_over = False  # whether the user took the gradients with `unscale_`

    @property
    def is_used(self) -> bool:
        """Whether an optimizer or the user (`unscale_`) has used the gradients of the window."""
        return self._used is not None

    def pending(self) -> tuple[int, ...]:
        """Return the indices of parameters whose kept gradients the engine must still add in this window."""
        return () if self._is_added else tuple(self._kept)

    def keeps(self, index: int) -> bool:
        """Whether a parameter's `.grad` is carried into the next window."""
        return self._used is not None and index not in self._used

    def has_left(self) -> bool:
        """Whether some gradient of the previous window, or some kept gradient, has not been used."""
        if self._used is None or self.pending():
            return True
        return any(
            param.grad is not None and index not in self._used for index, param in enumerate(self._params)
        )

    def hand_over(self) -> None:
        self._used, self.is_handed_over = self._used or set(), True

    def use(self, indices: Collection[int], found_inf: Tensor) -> None:
        """Record that an optimizer has used gradients, or has skipped its step if `found_inf` is nonzero.

        The host does not read `found_inf` here.
        """
        self._used = {*(self._used or ()), *indices}
        self._known.update(indices)
        self._found_inf = found_inf

    def keep(self) -> None:
        """Copy unused gradients from `.grad` before the gradients of the next window replace them."""
        if self._used is None:
            return  # there is no previous window
        left = self._left()
        self.clear()
        self._kept = left
        unknown = [index for index in self._kept if index not in self._known]
        if unknown and self._known and not self._has_warned:
            self._has_warned = True
            more = f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""
            names = ", ".join(repr(self._names[index]) for index in unknown[:_MAX_NAMED])
            warnings.warn(
                f"step {names}{more} too, set .grad to None, or freeze them, unless you want to keep their "
                "gradients: no optimizer has used these gradients, and they are added to the next window, as "
                "in a plain PyTorch loop without zero_grad",
                stacklevel=2,
            )

    def add(self) -> None:
        """Add the kept gradients to the mean gradients of a window, in place."""
        for index, kept in self._kept.items():
            param = self._params[index]
            if param.grad is None:
                param.grad = as_gradient(kept.clone(), param)
            else:
                local(param.grad).add_(kept)
        self._is_added = True

    def save(self) -> dict[str, Tensor]:
        """Return dense copies of the gradients that this rank carries into the next window, by name."""
        left = self._left() if self.is_used else {}
        return {self._names[index]: dense(grad).clone() for index, grad in left.items()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Set `.grad` to copies of the saved gradients, and discard all gradients kept so far."""
        self.clear()
        if saved:
            for name, param in zip(self._names, self._params, strict=True):
                part = saved[name].detach().to(param.device, copy=True) if name in saved else None
                param.grad = None if part is None else as_gradient(part, param)
            self.hand_over()

    def _left(self) -> dict[int, Tensor]:
        """Return copies of the gradients that are carried into the next window, by parameter index.

        Empty if all gradients were used. After a skipped window, only gradients kept from earlier windows are
        returned, because the gradients of the skipped window are not finite.
        """
        assert self._used is not None
        if len(self._used) == len(self._params):
            return {}
        left = {
            index: grad.clone()
            for index, grad in enumerate(local_grads(self._params))
            if grad is not None and index not in self._used
        }
        if self._found_inf is None or not left:
            return left
        before = self._kept
        if runs_ahead(self._found_inf.device):
            skips = self._found_inf != 0
            return {
                index: torch.where(skips, before.get(index, torch.zeros_like(grad)), grad)
                for index, grad in left.items()
            }
        return {index: before[index] for index in left if index in before} if bool(self._found_inf) else left
