"""Finite flags of a window's micro-batches, a row each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Made together: on an accelerator every making is a launch, and a row is a byte a parameter.
_ROWS = 16


class FlagRows:
    """Gives out rows of zeros, which nobody else has: they may outlive the window and this object.

    Args:
        num_slots: how long a row is.
        device: where the gradients lie.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._num_slots, self._device = num_slots, device
        self.begin()

    def begin(self) -> None:
        """Start a window: the next rows share no memory with those given out."""
        self._left: Iterator[Tensor] = iter(())

    def take(self) -> Tensor:
        """Return a row, uint8 `[num_slots]`, all zero; the caller's."""
        row = next(self._left, None)
        if row is None:
            rows = torch.zeros(_ROWS, self._num_slots, dtype=torch.uint8, device=self._device)
            self._left = iter(rows.unbind())
            row = next(self._left)
        return row
