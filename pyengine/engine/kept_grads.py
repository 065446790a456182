"""Gradients that the caller kept from one window to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn import Parameter

from pyengine.gradients import published
from pyengine.gradients.slots import as_gradient, local


class KeptGrads:
    """What is left in `.grad` after `unscale_` counts into the next window, as in a plain PyTorch loop.

    It is final: averaged already, so never averaged again.

    Args:
        names, params: in registration order.

    Attributes:
        is_callers: whether `.grad` is the caller's, until a step has used it or the next window keeps it.
    """

    def __init__(self, names: Sequence[str], params: Sequence[Parameter]) -> None:
        self._names, self._params = names, params
        self.is_callers = False
        self._kept: list[Tensor | None] = []

    @property
    def is_pending(self) -> bool:
        """Whether something is to be added to the window's gradients."""
        return any(grad is not None for grad in self._kept)

    def keep(self) -> None:
        """Copy what the caller has left in `.grad`, before the next window's gradients take its place.

        Cost: reads and writes every gradient once, and holds the copies until `add`; nothing where `.grad` is
        not the caller's.
        """
        if self.is_callers:
            self._kept = self._left()
            self.is_callers = False

    def add(self) -> Tensor:
        """Add what was kept to the final gradients of a window, in place.

        Returns:
            The 2-norm of what this rank holds of every sum, float64 `[parameters]`, on their device; 0 where
            there is none.

        Cost: reads what was kept and every gradient, writes that, and copies it to float64 for the norm.
        """
        for param, kept in zip(self._params, self._kept, strict=True):
            if kept is not None:
                if param.grad is None:
                    param.grad = as_gradient(kept, param)
                else:
                    local(param.grad).add_(kept)
        self._kept = []
        return published.norms(self._params)

    def clear(self) -> None:
        """Forget everything: it was used, or dropped."""
        self.is_callers = False
        self._kept = []

    def save(self) -> dict[str, Tensor]:
        """Return copies of what counts into a window still to be sent, by parameter name: of the shape of
        what this rank holds of the parameter and of its dtype each, owned by the caller.
        """
        kept = self._left() if self.is_callers else self._kept
        return {name: grad.clone() for name, grad in zip(self._names, kept, strict=False) if grad is not None}

    def load(self, saved: Mapping[str, Tensor], *, is_open: bool) -> None:
        """Load what was saved, in place of everything: into the open window, or back to the caller.

        Args:
            saved: what `save` returned; its tensors become this object's, or `.grad`.
            is_open: whether it counts into a window that is open.
        """
        kept = [saved.get(name) for name in self._names]
        self.clear()
        if is_open:
            self._kept = kept
        elif saved:
            for param, grad in zip(self._params, kept, strict=True):
                param.grad = None if grad is None else as_gradient(grad, param)
            self.is_callers = True

    def _left(self) -> list[Tensor | None]:
        return [None if param.grad is None else local(param.grad).clone() for param in self._params]
