"""Gradients that the caller kept from one window to the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter


class Carry:
    """Final gradients, to be added to the next window's: averaged already, so never averaged again.

    Args:
        params: parameters whose `.grad` the caller left in place.
        kept: copies of what was there.
    """

    def __init__(self, params: Sequence[Parameter], kept: Sequence[Tensor | None]) -> None:
        self._params, self.kept = list(params), list(kept)

    def add(self) -> Tensor:
        """Add what was kept to the final gradients of a window; return the 2-norm of the sums, float64, 0-dim."""
        for param, kept in zip(self._params, self.kept, strict=True):
            if kept is not None:
                param.grad = kept if param.grad is None else param.grad.add_(kept)
        norms = [p.grad.double().norm() for p in self._params if p.grad is not None]
        total: Tensor = torch.stack(norms).norm()
        return total


def gradients(params: Sequence[Parameter]) -> list[Tensor | None]:
    """Return copies of `.grad`."""
    return [None if p.grad is None else p.grad.clone() for p in params]
